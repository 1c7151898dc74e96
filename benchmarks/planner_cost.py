"""CPU time of the whole command ``jaxvlm plan`` for a large model on a pod.

    python -m benchmarks.planner_cost [--rounds 5]

Each plan is a process of its own, from Python's start to its exit; seconds are the CPU time of all
its threads, user and system. XLA is held to AVX2, as on a processor without AVX-512: plans compile
nothing, so this should change nothing. A process that only imports JAX and Flax, which no plan can
do without, runs in turn. The least of all rounds counts, since other work on the machine makes all
processes slower.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from typing import Any

from benchmarks.common import ROOT, environment, write

MODEL, ROWS, LENGTH = "qwen3-vl-235b-a22b", 4096, 4096
MACHINES = ("h100:4096", "h200:4096", "v5p:16x16x16", "16xv6e:16x16", "16xv5e:16x16")
IMPORTS = "import jax; from flax import nnx"
PLAN = "from jaxvlm.cli.main import main; main()"
FLAGS = "--xla_cpu_max_isa=AVX2"


def seconds(program: str, *argv: str) -> float:
    """CPU seconds of a Python process.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", program, *argv],
        env=os.environ | {"XLA_FLAGS": FLAGS, "PYTHONPATH": str(ROOT)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure in turn, print a line each, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    here = environment()
    programs: dict[str, tuple[str, ...]] = {"imports of JAX and Flax": (IMPORTS,)}
    for machine in MACHINES:
        flags = (f"--model={MODEL}", f"--devices={machine}", f"--batch={ROWS}", f"--seq={LENGTH}")
        programs[machine] = (PLAN, "plan", *flags)
    spent: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, program in programs.items():
            spent[name].append(round(seconds(*program), 2))
    rows: list[dict[str, Any]] = [
        {"process": name, "cpu_seconds": min(own), "rounds": own} for name, own in spent.items()
    ]
    for row in rows:
        print(row)
    asked = {"model": MODEL, "rows": ROWS, "length": LENGTH, "xla_flags": FLAGS}
    write("planner_cost_cpu.json", {"rows": rows, "plan": asked, "environment": here})


if __name__ == "__main__":
    main()
