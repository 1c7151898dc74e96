"""docs/claims.md has the planner's figures."""

import json
import pathlib
import re

import pytest

from benchmarks import planner_claims

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/planner_claims.json").read_text())
PAGE = (ROOT / "docs/claims.md").read_text()
QUICK = ("ZeRO-2 saves 68 % of a 7B model", "2,304 visual tokens instead of 256")


def figures(found):
    """All numbers in a result."""
    if isinstance(found, dict):
        return [x for value in found.values() for x in figures(value)]
    return [found]


@pytest.mark.parametrize(
    "claim",
    [c if c in QUICK else pytest.param(c, marks=pytest.mark.long) for c in planner_claims.CLAIMS],
)
def test_a_claim_computes_to_its_stored_figures(claim):
    assert planner_claims.CLAIMS[claim]() == RESULT[claim]


def test_the_page_has_only_computed_figures():
    """Each figure of a table was computed, and each claim's smallest and largest are on the
    page.
    """
    kept = {f"{x:g}" for claim in planner_claims.CLAIMS for x in figures(RESULT[claim])}
    kept |= {f"{x:.1f}" for claim in planner_claims.CLAIMS for x in figures(RESULT[claim])}
    cells = re.findall(r"(?<=\| )-?[\d.]+(?= (?:%|\|))|(?<=\| )-?[\d.]+(?= %? ?\|)", PAGE)
    assert len(cells) >= 40
    assert set(cells) <= kept | {"2,304", "576", "256", "1", "8"}, set(cells) - kept
    ratios = RESULT["vision 120 ms, decoder 80 ms"].values()
    assert [sum(x > least for x in ratios) for least in (0, 1, 1.5)] == [22, 2, 1]
    assert "One of 22 models exceeds 1.5, and one more 1:" in PAGE
    for claim in ("ZeRO-2 saves 68 % of a 7B model", "8B on 8 GPUs takes 4 GB each"):
        for x in figures(RESULT[claim]):
            assert f"{x:.1f}" in PAGE, (claim, x)
