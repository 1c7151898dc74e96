"""Planned step times beside measured ones, on this machine's CPU.

    python -m benchmarks.planner_time

Rates are measured and steps are run in turn, in one process on one core, so that both meet the same
machine; seconds are the process's CPU seconds, which on one core are what a clock shows where
nothing else runs. Of each the least of all rounds counts; rows of models that
``--models`` leaves out are kept. The planner knows the model's config, the
rates, and nothing of the measured steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.batches import images_and_text
from benchmarks.common import environment, kept, write
from jaxvlm.config import (
    Config,
    ConnectorConfig,
    DecoderConfig,
    DualConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    TextConfig,
    VisionConfig,
)
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.distributed.processes import keep_freed_memory
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.planner.hardware import calibrate, machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request import abstract_devices, pairs
from jaxvlm.planner.time import step_time as step_times
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.trainer.training import build_training
from jaxvlm.types import Batch, Pairs


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a batch."""

    config: ModelConfig | DualConfig
    rows: int
    length: int
    images: int = 1
    patches: int = 0
    frozen: tuple[str, ...] = ()


_CLIP = VisionConfig(
    image_size=224, patch_size=16, width=384, depth=6, num_heads=6, mlp_dim=1536,
    activation="quick_gelu", class_token=True, pre_norm=True, feature_layer=-2,
)  # fmt: skip
_LLAMA = DecoderConfig(
    vocab_size=8192, width=512, depth=6, num_heads=8, num_kv_heads=8, head_dim=64, mlp_dim=1376,
    tied_embeddings=False,
)  # fmt: skip
CASES = {
    "LLaVA-like": Case(ModelConfig(_CLIP, ConnectorConfig(), _LLAMA), 2, 384),
    "LLaVA-like, tower frozen, remat": Case(
        ModelConfig(_CLIP, ConnectorConfig(), dataclasses.replace(_LLAMA, remat="full")),
        2, 384, frozen=("vision/*",),
    ),
    "Qwen3-VL-like": Case(
        ModelConfig(
            VisionConfig(
                image_size=256, patch_size=16, width=384, depth=6, num_heads=6, mlp_dim=1536,
                activation="gelu_tanh", packed=True, patch_layout="cthw", frames=2, merge_block=2,
                rope_theta=1e4, post_norm=False, final_norm=False, feature_layers=(-1, -4, -2),
            ),
            ConnectorConfig(merge=2, norm="layer", deepstack_levels=2, hidden=1536),
            DecoderConfig(
                vocab_size=8192, width=512, depth=6, num_heads=8, num_kv_heads=2, head_dim=64,
                mlp_dim=1536, qk_norm=True, rope_sections=(12, 10, 10), rope_interleaved=True,
            ),
        ),
        2, 256, patches=512,
    ),
    "PaliGemma-like": Case(
        ModelConfig(
            VisionConfig(
                image_size=224, patch_size=14, width=384, depth=6, num_heads=6, mlp_dim=1536,
                activation="gelu_tanh",
            ),
            ConnectorConfig(kind="linear"),
            DecoderConfig(
                vocab_size=16384, width=512, depth=6, num_heads=4, num_kv_heads=1, head_dim=128,
                mlp_dim=2048, activation="gelu_tanh", norm="rms_plus_one", visual_mask="prompt",
                embed_scale=512**0.5,
            ),
        ),
        2, 320,
    ),
    "decoder alone": Case(ModelConfig(decoder=_LLAMA), 2, 512, images=0),
    "CLIP-like, InfoNCE": Case(
        DualConfig(
            vision=VisionConfig(
                image_size=224, patch_size=32, width=512, depth=6, num_heads=8, mlp_dim=2048,
                activation="quick_gelu", class_token=True, pre_norm=True, pool="class",
            ),
            text=TextConfig(
                vocab_size=8192, width=384, depth=6, num_heads=6, mlp_dim=1536, max_length=77,
                activation="quick_gelu", causal=True, pool="largest",
            ),
            embed_dim=256,
        ),
        16, 77,
    ),
    "MiniLM-like, pairs of texts": Case(
        DualConfig(
            towers=("text",), project=(), embed_dim=384,
            text=TextConfig(
                vocab_size=16384, width=384, depth=6, num_heads=12, mlp_dim=1536, max_length=128,
                num_types=2, norm_after=True,
            ),
        ),
        32, 128, images=0,
    ),
}  # fmt: skip


def batch_of(case: Case) -> Batch:
    """Rows of one segment."""
    if not case.images:
        made = images_and_text(case.config, case.rows, case.length, 1)
        return made._replace(pixels=None, image_start=None)
    made = images_and_text(case.config, case.rows, case.length, case.images)
    vision = case.config.vision
    if not vision.packed:
        return made
    side = int((case.patches / case.images) ** 0.5 // vision.merge_block * vision.merge_block)
    grid = np.tile(np.asarray([1, side, case.patches // case.images // side], np.int32),
                   (case.rows, case.images, 1))  # fmt: skip
    width = 3 * vision.frames * vision.patch_size**2
    patches = np.random.default_rng(0).integers(0, 256, (case.rows, case.patches, width), np.uint8)
    positions = np.repeat(made.positions, max(1, len(case.config.decoder.rope_sections)), axis=1)
    return made._replace(pixels=None, patches=patches, grid=grid, positions=positions)


def pairs_of(case: Case) -> Pairs:
    """Images and their texts, or texts and their texts."""
    rng, vision = np.random.default_rng(0), case.config.vision
    count = case.rows if case.images else case.rows // 2

    def texts(*lead: int) -> Batch:
        place = np.broadcast_to(np.arange(case.length, dtype=np.int32), (*lead, case.length))
        ones = np.ones_like(place)
        tokens = rng.integers(0, case.config.text.vocab_size, place.shape).astype(np.int32)
        return Batch(tokens, ones.astype(np.float32), place[..., None, :], ones)

    query = texts(count)
    if case.images:
        none = np.zeros((count, 0), np.int32)
        shape = (count, 1, vision.image_size, vision.image_size, 3)
        query = Batch(
            none, none.astype(np.float32), none[:, None], none,
            pixels=rng.integers(0, 256, shape, np.uint8),
            image_start=np.zeros((count, 1), np.int32),
        )  # fmt: skip
    key = np.arange(count, dtype=np.int32)
    return Pairs(query, texts(count, 1), np.ones((count, 1), bool), key, key[:, None] + count)


class Step:
    """A model's real train step, compiled."""

    def __init__(self, case: Case):
        mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
        if isinstance(case.config, DualConfig):
            run = Config(
                embedder="dual", dual=case.config, loss=LossConfig(name="info_nce"), steps=1000
            )
            model = build_model(case.config, mesh)
            made = build_training(run, model, 1000, lambda _: None)
            self.state, self.batch = made.init(model.init(0)), jax.device_put(pairs_of(case))
            self.program = made.step.get(self.state, self.batch)
            self.seconds()
            return
        model = build_model(case.config, mesh)
        step, _, init = assemble(model, NextToken(), optax.adamw(1e-4), frozen=case.frozen)
        self.state, self.batch = init(model.init(0)), jax.device_put(batch_of(case))
        self.program = step.lower(self.state, self.batch).compile()
        self.seconds()

    def seconds(self) -> float:
        """CPU seconds of a step."""
        start = time.process_time()
        self.state, metrics = self.program(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.process_time() - start


def planned(case: Case, rates: calibrate.Rates) -> step_times.StepTime:
    """What the planner says."""
    setup = step_memory.StepSetup(
        case.config, MeshConfig(data=1), PRESETS["single"], "cpu", case.rows, case.length,
        case.images, case.patches, case.frozen,
    )  # fmt: skip
    if isinstance(case.config, DualConfig):
        run = Config(embedder="dual", loss=LossConfig(name="info_nce"))
        text = abstract_devices.BatchShape(case.length)
        query = abstract_devices.BatchShape(0, 1) if case.images else text
        count = case.rows if case.images else case.rows // 2
        setup = setup._replace(
            rows=count, pairs=pairs.PairShapes(query, text, pairs.embedding_settings(run))
        )
    return step_times.step_time(setup, machine.parse("cpu:1", case.config.dtype, rates))


def merged(found: list[calibrate.Rates]) -> calibrate.Rates:
    """The best of each rate."""

    def best(*values: Any) -> Any:
        if isinstance(values[0], dict):
            return {key: best(*(v[key] for v in values)) for key in values[0]}
        return values[0] if isinstance(values[0], str) else max(values)

    return calibrate.Rates(*(best(*values) for values in zip(*found)))


def one_core() -> None:
    """Before JAX makes its first array, and counts the cores with it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    )


def main() -> None:
    """Measure all in turn, print a line each, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(CASES))
    args = parser.parse_args()
    one_core()
    keep_freed_memory()
    here = environment()
    steps = {name: Step(CASES[name]) for name in args.models}
    found: list[calibrate.Rates] = []
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        found.append(calibrate.measure(dtypes=("float32",), repeats=2, clock=time.process_time))
        for name, step in steps.items():
            spent[name] += [step.seconds() for _ in range(3)]
    rates, rows = merged(found), []
    for name, seconds in spent.items():
        said = planned(CASES[name], rates)
        rows.append({
            "model": name,
            "planned_ms": round(1e3 * said.total, 1),
            "measured_ms": round(1e3 * min(seconds), 1),
            "measured_median_ms": round(1e3 * statistics.median(seconds), 1),
            "ratio": round(said.total / min(seconds), 3),
            "matmuls_ms": round(1e3 * said.compute, 1),
            "memory_ms": round(1e3 * said.hbm, 1),
            "parts_ms": {part: round(1e3 * s, 1) for part, s in said.parts.items()},
            "hardware_gflops": round(said.hardware_flops / 1e9, 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    note = (
        "Other work ran on this machine all the while (see load_average_at_start). planned_ms is "
        "of the best rate of all rounds, as measured_ms is of the best step. rates and environment "
        "are of the last run; rows of models that it did not ask for are of an earlier one."
    )
    rows += [row for row in kept("planner_time_cpu") if row["model"] not in spent]
    write("planner_time_cpu.json", {"rows": rows, "rates": rates._asdict(), "note": note,
                                    "environment": here})  # fmt: skip


if __name__ == "__main__":
    main()
