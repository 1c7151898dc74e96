"""What tests of the planner in runs share."""

from __future__ import annotations

import jax
import pytest

from jaxvlm.planner.hardware import calibrate


@pytest.fixture
def rates(monkeypatch, tmp_path):
    """This machine's, as if they were measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    products = {"float32": {name: {64: 1e9, 256: 4e9} for name in calibrate.PRODUCTS}}
    scores = {"float32": {name: {64: 2e9} for name in calibrate.SCORES}}
    kind, moved = calibrate.cpu_kind(), {4096: 8e9, 2**24: 2e9}
    made = calibrate.Rates(kind, jax.__version__, products, scores, moved, 1e8, 2e8, 1e9)
    calibrate.save(made)
