"""Train steps of published models as jaxvlm runs them: time, MFU, memory beside its forecasts."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.accelerator_parts import Unavailable, models, setup, trace
from jaxvlm.cache.cached_step import make_cache
from jaxvlm.config import (
    CacheConfig,
    Config,
    DualConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    StrategyConfig,
)
from jaxvlm.losses.registry import make_loss
from jaxvlm.models import model_flops
from jaxvlm.optim.optimizer import make_optimizer, make_schedule
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request import request
from jaxvlm.planner.search import candidates
from jaxvlm.spmd.model import Model, build_model
from jaxvlm.spmd.train_step import assemble, split
from jaxvlm.train import chips, program_memory
from jaxvlm.train.gradcache import rows_of
from jaxvlm.types import PAGE, Batch, Pairs

CONVENTION = (
    "matmuls x 2, causal half, no recomputation, no padding; a frozen part without backward"
)
STRATEGIES: dict[str, tuple[str, dict[str, int], int]] = {
    "": ("single", {}, 1),
    "fsdp": ("fsdp", {}, 1),
    "ddp": ("ddp", {}, 1),
    "zero1": ("zero1", {}, 1),
    "hybrid_shard": ("hybrid_shard", {"data": 2}, 1),
    "fsdp x tensor": ("fsdp", {"tensor": 2}, 1),
    "pipeline": ("ddp", {"pipeline": 2}, 4),
}
"""Name -> preset, sizes of mesh axes that it does not choose, microbatches."""


class Job(NamedTuple):
    """A train step: settings, model and batch."""

    config: Config
    setup: step_memory.StepSetup
    model: Model
    batch: Batch | Pairs
    trained: dict[str, Any]


def train(
    tiny: bool,
    model: str,
    remat: str = "none",
    trained: str = "full",
    shared: bool = False,
    mini_batch: bool = False,
    cache: str = "",
    strategy: str = "",
) -> Iterator[dict[str, Any]]:
    """Figures of a train step.

    Args:
        tiny: whether the model is a toy.
        model: name in ``jaxvlm.hf.model_zoo``.
        remat: none | dots | full.
        trained: full | lora, whose frozen weights are bfloat16.
        shared: several questions share a conversation's images.
        mini_batch: GradCache, in four mini-batches.
        cache: "" | off | warm: a frozen vision encoder, whose tokens are cached or not.
        strategy: name in ``STRATEGIES``; with one, on all devices.
    """
    devices = setup.devices(tiny, 0 if strategy else 1)
    job = job_of(tiny, model, remat, trained, shared, mini_batch, cache, strategy, devices)
    yield from measure(job, tiny, devices, cache == "warm")
    yield from planned(job)


def job_of(
    tiny: bool, name: str, remat: str, trained: str, shared: bool, mini_batch: bool, cache: str,
    strategy: str, devices: list[Any],
) -> Job:  # fmt: skip
    """The settings of ``jaxvlm plan``, the model on its mesh, and a batch of random rows."""
    platform, rows = devices[0].platform, models.rows_of(name, tiny)
    rows = rows._replace(rows=rows.rows * (len(devices) if strategy else 1))
    preset, sizes, microbatches = STRATEGIES[strategy]
    mesh, resolved = resolve(StrategyConfig(name=preset), MeshConfig(**sizes), devices)
    # Its chip is not read; requests know no platform without one.
    there = machine.parse(f"cpu:{len(devices)}")._replace(platform=platform)
    patches = rows.images * rows.side**2
    length = 0 if name.startswith("clip") else rows.length
    flags = request.RequestFlags(rows.rows, length, train="lora" if trained == "lora" else "")
    asked = request.plan_request(name, None, there, flags)
    if not asked.pairs:
        asked = asked._replace(images=rows.images, patches=patches)
    network = dataclasses.replace(
        models.network(name, tiny), dtype=asked.config.network.dtype,
        lora=asked.config.network.lora,
    )  # fmt: skip
    frozen = ("vision/*",) if cache else asked.config.optim.frozen
    optim = OptimConfig(learning_rate=1e-4, schedule="constant", warmup_steps=0, frozen=frozen)
    config = request.with_network(dataclasses.replace(asked.config, optim=optim), network)
    if asked.pairs:
        text = asked.pairs.document._replace(length=rows.length)
        asked = asked._replace(pairs=asked.pairs._replace(document=text))
    part = rows.rows // 4 if mini_batch else 0
    way = candidates.Candidate(preset, mesh, resolved, remat, microbatches,
                               mini_batches=(part, part))  # fmt: skip
    found = candidates.setup_of(asked._replace(config=config), way)
    built: Any = build_model(found.config, make_mesh(mesh, devices), resolved)
    built = built.holding(dict(found.held))
    config = dataclasses.replace(
        request.with_network(config, found.config), microbatches=microbatches
    )
    batch: Batch | Pairs
    if isinstance(network, DualConfig):
        batch = models.image_text_pairs(network, rows)
    else:
        batch = models.batch(network, rows, shared)
    return Job(config, found, built, batch, split(built, built.shapes, frozen)[0])


def measure(job: Job, tiny: bool, devices: list[Any], warm: bool) -> Iterator[dict[str, Any]]:
    """Compile the step, and run it on one batch."""
    config, model, batch = job.config, job.model, job.batch
    schedule = make_schedule(config.optim, 100)
    tx = make_optimizer(config.optim, schedule, {p: model.logical[p] for p in job.trained})
    pairs = job.setup.pairs
    cached = None
    if warm:
        batch, pages, window = with_pages(job)
        cached = make_cache(CacheConfig("strict", encode_batch=8), model, list(job.trained), pages,
                            (window,), schedule)  # fmt: skip
    step, _, init = assemble(
        model, make_loss(config, model.mesh), tx, config.microbatches, config.optim.frozen, cached,
        pairs.mini_batches if pairs else None,
    )  # fmt: skip
    begun = time.perf_counter()
    state = jax.block_until_ready(init(model.init(0)))
    yield {
        "parameters": sum(int(np.prod(x.shape)) for x in model.shapes.values()),
        "trained_parameters": sum(int(np.prod(x.shape)) for x in job.trained.values()),
        "mesh": {axis: n for axis, n in model.mesh.shape.items() if n > 1},
        "batch": shape_of(batch),
        "init_s": round(time.perf_counter() - begun, 1),
    }
    placed = to_global(model.mesh, batch, job.setup.rows)
    begun = time.perf_counter()
    program = step.lower(state, placed).compile()
    memory = program_memory.memory(program)
    yield {
        "compile_s": round(time.perf_counter() - begun, 1),
        "compiler_gib": {name: setup.gib(n) for name, n in memory.items()},
    }
    seconds, losses, metrics = [], [], {}
    for _ in range(3 if tiny else 12):
        begun = time.perf_counter()
        state, metrics = program(state, placed)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - begun)
    hits = {"cache_hit_rate": float(metrics["cache/hit_rate"])} if warm else {}
    yield rates(job, devices, statistics.median(seconds[2:])) | hits
    peak = (devices[0].memory_stats() or {}).get("peak_bytes_in_use")
    yield {
        "peak_gib": None if peak is None else setup.gib(peak),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    held = [state]

    def once() -> None:
        held[0], metrics = program(held[0], placed)
        jax.block_until_ready(metrics)

    try:
        yield trace.kernels(once, 2)
    except Exception as error:  # a figure of several, and the others stand
        yield {"kernels_why": f"{type(error).__name__}: {error}"[:300]}


def rates(job: Job, devices: list[Any], median: float) -> dict[str, Any]:
    """What a step of so many seconds amounts to."""
    flops = flops_of(job) / len(devices)
    chip = chips.lookup(devices[0].device_kind, job.model.config.dtype)
    batch = job.batch
    if isinstance(batch, Pairs):
        per_s = {"pairs_per_s": round(len(batch.query_key) / median, 1)}
    else:
        per_s = {"tokens_per_s": round(float((batch.segment > 0).sum()) / median, 1)}
    return {
        "median_ms": round(1e3 * median, 3),
        **per_s,
        "model_tflop_per_device": round(flops / 1e12, 6),
        "model_flop_convention": CONVENTION,
        "tflop_per_s_per_device": round(flops / median / 1e12, 4),
        "mfu": None if chip is None else round(flops / median / chip.peak_flops, 4),
        "mfu_against": None if chip is None else f"{chip.name}, {chip.peak_flops / 1e12:g} TFLOP/s",
    }


def flops_of(job: Job) -> float:
    """Model FLOPs of a step that encodes all its images."""
    config, batch = job.model.config, job.batch
    if isinstance(batch, Pairs):
        assert isinstance(config, DualConfig)
        sides = (batch.query, rows_of(batch.document))
        return sum(model_flops.encoders(config, x, job.trained).total for x in sides)
    assert isinstance(config, ModelConfig)
    return model_flops.of_batch(config, job.trained, batch)[1].total


def shape_of(batch: Batch | Pairs) -> dict[str, list[int]]:
    """Shapes of a batch's tokens, pixels and patches."""
    each = {"": batch} if isinstance(batch, Batch) else {"query ": batch.query,
                                                        "document ": batch.document}  # fmt: skip
    return {
        f"{side}{name}": list(getattr(x, name).shape)
        for side, x in each.items()
        for name in ("tokens", "pixels", "patches")
        if getattr(x, name) is not None
    }


def with_pages(job: Job) -> tuple[Batch, int, int]:
    """The batch with a key and pages for each image; the number of pages, and tokens an image."""
    batch, vision = job.batch, job.model.config.vision
    if not isinstance(batch, Batch) or vision.packed:
        raise Unavailable("this part caches images of one size")
    tokens = (vision.image_size // vision.patch_size) ** 2
    each, count = -(-tokens // PAGE), batch.image_start.size
    number = np.arange(count).reshape(batch.image_start.shape)
    key = np.stack([number + 1] * 4, axis=-1).astype(np.uint32)
    pages = (each * number[..., None] + np.arange(each)).astype(np.int32)
    return batch._replace(image_key=key, image_pages=pages), each * count, tokens


def planned(job: Job) -> Iterator[dict[str, Any]]:
    """The planner's estimate of the step's memory; it knows nothing of the compiled program."""
    try:
        found = step_memory.estimate(job.setup)
    except Exception as error:  # a figure of several, and the others stand
        yield {"planned_why": f"{type(error).__name__}: {error}"[:300]}
        return
    yield {
        "planned_gib": {
            "states": setup.gib(sum(found.states.values())),
            "work": setup.gib(sum(found.work.values())),
            "peak": setup.gib(found.peak),
        }
    }
