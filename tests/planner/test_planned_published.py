"""Plans compared with published figures: each has a source, and the table is up to date."""

from __future__ import annotations

import json
import pathlib
import re
import statistics

import pytest

from benchmarks import planner_published as published

ROOT = pathlib.Path(__file__).parents[2]
KNOWN = json.loads((ROOT / "benchmarks" / "published_measurements.json").read_text("utf-8"))
STORED = json.loads((published.HERE / "results" / "planner_published.json").read_text("utf-8"))


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_row_has_a_source_and_none_is_left_out():
    assert all(re.search("arXiv|https://", row["source"]) for row in KNOWN["rows"])
    assert [row["id"] for row in STORED["rows"]] == [row["id"] for row in KNOWN["rows"]]
    assert len({row["id"] for row in KNOWN["rows"]}) == len(KNOWN["rows"])


@pytest.mark.long
def test_the_table_is_what_is_planned_now():
    found = {}
    for row, stored in zip(KNOWN["rows"], STORED["rows"]):
        if row["kind"] == "time":
            found[row["id"]] = published.time_row(row, KNOWN["models"])
        elif row["kind"] == "states":
            found[row["id"]] = published.states_row(row, KNOWN["models"])
        else:
            continue
        assert found[row["id"]]["planned"] == pytest.approx(stored["planned"], rel=1e-3), row["id"]
    # Rows that no rate was taken from.
    fitted = {row["id"]: row["fitted"] for row in KNOWN["rows"] if "fitted" in row}
    tpus = {k: v["error"] for k, v in found.items() if k in fitted and "A3" not in k}
    assert statistics.mean(abs(e) for k, e in tpus.items() if not fitted[k]) < 0.1
    assert abs(statistics.median(e for k, e in tpus.items() if fitted[k])) < 0.01
    assert all(abs(v["error"]) < 0.01 for k, v in found.items() if k.startswith("ZeRO"))


def test_fitted_rows_have_a_summary_of_their_own():
    groups = {published.group(row) for row in STORED["rows"]}
    assert groups == set(STORED["summary"])
    assert published.summary(STORED["rows"]) == STORED["summary"]
    fitted = [row["id"] for row in STORED["rows"] if row.get("fitted")]
    assert sum("A3" in name for name in fitted) == 1 and len(fitted) == 24


def test_the_pages_example_runs(capsys):
    page = (ROOT / "docs" / "planning_time.md").read_text("utf-8")
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    assert "StepTime(compute=" in capsys.readouterr().out and names["machine"].hosts == 8
