"""The planner's formula of a device's memory beside its own traces, for ways that fit or not.

    python -m benchmarks.planner_formula

Published vision-language models on eight devices, 32 rows, all trained: the peak by
``planner/memory/quick_memory.py``, uncorrected, over that by ``planner/memory/step_memory.py``,
less one.
"""

from __future__ import annotations

import itertools
import os
import statistics

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.common import environment, write
from jaxvlm.config import MeshConfig
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request import request
from jaxvlm.planner.search import candidates, search

MODELS = ("qwen3-vl-8b", "llava-1.5-7b", "gemma-3-12b", "qwen3-vl-30b-a3b")
DEVICES = ("h200:8", "v5p:2x2x2")
LENGTHS = (1024, 2048, 4096)
WAYS = (  # preset, remat, microbatches, tensor, expert
    ("fsdp", "full", 1, 1, 1),
    ("fsdp", "dots", 1, 1, 1),
    ("fsdp", "none", 1, 1, 1),
    ("fsdp", "full", 4, 1, 1),
    ("fsdp", "full", 1, 2, 1),
    ("zero1", "full", 1, 1, 1),
)
EXPERTS = (
    ("fsdp", "full", 1, 1, 4),
    ("fsdp", "dots", 1, 1, 4),
    ("fsdp", "none", 1, 1, 4),
    ("fsdp", "full", 1, 2, 4),
)
"""Besides, of a mixture."""


def main() -> None:
    """Ask both for each way, print a line each, write the result."""
    before, rows = environment(), []
    for model, device, length in itertools.product(MODELS, DEVICES, LENGTHS):
        asked = request.RequestFlags(batch=32, length=length)
        found = request.plan_request(model, None, machine.parse(device), asked)
        rough = search.Memory(found)
        more = EXPERTS if model.endswith("a3b") else ()
        for preset, remat, microbatches, tensor, expert in (*WAYS, *more):
            mesh = MeshConfig(data=1, fsdp=8 // tensor // expert, tensor=tensor, expert=expert)
            way = candidates.Candidate(preset, mesh, PRESETS[preset], remat, microbatches)
            traced = step_memory.estimate(candidates.setup_of(found, way)).peak
            parts = f"microbatches={microbatches} tensor={tensor} expert={expert}"
            row = {
                "model": model,
                "devices": device,
                "length": length,
                "way": f"{preset} {remat} {parts}",
                "traced_gib": round(traced / 2**30, 1),
                "error": round(rough.bytes_by_formula(way) / traced - 1, 3),
            }
            rows.append(row)
            print(row, flush=True)
    summary = {}
    for device in DEVICES:
        errors = [row["error"] for row in rows if row["devices"] == device]
        summary[device] = {
            "mean": round(statistics.mean(map(abs, errors)), 3),
            "lowest": min(errors),
            "highest": max(errors),
        }
    print(summary)
    write("planner_formula.json", {"summary": summary, "environment": before, "rows": rows})


if __name__ == "__main__":
    main()
