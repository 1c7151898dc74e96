"""What the cache's lookup costs: a step whose images all hit, and one that is given the features.

    python -m benchmarks.cache_coherency [--models NAME ...]

``warm`` and ``fed`` are benchmarks/cache.py's; ``again`` is ``fed`` with a state of its own: the
same program, so what lies between these two says how far apart steps are that differ in nothing.
They are: where the arrays of a state are allocated, and where in its arena a program's own are,
moves a step by up to 3 %, for as long as they stay there, and each program by another number
(Mytkowicz et al., "Producing wrong data without doing anything obviously wrong!", 2009). So
both are drawn: each process has sequences of another length, with other arenas, and before
each turn all states are moved. A turn is every contestant twice, ``STEPS`` steps at a time, each
time in another order.

``warm_to_fed`` is a turn's seconds of ``warm`` by the mean of ``fed`` and ``again``,
``again_to_fed`` of one of these by the other, of all turns of all processes: the median, and the
interval that holds it 95 times of 100 (by the ranks, which a step that was disturbed does not
move). CPU seconds of the process, and of the wall. Turns of a process share its length, so
``over_processes`` is the same of the processes' medians, of which there are few.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # the platform is for it
import jax.numpy as jnp
import numpy as np

from benchmarks.cache import LENGTH, LOCKED, MODELS, Contest, Locked, make, write_rows
from benchmarks.common import ROOT, environment, timed
from jaxvlm.parallel.distributed.processes import keep_freed_memory

STEPS, APART = 3, 4  # steps at a time; tokens between the lengths of two processes' rows
APART_LOCKED = 16  # between those of two processes' texts, sixteen times
KINDS = ("warm", "fed", "again")
_MAPPED = 4 * 2**30  # bytes, of several steps' arenas and of states between which there are gaps


def turn(contest: Contest | Locked, rng: np.random.Generator) -> list[list[float]]:
    """(wall, CPU) seconds of each contestant."""
    _move(contest, rng)
    for kind in KINDS:
        contest.step(kind)  # the first at a new place
    spent = dict.fromkeys(KINDS, np.zeros(2))
    for kind in (*rng.permutation(KINDS), *rng.permutation(KINDS)):
        run = timed(lambda kind=kind: [contest.step(kind) for _ in range(STEPS)])
        spent[kind] = spent[kind] + run
    return [spent[kind].tolist() for kind in KINDS]


def _move(contest: Contest | Locked, rng: np.random.Generator) -> None:
    """Move all states, by allocating arrays of random sizes between theirs."""
    between = []

    def moved(x: jax.Array) -> jax.Array:
        between.append(np.empty(int(rng.integers(1, 2**20)), np.uint8))
        return jnp.copy(x)

    # All are copied before the first is let go, or they would change places.
    contest.states.update(jax.block_until_ready(jax.tree.map(moved, contest.states)))


def ratios(found: np.ndarray) -> dict[str, Any]:
    """The lookup's cost, and a program against itself, of [turns, KINDS, (wall, CPU)]."""
    warm, fed, again = found.transpose(1, 0, 2)
    out = {}
    for name, pairs in ("warm", warm / ((fed + again) / 2)), ("again", again / fed):
        for clock, row in zip(("_wall", ""), pairs.T):
            out[f"{name}_to_fed{clock}"] = interval(row)
    return out | {"fed_wall_ms": round(500 / STEPS * float(np.median(fed[:, 0])), 1)}


def interval(ratios: np.ndarray) -> list[float]:
    """The median, between the ends of what holds it 95 times of 100."""
    count, ranks = len(ratios), np.sort(ratios)
    # Of n ratios, the k-th from either end: the median lies between with 95 of 100.
    tails = itertools.accumulate(math.comb(count, i) / 2**count for i in range(count))
    low = max(0, sum(tail <= 0.025 for tail in tails) - 1)
    return [round(float(x), 4) for x in (ranks[low], np.median(ranks), ranks[-1 - low])]


def measure(name: str, processes: int, turns: int) -> dict[str, Any]:
    """A model's row, of so many turns in each process."""
    found = []
    for i in range(processes):
        apart = APART * (i - processes // 2)
        length = LENGTH + (-APART_LOCKED * i if name == LOCKED else apart)
        command = [sys.executable, "-m", "benchmarks.cache_coherency", "--models", name]
        done = subprocess.run(
            [*command, "--turns", str(turns), "--length", str(length)],
            cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        found.append(np.asarray(json.loads(done.stdout.splitlines()[-1])))
    each = [ratios(one)["warm_to_fed"][1] for one in found]
    return {
        "model": name,
        **ratios(np.concatenate(found)),
        "of_each_process": each,
        "over_processes": interval(np.asarray(each)),
        "processes": processes,
        "turns": processes * turns,
    }


def main() -> None:
    """Run all, print a line each, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=[*MODELS, LOCKED])
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3, help="in each process")
    parser.add_argument("--length", type=int, default=0, help="print turns at this one, as JSON")
    parser.add_argument("--name", default="cache_coherency_cpu", help="of the result")
    args = parser.parse_args()
    if args.length:
        keep_freed_memory()
        # All that the turns take is mapped before: else a step that comes to a new place pays it.
        np.ones(_MAPPED, np.uint8)
        contest = make(args.models[0], args.length, ("warm", "fed"))
        for part in contest.steps, contest.batches:
            part["again"] = part["fed"]
        contest.states["again"] = jax.tree.map(jnp.copy, contest.states["fed"])
        contest.step("warm")  # fills the cache
        rng = np.random.default_rng(args.length)
        print(json.dumps([turn(contest, rng) for _ in range(args.turns)]))
        return
    before, rows = environment(), []
    for name in args.models:
        rows.append(measure(name, args.processes, args.turns) | {"environment": before})
        print(rows[-1], flush=True)
        write_rows(args.name, rows)


if __name__ == "__main__":
    main()
