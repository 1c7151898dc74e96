"""The figures of islands in the docs are those of the benchmark's result."""

import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/islands_cpu.json").read_text())["rows"]
PAGE = (ROOT / "docs/islands.md").read_text()


def cell(run):
    [row] = [row for row in ROWS if (row["run"], row["seed"]) == (run, 0)]
    return f"{row['loss']:.3f}, {100 * row['exact_match']:.1f} %"


def test_islands_by_steps_between_outer_updates():
    assert f"Data parallelism has {cell('data parallel')}" in PAGE
    for every in (1, 10, 50, 500):
        cells = [cell(f"4 islands, H={every}, {how}") for how in ("mean", "nesterov")]
        assert f"| {every} | {cells[0]} | {cells[1]} |" in PAGE
