"""The planner's memory beside the compilers': the same train steps, predicted and compiled.

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m benchmarks.planner [--targets h200:8 ...]

Published vision-language models at their real sizes on eight devices: strategies, remat, rows a
device, what is trained and the target are drawn from a fixed seed. ``open`` points are those that
the planner's rules were found on; the prediction for a ``held`` one is written down (``--say``)
before it is compiled. ``pairs`` points are held ones too, of contrastive training (CLIP, SigLIP,
and vision-language models that make embeddings), whole and in mini-batches. When rules change, held
points
that they were found on become open ones, and others are drawn. A compilation takes up to minutes:
rows that are in the result are kept.

Of TPUs' programs the buffer assignment is read, and code is not generated: what the compiler gives
the program's arguments and its heap of temporaries.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

# With no GPU there is nothing to tune by, and XLA's Triton matmuls find no tiles for some widths.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_gpu_enable_triton_gemm=false"
    )

import jax

from benchmarks.common import environment, kept, write
from jaxvlm.config import (
    Config,
    ConfigError,
    DualConfig,
    LoraConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    StrategyConfig,
)
from jaxvlm.hf import model_zoo
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.compiled import topology, verify
from jaxvlm.planner.hardware.machine import parse
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request import abstract_devices
from jaxvlm.planner.request.abstract_devices import BatchShape
from jaxvlm.planner.request.pairs import PairShapes, embedding_settings
from jaxvlm.train.gradcache import MiniBatch

NAME = "planner_memory"
MODELS = (
    "llava-1.5-7b", "qwen2.5-vl-3b", "qwen3-vl-2b", "gemma-3-4b", "smolvlm-2.2b", "paligemma2-3b",
)  # fmt: skip
HELD_MODELS = (*MODELS, "internvl3-8b", "qwen3-vl-4b")
_TOO_MUCH = "said not to fit: it is not compiled"
DRAWS = {"h200:8": (5, 5), "cpu:8": (5, 5), "v5p:2x2x2": (3, 4), "v5e:2x4": (3, 4)}
"""The target's first draw of held points, and the last: those before are open now. All began anew
when attention came to be by the kernels that runs use, and cross-entropy by slices of a matrix.
"""
TARGETS = ("h200:8", "cpu:8", "v5p:2x2x2", "v6e:2x4", "v5e:2x4")
PLATFORMS = {"h200": "gpu", "cpu": "cpu", "v5p": "tpu", "v6e": "tpu", "v5e": "tpu"}
MESHES = {
    "ddp": MeshConfig(data=8),
    "zero1": MeshConfig(data=1, fsdp=8),
    "zero2": MeshConfig(data=1, fsdp=8),
    "fsdp": MeshConfig(data=1, fsdp=8),
    "hybrid_shard": MeshConfig(data=2, fsdp=4),
    "fsdp x tensor": MeshConfig(data=1, fsdp=4, tensor=2),
}


class Point(NamedTuple):
    """A train step."""

    target: str
    model: str
    strategy: str
    """Of :data:`MESHES`; of pairs followed by `` grad_cache=N``."""
    remat: str
    rows: int
    """A batch shard's."""
    length: int
    trained: str
    """all | decoder (the tower is frozen) | adapters."""


def points(target: str, kind: str, count: int = 16) -> list[Point]:
    """Those of a target, open or held: each model, strategy and remat about as often."""
    first, last = DRAWS.get(target, (3, 3))
    if kind == "held":
        return _drawn(target, HELD_MODELS, f"{target} held {last}", count)
    before = [_drawn(target, HELD_MODELS, f"{target} held {n}", count) for n in range(first, last)]
    return [*_drawn(target, MODELS, target, count), *itertools.chain(*before)]


def _drawn(target: str, models: tuple[str, ...], seed: str, count: int) -> list[Point]:
    rng = random.Random(seed)

    def dealt(choices: tuple[Any, ...]) -> list[Any]:
        found = [choices[i % len(choices)] for i in range(count)]
        rng.shuffle(found)
        return found

    small = target in ("v5e:2x4", "v6e:2x4")
    strategies = ("fsdp", "hybrid_shard", "fsdp x tensor", "zero2", "zero1", "ddp")
    drawn = zip(
        dealt(models),
        dealt(strategies[:3] if small else strategies),
        dealt(("full", "dots", "full", "none")),
        dealt((1, 2) if small else (1, 2, 4, 8)),
        dealt((1024, 2048)),
        dealt(("all", "decoder", "all", "adapters")),
        strict=True,
    )
    return [Point(target, *x) for x in drawn]


PAIRS = (
    ("clip-vit-b-32", "ddp", "none", 64, 77, "all"),
    ("clip-vit-b-32", "ddp grad_cache=16", "none", 128, 77, "all"),
    ("clip-vit-b-32", "fsdp", "full", 128, 77, "all"),
    ("clip-vit-l-14", "fsdp grad_cache=8", "none", 32, 77, "all"),
    ("clip-vit-l-14", "hybrid_shard", "dots", 16, 77, "decoder"),
    ("siglip2-so400m", "fsdp grad_cache=4", "full", 16, 64, "all"),
    ("smolvlm-500m", "fsdp", "full", 4, 512, "all"),
    ("qwen3-vl-2b", "fsdp grad_cache=2", "full", 8, 512, "adapters"),
)
"""Those of pairs; a vision-language model's documents have ``length`` tokens, queries 128."""
MORE_PAIRS = (
    ("siglip2-so400m", "ddp", "none", 32, 64, "all"),
    ("clip-vit-l-14", "zero2 grad_cache=16", "full", 64, 77, "all"),
    ("clip-vit-b-32", "hybrid_shard grad_cache=32", "dots", 256, 77, "all"),
    ("siglip2-so400m", "fsdp", "dots", 32, 64, "all"),
    ("clip-vit-l-14", "ddp grad_cache=8", "full", 64, 77, "all"),
    ("clip-vit-b-32", "zero1", "none", 128, 77, "decoder"),
    ("qwen2.5-vl-3b", "zero1 grad_cache=2", "full", 4, 512, "all"),
    ("smolvlm-500m", "ddp grad_cache=2", "dots", 8, 512, "adapters"),
    ("gemma-3-4b", "hybrid_shard grad_cache=1", "none", 4, 512, "decoder"),
)
"""More of them, on GPUs and CPUs."""
PAIRS_ON_CPU = (
    ("clip-vit-l-14", "zero1", "dots", 32, 77, "all"),
    ("siglip2-so400m", "hybrid_shard grad_cache=8", "full", 32, 64, "decoder"),
    ("clip-vit-b-32", "ddp grad_cache=32", "full", 128, 77, "all"),
    ("qwen3-vl-2b", "zero2 grad_cache=2", "dots", 4, 512, "adapters"),
    ("smolvlm-500m", "hybrid_shard", "none", 4, 512, "all"),
    ("gemma-3-4b", "fsdp grad_cache=1", "full", 2, 512, "all"),
    ("siglip2-so400m", "zero2", "full", 64, 64, "all"),
    ("clip-vit-l-14", "fsdp grad_cache=16", "dots", 64, 77, "all"),
    ("paligemma2-3b", "fsdp grad_cache=2", "full", 4, 512, "all"),
    ("qwen2.5-vl-3b", "hybrid_shard", "full", 2, 512, "adapters"),
    ("smolvlm-500m", "fsdp grad_cache=4", "none", 8, 512, "decoder"),
    ("internvl3-8b", "ddp grad_cache=1", "full", 2, 512, "all"),
    ("internvl3-8b", "zero2 grad_cache=2", "full", 4, 512, "decoder"),
    ("smolvlm-500m", "ddp grad_cache=4", "full", 8, 512, "all"),
    ("clip-vit-l-14", "hybrid_shard grad_cache=8", "none", 32, 77, "all"),
    ("siglip2-so400m", "zero1 grad_cache=16", "dots", 32, 64, "all"),
    ("qwen2.5-vl-3b", "fsdp grad_cache=1", "none", 2, 512, "all"),
    ("paligemma2-3b", "ddp", "dots", 2, 512, "adapters"),
    ("clip-vit-b-32", "fsdp", "dots", 256, 77, "decoder"),
    ("gemma-3-4b", "zero1 grad_cache=1", "full", 2, 512, "adapters"),
    ("siglip2-so400m", "ddp grad_cache=8", "dots", 16, 64, "all"),
    ("smolvlm-500m", "zero2 grad_cache=2", "full", 8, 512, "all"),
    ("qwen3-vl-2b", "ddp grad_cache=2", "full", 4, 512, "all"),
    ("paligemma2-3b", "hybrid_shard grad_cache=1", "dots", 4, 512, "decoder"),
    ("internvl3-8b", "fsdp grad_cache=2", "full", 4, 512, "all"),
    ("clip-vit-l-14", "zero1 grad_cache=8", "full", 32, 77, "decoder"),
    ("clip-vit-b-32", "hybrid_shard", "full", 128, 77, "all"),
    ("gemma-3-4b", "ddp grad_cache=2", "none", 4, 512, "adapters"),
)
"""And more, on CPUs."""


def pair_points(target: str) -> list[Point]:
    """Those of a target."""
    more = {"gpu": MORE_PAIRS, "cpu": (*MORE_PAIRS, *PAIRS_ON_CPU)}
    found = (*PAIRS, *more.get(PLATFORMS[target.split(":")[0]], ()))
    return [Point(target, *x) for x in found]


def model_config(point: Point) -> ModelConfig | DualConfig:
    """The published model as it is trained there."""
    config: Any = model_zoo.config_of(point.model)
    lora = LoraConfig(rank=16) if point.trained == "adapters" else LoraConfig()
    name = "text" if isinstance(config, DualConfig) else "decoder"
    return dataclasses.replace(
        config,
        vision=dataclasses.replace(config.vision, remat=point.remat),
        **{name: dataclasses.replace(getattr(config, name), remat=point.remat)},
        dtype="float32" if point.target.startswith("cpu") else "bfloat16",
        lora=lora,
    )


def images(config: ModelConfig, length: int) -> tuple[int, int]:
    """(images, patches) of a row: about half of its tokens are theirs."""
    if config.vision.packed:
        return 2, length // 2 * config.connector.merge**2
    return max(1, length // 2 // num_visual_tokens(config)), 0


def frozen(point: Point) -> tuple[str, ...]:
    """Path patterns."""
    return ("vision/*",) if point.trained == "decoder" else ()


def setup_of(point: Point, devices: Sequence[Any]) -> step_memory.StepSetup:
    """What is planned, and compiled."""
    config, platform = model_config(point), PLATFORMS[point.target.split(":")[0]]
    name, _, mini_batch = point.strategy.partition(" grad_cache=")
    preset = "fsdp" if " x " in name else name
    mesh, strategy = resolve(StrategyConfig(preset), MESHES[name], devices)
    rows = point.rows * mesh.data * mesh.fsdp
    if point in pair_points(point.target):
        row, pairing = pairing_of(config, point.length, int(mini_batch or 0))
        how = (frozen(point), pairing.parts(point.rows), pairing)
        return step_memory.StepSetup(config, mesh, strategy, platform, rows, *row, *how)
    assert isinstance(config, ModelConfig)
    count, patches = images(config, point.length)
    return step_memory.StepSetup(
        config, mesh, strategy, platform, rows, point.length, count, patches, frozen(point)
    )


def pairing_of(
    config: ModelConfig | DualConfig, length: int, mini_batch: int
) -> tuple[BatchShape, PairShapes]:
    """The larger row of an example, and the example."""
    dual = isinstance(config, DualConfig)
    run = Config(loss=LossConfig(name="info_nce"), embedder="dual" if dual else "vlm")
    mini_batches = MiniBatch(mini_batch), MiniBatch(mini_batch)
    if isinstance(config, DualConfig):
        run = dataclasses.replace(
            run, loss=LossConfig(name="sigmoid" if config.has_bias else "info_nce")
        )
        pairing = PairShapes(
            BatchShape(0, 1), BatchShape(length), embedding_settings(run), mini_batches=mini_batches
        )
        return BatchShape(length, 1), pairing
    row = BatchShape(length, *images(config, length))
    return row, PairShapes(BatchShape(128), row, embedding_settings(run), mini_batches=mini_batches)


def compiled(point: Point) -> dict[str, Any]:
    """Bytes on a device by the compiler of the target, or why there is no program."""
    if PLATFORMS[point.target.split(":")[0]] == "tpu":
        return _assigned(point)
    return _compiled(point)


def _compiled(point: Point) -> dict[str, Any]:
    on_cpu = point.target.startswith("cpu")
    devices = jax.devices()[:8] if on_cpu else topology.devices(point.target)
    found = verify.compiled(setup_of(point, devices), devices)
    if "why" in found:
        return found
    return {"compiled": found["memory"], "compile_cpu_seconds": found["seconds"]}


def too_much(row: dict[str, Any]) -> bool:
    """Whether a TPU hasn't the memory: its compiler then makes a program that needs less."""
    machine = parse(row["point"][0])
    needs = row["predicted"]["states"] + row["predicted"]["temporary"]
    return machine.platform == "tpu" and needs > machine.chip.hbm_bytes


_CHILD = """
import json, os, sys
from benchmarks import planner
os.environ["XLA_FLAGS"] += f" --xla_dump_to={sys.argv[1]} --xla_dump_hlo_as_text"
os.environ["XLA_FLAGS"] += " --xla_dump_hlo_pass_re=NONE"
print(json.dumps(planner._compiled(planner.Point(*json.loads(sys.argv[2])))))
"""


def _assigned(point: Point) -> dict[str, Any]:
    """From XLA's buffer assignment, which a process of its own writes; it ends there."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-c", _CHILD, folder, json.dumps(point)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            # The last of the files about buffers.
            ready = "*jit_step*after_buffer_assignment.txt"
            while child.poll() is None and not list(pathlib.Path(folder).glob(ready)):
                time.sleep(1)
            seconds = time.perf_counter() - start
            if not list(pathlib.Path(folder).glob(ready)):
                said = (child.communicate()[0] or "").strip().splitlines()
                return {"why": json.loads(said[-1])["why"] if said else "the compiler ended"}
            child.kill()
        (found,) = pathlib.Path(folder).glob("*jit_step*-buffer-assignment.txt")
        return read_assignment(found.read_text()) | {"seconds_to_assignment": round(seconds, 1)}


def read_assignment(text: str) -> dict[str, Any]:
    """Bytes of main memory by a buffer assignment's dump."""
    sizes = {"arguments": 0, "temporary": 0}
    for size, what in re.findall(r"^allocation \d+: size (\d+), (.*)$", text, re.MULTILINE):
        if "color" in what or "thread-local" in what:  # another memory
            continue
        if what.startswith("parameter"):
            sizes["arguments"] += int(size)
        elif what.startswith("preallocated-temp"):
            sizes["temporary"] += int(size)
    return {"compiled": sizes | {"peak": sum(sizes.values())}, "from": "buffer assignment"}


def predicted(point: Point) -> dict[str, Any]:
    """Bytes on a device by the planner."""
    setup = setup_of(point, abstract_devices.devices(PLATFORMS[point.target.split(":")[0]], 8))
    start = time.perf_counter()
    found = step_memory.estimate(setup)
    return {
        "states": sum(found.states.values()),
        "temporary": round(sum(found.work.values())),
        "parts": {name: round(size) for name, size in found.work.items()},
        "seconds": round(time.perf_counter() - start, 1),
    }


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors by target and kind of point: of the whole peak, and of temporaries alone."""
    found = []
    for target, kind in sorted({(row["point"][0], row["kind"]) for row in rows}):
        done = [r for r in rows if "compiled" in r and "predicted" in r]
        own = [r for r in done if (r["point"][0], r["kind"]) == (target, kind)]
        if not own:
            continue
        ours = [r["predicted"] for r in own]
        theirs = [r["compiled"] for r in own]
        pairs = list(zip(ours, theirs, strict=True))
        peak = [abs((p["states"] + p["temporary"]) / c["peak"] - 1) for p, c in pairs]
        work = [abs(p["temporary"] / c["temporary"] - 1) for p, c in pairs]
        found.append(
            {
                "target": target,
                "points": f"{len(own)} {kind}",
                "mean_error": round(sum(peak) / len(peak), 4),
                "worst_error": round(max(peak), 4),
                "mean_error_of_temporaries": round(sum(work) / len(work), 4),
                "temporaries_above_half": sum(2 * c["temporary"] > c["peak"] for _, c in pairs),
            }
        )
    return found


def main() -> None:
    """Predict, compile what is not there yet, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    kinds = ("open", "held", "pairs")
    parser.add_argument("--kinds", nargs="*", default=kinds[:2], choices=kinds)
    parser.add_argument("--count", type=int, default=16, help="points of a target and kind")
    parser.add_argument("--say", action="store_true", help="predict alone")
    args = parser.parse_args()
    rows = kept(NAME)
    here = environment()

    def save() -> None:
        write(f"{NAME}.json", {"summary": compared(rows), "rows": rows})

    for target, kind in itertools.product(args.targets, args.kinds):
        pairs = kind == "pairs"
        for point in pair_points(target) if pairs else points(target, kind, args.count):
            if not any(r["point"] == list(point) for r in rows):
                rows.append({"point": list(point), "kind": kind, "environment": here})
    for row in rows:
        point = Point(*row["point"])
        if point.target not in args.targets or row["kind"] not in args.kinds:
            continue
        if row["kind"] == "open" or "predicted" not in row:  # a held one's stays as it was said
            try:
                row["predicted"] = predicted(point)
            except ConfigError as error:  # dims that the mesh does not divide
                row["why"] = str(error)
                continue
        if "compiled" not in row and not args.say:
            save()
            row.pop("why", None)
            row |= {"why": _TOO_MUCH} if too_much(row) else compiled(point)
            save()
        print({k: v for k, v in row.items() if k != "kind"}, flush=True)
    save()
    for line in compared(rows):
        print(line)


if __name__ == "__main__":
    main()
