"""What islands send over the slow links, read from programs compiled for chips that are not here.

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m benchmarks.island_bytes [--chips h200:16 ...]

Two groups of eight chips (slices of v5p; nodes of H200), a published model at its real widths with
few layers, weights split over each group (``fsdp=8``), 3,968 tokens a device. ``data parallel``
sends gradients between the groups in each step; islands send nothing in a step, and their changes
in an outer update, which is a program of its own. Bytes are those that one device sends over the
mesh axis that crosses the groups, by the ring algorithm, and ``inside`` what it sends over the
others. Writes results/island_bytes_aot.json after each row, and goes on from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import jax

from benchmarks import lowering
from benchmarks.common import RESULTS, environment, kept, write
from benchmarks.compiled_steps import shallow
from jaxvlm.config import Config, MeshConfig, OuterConfig
from jaxvlm.losses.registry import make_loss
from jaxvlm.optim.optimizer import make_optimizer, make_schedule
from jaxvlm.parallel.mesh import ISLAND, make_mesh
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.planner.compiled import collectives, topology, verify
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble_with_cache

NAME = "island_bytes_aot"
GROUPS = {"v5p:2x2x2": 2, "h200:16": 1}
"""Chips -> TPU slices of that topology; a GPU node has eight."""
NESTEROV = OuterConfig(steps=50, optimizer="nesterov", learning_rate=0.7, momentum=0.9)
WAYS: dict[str, OuterConfig | None] = {
    "data parallel": None,
    "islands": NESTEROV,
    "islands, int8": dataclasses.replace(NESTEROV, delta_dtype="int8"),
    "islands, 4 fragments": dataclasses.replace(NESTEROV, fragments=4),
}


def compiled(chips: str, model: str, outer: OuterConfig | None) -> dict[str, Any]:
    """Compile a step, and the outer updates, and read what they send.

    Islands' step is the same whatever their outer update is: it is compiled once.
    """
    across = {"data": 1, ISLAND: 2} if outer else {"data": 2}
    layout = lowering.Layout(MeshConfig(fsdp=8, **across), PRESETS["fsdp"])
    setup = lowering.setup_of(lowering.Case(chips, model, "full", "packed"), layout)
    start = time.process_time()
    mesh = make_mesh(layout.mesh, topology.devices(chips, GROUPS[chips]))
    run, built = Config(), build_model(shallow(setup.config), mesh, layout.strategy)
    tx = make_optimizer(run.optim, make_schedule(run.optim, run.steps), built.logical)
    parts = assemble_with_cache(built, make_loss(run, mesh), tx, 1, (), islands=outer)
    found: dict[str, Any] = {"parameters": sum(x.size for x in built.shapes.values())}
    axis = ISLAND if outer else "data"
    if outer in (None, NESTEROV):
        row = (setup.rows, setup.length, setup.images, setup.patches)
        program = parts.build(parts.abstract, verify.abstract_batch(built.config, mesh, *row))
        found["step"] = sent(program.step if outer else program, mesh, axis)
    if parts.outer and outer:
        updates = parts.outer()
        texts = [str(updates.as_text(i)) for i in range(outer.fragments)]
        found["outer_updates"] = [sent(text, mesh, axis) for text in texts]
    return found | {"seconds": round(time.process_time() - start, 1)}


def sent(program: Any, mesh: jax.sharding.Mesh, axis: str) -> dict[str, int]:
    """Bytes that a device sends over ``axis``, and over the others."""
    text = program if isinstance(program, str) else str(program.as_text())
    all_of_it = collectives.read(text, dict(mesh.shape))
    between = collectives.total(all_of_it, axis)
    return {"between": between, "inside": collectives.total(all_of_it) - between}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--model", default="qwen3-vl-2b")
    args = parser.parse_args()
    for chips in args.chips:
        for name, outer in WAYS.items():
            of = {"chips": chips, "model": args.model, "run": name}
            rows = kept(NAME)
            if any(of.items() <= row.items() for row in rows):
                continue
            found = compiled(chips, args.model, outer)
            rows.append(of | found | {"environment": environment()})
            write(f"{NAME}.json", {"rows": rows}, RESULTS)
            print(of | found, flush=True)


if __name__ == "__main__":
    main()
