"""The curve of old tokens is drawn from whatever rows are there, the same each time."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks.staleness import CURVE, RATES, plot


def rows(arms, rates):
    return [
        {
            "arm": arm, "seed": 0, "learning_rate": rate, "settings": CURVE[arm],
            "exact_match": 90 + i + 100 * rate, "encoded_share": 0.1 + 0.05 * i,
        }
        for i, arm in enumerate(arms) for rate in rates
    ]  # fmt: skip


@pytest.mark.long
def test_the_curve_is_drawn_from_what_is_there(tmp_path):
    some = [arm for arm in CURVE if not arm.startswith(("hybrid", "full"))]
    drawn = []
    for i, found in enumerate((rows(CURVE, RATES), rows(some, RATES[:1]), rows(CURVE, RATES))):
        plot(found, path := pathlib.Path(tmp_path / f"{i}.svg"))
        drawn.append(path.read_text())
    assert drawn[0] == drawn[2] != drawn[1]
    assert len(drawn[0]) > len(drawn[1]) > 1000
