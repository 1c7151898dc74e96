"""A pipeline's memory by its number of microbatches, and the plot of it in docs/.

    python -m benchmarks.pipelines

Temporaries of a train step on four stages, the compiler's count for a device; a microbatch has the
same rows throughout, so that more of them are a larger batch.
"""

from __future__ import annotations

import benchmarks.overhead as base  # first: it sets the flags

# isort: split
import dataclasses
from typing import Any

import jax
import matplotlib
import optax

from benchmarks.batches import abstract_batch
from benchmarks.common import ROOT, environment, write
from jaxvlm.config import MeshConfig, StrategyConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble

STAGES, MICROBATCHES, ROWS = 4, (4, 8, 16, 32, 64), 4
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": {"virtual_stages": 2},
    "zero_bubble": {},
}
REMAT = ("dots", "full")


def temporaries(schedule: str, remat: str, parts: int) -> int:
    """Bytes a device."""
    model = dataclasses.replace(
        base.MODEL,
        vision=dataclasses.replace(base.MODEL.vision, remat=remat),
        decoder=dataclasses.replace(base.MODEL.decoder, remat=remat),
    )
    here = make_mesh(MeshConfig(data=1, pipeline=STAGES), jax.devices()[:STAGES])
    split = StrategyConfig(schedule=schedule, **SCHEDULES[schedule])
    built = build_model(model, here, split)
    step, abstract, _ = assemble(built, NextToken(), optax.adamw(1e-4), parts)
    rows = abstract_batch(model, here, parts * ROWS, base.LENGTH, base.IMAGES)
    return step.lower(abstract, rows).compile().memory_analysis().temp_size_in_bytes


def plot(rows: list[dict[str, Any]]) -> None:
    """docs/pipeline_memory.svg."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(REMAT), figsize=(9, 3.4), layout="constrained")
    for panel, remat in zip(panels, REMAT):
        for schedule in SCHEDULES:
            own = [r for r in rows if (r["schedule"], r["remat"]) == (schedule, remat)]
            panel.plot(
                [r["microbatches"] for r in own],
                [r["temporaries_mib"] for r in own],
                marker="o",
                label=schedule,
            )
        panel.set(xlabel="microbatches", title=f"remat={remat}", ylim=(0, None))
        panel.set_xscale("log", base=2)
    panels[0].set_ylabel("temporaries of a device, MiB")
    panels[0].legend(frameon=False)
    figure.savefig(ROOT / "docs" / "pipeline_memory.svg", metadata={"Date": None})


def main() -> None:
    """Compile all, write the result, draw it."""
    before, rows = environment(), []
    for remat in REMAT:
        for schedule in SCHEDULES:
            for parts in MICROBATCHES:
                size = temporaries(schedule, remat, parts)
                row = {"schedule": schedule, "remat": remat, "microbatches": parts}
                rows.append(row | {"temporaries_mib": round(size / 2**20, 1)})
                print(rows[-1], flush=True)
    result = {"environment": before, "stages": STAGES, "rows_a_microbatch": ROWS, "rows": rows}
    write("pipeline_memory_cpu.json", result)
    plot(rows)


if __name__ == "__main__":
    main()
