"""Exact match by the share of the KV cache that is kept, for every scorer and every allocator.

    PYTHONPATH=. python benchmarks/kv_cache_quality.py [--task easy-vqa count] [--records 500]

A decoder of four layers is trained from scratch on images of 256 visual tokens, then answers from
compressed KV caches. ``easy-vqa`` asks for a colour or shape, which few of the tokens show;
``count`` (made here: 1 to 8 small squares, "how many squares?") for what many show together. The
floor of both is the blind control, which sees other records' images. A trained run is kept in
``--runs``. Writes results/kv_cache_quality_cpu.json after each row, and goes on from it; ``--plot``
draws docs/kv_cache_quality.svg from the rows that are there, and prints them as tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common import RESULTS, ROOT, environment, kept, write

NAME = "kv_cache_quality_cpu"
TASKS = ("easy-vqa", "count")
BUDGETS = (0.5, 0.25, 0.1, 0.05, 0.01)
SCORERS = ("vl_cache", "snapkv", "window", "random")
ALLOCATORS = ("even", "density", "pyramid")
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
COUNT = {"steps": 2500, "data.max_length": 288, "data.flip": False}
"""What differs from the recipe where squares are counted."""


def count_data(folder: pathlib.Path, records: int, seed: int) -> pathlib.Path:
    """Write images of 1 to 8 squares that do not touch, and a question about each."""
    folder.mkdir(parents=True, exist_ok=True)
    draws, lines = np.random.default_rng(seed), []
    for i in range(records):
        count = 1 + i % 8
        pixels = np.full((64, 64, 3), 245, np.uint8)
        for cell in draws.permutation(16)[:count]:
            top, left = (int(16 * n + draws.integers(2, 8)) for n in divmod(int(cell), 4))
            pixels[top : top + 6, left : left + 6] = draws.integers(0, 160, 3)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        said = [("user", "<image>how many squares?"), ("assistant", WORDS[count - 1])]
        turns = [{"role": role, "content": text} for role, text in said]
        lines.append(json.dumps({"messages": turns, "images": [f"{i}.png"]}))
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def train(task: str, runs: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Train the task's model, or find it; its run and the data to evaluate on."""
    settings: dict[str, Any] = {}
    held_out = "easy-vqa:test"
    if task == "count":
        held_out = str(count_data(runs / "count-test", 1000, 1))
        settings = COUNT | {"data.eval": held_out}
        settings["data.train"] = str(count_data(runs / "count-train", 8000, 0))
    run = runs / task
    command = [sys.executable, "-m", "jaxvlm", "train", f"--workdir={run}", "--json"]
    command += [f"--config={ROOT / 'configs' / 'kv_cache.py'}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    subprocess.run(command, check=True)
    return run, held_out


def rows(task: str, records: int, runs: pathlib.Path) -> None:
    """Measure what is not in the result yet."""
    import jaxvlm
    from jaxvlm.inference.kv_selection import READ_ROWS

    found = kept(NAME)
    done = {(r["task"], r["scorer"], r["allocator"], r["budget"], r["seed"]) for r in found}
    cases: list[tuple[str, str, float, int]] = [("none", "even", 1.0, 0)]
    for budget, scorer, allocator in itertools.product(BUDGETS, SCORERS, ALLOCATORS):
        seeds = range(3) if scorer == "random" and allocator == "even" else range(1)
        cases += [(scorer, allocator, budget, seed) for seed in seeds]
    if all((task, *case) in done for case in cases):
        return
    run, held_out = train(task, runs)
    vlm = jaxvlm.load(run)
    for scorer, allocator, budget, seed in cases:
        if (task, scorer, allocator, budget, seed) in done:
            continue
        kv: dict[str, Any] = {}
        if scorer != "none":
            kv = {"kv": scorer, "kv_budget": budget, "kv_allocator": allocator}
            if scorer in READ_ROWS or allocator != "even":
                # The window of SnapKV, and the tokens that VL-Cache observes, within short prompts.
                kv["kv_queries"] = 4
        report = vlm.evaluate(held_out, limit=records, blind=not kv, seed=seed, **kv)
        row = {"task": task, "scorer": scorer, "allocator": allocator, "budget": budget}
        row |= {"seed": seed, "records": records, "settings": kv}
        row |= {n: round(x, 5) for n, x in report.metrics.items() if n.startswith("exact")}
        if not kv:
            row["blind"] = round(report.blind["exact_match"], 5)
        else:
            row["stored"] = round(vlm.kv_memory.stored / vlm.kv_memory.whole, 4)
        found.append(row | {"environment": environment()})
        write(f"{NAME}.json", {"rows": found}, RESULTS)
        print(f"{task}, {scorer}, {allocator}, {budget:g}: {row['exact_match']:.2%}", flush=True)


def mean(found: list[dict[str, Any]], **which: Any) -> float | None:
    """Mean exact match in % over seeds of the rows that have these values; ``None``: no row."""
    own = [r["exact_match"] for r in found if all(r[n] == x for n, x in which.items())]
    return 100 * sum(own) / len(own) if own else None


def table(found: list[dict[str, Any]], task: str) -> list[str]:
    """Markdown: a row for each scorer and allocator, a column for each budget."""
    budgets = [b for b in BUDGETS if mean(found, task=task, budget=b) is not None]
    lines = ["| scorer | allocator | " + " | ".join(f"{b:.0%}" for b in budgets) + " |"]
    lines.append("| --- " * (2 + len(budgets)) + "|")
    for scorer, allocator in itertools.product(SCORERS, ALLOCATORS):
        which = {"task": task, "scorer": scorer, "allocator": allocator}
        cells = [mean(found, budget=b, **which) for b in budgets]
        shown = " | ".join("" if x is None else f"{x:.1f}" for x in cells)
        lines.append(f"| `{scorer}` | `{allocator}` | {shown} |")
    return lines


def plot(found: list[dict[str, Any]]) -> None:
    """Draw docs/kv_cache_quality.svg, and print the tables."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = NAME  # the same file from the same rows
    from matplotlib import pyplot

    tasks = [task for task in TASKS if any(r["task"] == task for r in found)]
    how = {"figsize": (5 * len(tasks), 3.8), "squeeze": False, "layout": "constrained"}
    figure, axes = pyplot.subplots(1, len(tasks), **how)
    for axis, task in zip(axes[0], tasks, strict=True):
        (whole,) = [r for r in found if r["task"] == task and r["scorer"] == "none"]
        print(f"{task}: whole {whole['exact_match']:.1%}, blind {whole['blind']:.1%}")
        print("\n".join(table(found, task)))
        for (i, scorer), (allocator, line) in itertools.product(
            enumerate(SCORERS), zip(ALLOCATORS, ("-", "--", ":"), strict=True)
        ):
            which = {"task": task, "scorer": scorer, "allocator": allocator}
            points = [(b, mean(found, budget=b, **which)) for b in BUDGETS]
            points = [(b, x) for b, x in points if x is not None]
            label = f"{scorer}, {allocator}"
            axis.plot(*zip(*points, strict=True), line, color=f"C{i}", marker=".", label=label)
        axis.axhline(100 * whole["exact_match"], color="black", linewidth=0.8, label="whole")
        axis.axhline(
            100 * whole["blind"], color="gray", linestyle="-.", linewidth=0.8, label="blind"
        )
        axis.set(
            title=task,
            xscale="log",
            xlabel="share of places that are kept",
            ylabel="exact match, %",
        )
    axes[0][-1].legend(fontsize=6)
    figure.savefig(ROOT / "docs" / "kv_cache_quality.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--records", type=int, default=500, help="Held-out records of each task.")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/kv_cache_quality"))
    parser.add_argument("--plot", action="store_true", help="Draw docs/kv_cache_quality.svg.")
    args = parser.parse_args()
    if args.plot:
        plot(kept(NAME))
        return
    for task in args.task:
        rows(task, args.records, args.runs.absolute())


if __name__ == "__main__":
    main()
