"""Exact match by the share of the KV cache that is kept, for every scorer and every allocator.

    PYTHONPATH=. python benchmarks/kv_cache_quality.py [--task few many easy-vqa] [--records 300]

A decoder of four layers is trained from scratch on images of 256 visual tokens, then answers from
compressed KV caches. The tasks ``few`` and ``many`` are those of ``configs/kv_cache.py``: colours
of marks, of which four or sixteen tokens tell. An answer's first token is chosen with the whole
prompt, so theirs have several words; those of ``easy-vqa`` have one, and only its end is read from
the compressed cache: it measures little. The floor of all is the blind control, which sees other
records' images. A trained run is kept in ``--runs``. Writes results/kv_cache_quality_cpu.json after
each row, and goes on from it; ``--plot`` draws docs/kv_cache_quality.svg from the rows that are
there, and prints them as tables.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import subprocess
import sys
from typing import Any

from benchmarks.common import RESULTS, ROOT, environment, kept, write
from configs.kv_cache import write_data

NAME = "kv_cache_quality_cpu"
TASKS = ("few", "many", "easy-vqa")
BUDGETS = (0.5, 0.25, 0.1, 0.05, 0.01)
SCORERS = ("vl_cache", "snapkv", "window", "random")
ALLOCATORS = ("even", "density", "pyramid")
EASY_VQA = {
    "data.train": "easy-vqa:train", "data.flip": True, "data.max_shift": 4, "steps": 1500,
    "data.max_length": 384,
}  # fmt: skip
"""What differs from the recipe for easy-VQA."""


def train(task: str, runs: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Train the task's model, or find it; its run and the data to evaluate on."""
    settings: dict[str, Any] = EASY_VQA | {"data.eval": "easy-vqa:test"}
    run, held_out, data = runs / "easy-vqa", "easy-vqa:test", runs / "data"
    if task != "easy-vqa":
        run, held_out, settings = runs / "marks", str(data / f"test/{task}.jsonl"), {}
        if not pathlib.Path(held_out).exists():
            write_data(data)
    command = [sys.executable, "-m", "jaxvlm", "train", f"--workdir={run}", "--json"]
    command += [f"--config={ROOT / 'configs' / 'kv_cache.py'}:{data}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    subprocess.run(command, check=True)
    return run, held_out


def rows(task: str, records: int, runs: pathlib.Path) -> None:
    """Measure what is not in the result yet."""
    import jaxvlm
    from jaxvlm.inference.kv_selection import READ_ROWS

    found = kept(NAME)
    if others := {r["records"] for r in found if r["task"] == task} - {records}:
        sys.exit(f"the result has rows of {others} records: give --records, or remove the rows")
    done = {(r["task"], r["scorer"], r["allocator"], r["budget"], r["seed"]) for r in found}
    cases: list[tuple[str, str, float, int]] = [("none", "even", 1.0, 0)]
    for budget, scorer, allocator in itertools.product(BUDGETS, SCORERS, ALLOCATORS):
        seeds = range(3) if scorer == "random" else range(1)
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
                kv["kv_queries"] = 4 if task == "easy-vqa" else 8
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
    parser.add_argument("--records", type=int, default=300, help="Held-out records of each task.")
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
