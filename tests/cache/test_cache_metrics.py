"""What a step did with its images, as numbers."""

from __future__ import annotations

import pytest

from jaxvlm.cache.metrics import lag_bins, saved


def test_what_is_saved_is_the_towers_time():
    """A step of 100 FLOPs, 60 of them the encoder's, at the FLOP rate of those it executed."""
    assert saved(0.0, 60.0, 100.0, 50.0) == 0
    assert saved(1.0, 60.0, 100.0, 40.0) == pytest.approx(60)
    assert saved(0.5, 60.0, 100.0, 70.0) == pytest.approx(30)
    assert saved(1.0, 60.0, 60.0, 70.0) is None  # a linear map on embeddings is not counted


@pytest.mark.parametrize(
    ("bound", "starts"),
    [(1, [0, 1]), (2, [0, 1]), (3, [0, 1, 2]), (50, [0, 1, 3, 6, 12, 25]),
     (640, [0, 1, 40, 80, 160, 320])],
)  # fmt: skip
def test_bins_of_lags(bound, starts):
    assert lag_bins(bound) == starts
