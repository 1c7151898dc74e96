"""What compiler flags change in a train step: collectives in the background, and memory.

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m benchmarks.overlap_aot [--targets h200:8 ...]

One train step of a decoder of a few layers (see MODEL) under ``fsdp``, in bfloat16 with full remat,
compiled for pods that are not there: without flags, with each flag of the group ``overlap`` of
:mod:`jaxvlm.parallel.xla_flags` alone, and with all of them. Pairs are asynchronous collectives, as
often as a step runs them, and hidden those of them with a matmul between start and done; memory is
the compiler's own count for a device. A flag that the compiler does not know ends its process, and
so the benchmark.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.common import ROOT, environment, kept, write
from jaxvlm.parallel import xla_flags

NAME = "overlap_aot"
TARGETS = ("h200:8", "v5p:2x2x2", "v6e:2x4")
DEPTH = 4


def compiled(target: str) -> dict[str, Any]:
    """A step's pairs and memory, under the flags of this process's environment."""
    import optax

    from benchmarks.batches import abstract_batch
    from benchmarks.collectives import LENGTH, MODEL
    from jaxvlm.config import MeshConfig, StrategyConfig
    from jaxvlm.losses.next_token import NextToken
    from jaxvlm.parallel.mesh import make_mesh
    from jaxvlm.parallel.strategies import resolve
    from jaxvlm.planner.compiled import overlap, topology
    from jaxvlm.spmd.model import build_model
    from jaxvlm.spmd.train_step import assemble
    from jaxvlm.train import program_memory

    devices = topology.devices(target)
    mesh, split = resolve(StrategyConfig("fsdp"), MeshConfig(), devices)
    here = make_mesh(mesh, devices)
    vision = dataclasses.replace(MODEL.vision, depth=1)
    decoder = dataclasses.replace(MODEL.decoder, depth=DEPTH)
    config = dataclasses.replace(MODEL, vision=vision, decoder=decoder)
    model = build_model(config, here, split)
    step, abstract, _ = assemble(model, NextToken(), optax.adamw(1e-4), 1)
    batch = abstract_batch(config, here, 2 * len(devices), LENGTH, 1)
    program = step.lower(abstract, batch).compile()
    pairs = overlap.pairs(program.as_text())
    memory = program_memory.memory(program)
    return {
        "kinds": dict(sorted(pairs.kinds.items())),
        "pairs": pairs.asynchronous,
        "hidden": pairs.hidden,
        "synchronous": pairs.synchronous,
        "memory_mib": {name: round(size / 2**20, 1) for name, size in memory.items()},
    }


def settings(platform: str) -> dict[str, dict[str, str]]:
    """Name -> flags to compile with."""
    _, flags = xla_flags.GROUPS[platform]["overlap"]
    each = {f"{name}={value}": {name: value} for name, value in flags.items()}
    return {"no flags": {}, **each, "overlap": dict(flags)}


def started(target: str, flags: dict[str, str]) -> dict[str, Any]:
    """:func:`compiled` in a process of its own, since flags are read when a compiler is loaded."""
    platform = "tpu" if target.startswith("v") else "gpu"
    variable = xla_flags.GROUPS[platform]["overlap"][0]
    text = " ".join(f"{name}={value}" for name, value in flags.items())
    # With no GPU there is nothing to tune by.
    given = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false", "LIBTPU_INIT_ARGS": ""}
    given[variable] = f"{given[variable]} {text}".strip()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.overlap_aot", "--compile", target],
        cwd=ROOT, env={**os.environ, **given}, stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    """Compile all, print a line each, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    parser.add_argument("--flags", nargs="*", default=(), help="only these settings")
    parser.add_argument("--compile", default="", help="compile for this target, print, and exit")
    args = parser.parse_args()
    if args.compile:
        print(json.dumps(compiled(args.compile)))
        return
    rows: list[dict[str, Any]] = kept(NAME)
    done = {(row["target"], row["flags"]) for row in rows}
    for target in args.targets:
        for name, flags in settings("tpu" if target.startswith("v") else "gpu").items():
            if (target, name) in done or (args.flags and name not in args.flags):
                continue
            rows.append({"target": target, "flags": name, **started(target, flags)})
            print(rows[-1], flush=True)
            write(f"{NAME}.json", {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
