"""The bars of floats: what rounding leaves holds, and a fault of ten bars does not."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from numerics import FAULT, close, close_in_norm, moved, relative, rounding

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("terms", [8, 64, 4096])
@pytest.mark.parametrize("unit, dtype", [(2.0**-24, np.float32), (2.0**-11, np.float16)])
def test_any_order_of_a_sum_is_within_its_rounding(terms, unit, dtype):
    """One after another, backwards, and in pairs, against float64; of terms that cancel too."""
    x = np.random.default_rng(terms).uniform(-1, 1, (32, terms)).astype(dtype)
    orders = [np.cumsum(x, axis=1, dtype=dtype)[:, -1]]
    orders += [np.cumsum(x[:, ::-1], axis=1, dtype=dtype)[:, -1], x.sum(1, dtype=dtype)]
    exact, size = x.astype(np.float64).sum(1), np.linalg.norm(x.astype(np.float64), axis=1)
    for found in orders:
        assert (np.abs(found - exact) <= rounding(terms, unit) * size).all()
    assert (np.abs(orders[0] - exact) > rounding(terms, unit) * size / 1000).any()  # not idle


@pytest.mark.parametrize("compare", [close, close_in_norm])
@pytest.mark.parametrize("shape", [(), (7,), (3, 4)])
def test_a_fault_of_ten_bars_fails(compare, shape):
    expected = np.random.default_rng(0).normal(size=shape) + 3
    size = np.abs(expected).max() if compare is close else np.linalg.norm(expected)
    assert compare(moved(expected, 0.9e-5 * size), expected, 1e-5) == pytest.approx(0.9e-5)
    for fault in (1.1, FAULT):
        with pytest.raises(AssertionError, match="here: off by"):
            compare(moved(expected, fault * 1e-5 * size), expected, 1e-5, "here")


@pytest.mark.parametrize("compare", [close, close_in_norm])
def test_what_compares_nothing_fails(compare):
    for found, expected in (([], []), ([0.0], [0.0]), ([np.nan], [1.0]), ([1.0, 1.0], [1.0])):
        with pytest.raises(AssertionError):
            compare(np.asarray(found), np.asarray(expected), 1e-5)
    assert compare(np.zeros(3), np.zeros(3), 1e-5, least=0.1) == 0


def test_the_relative_error_is_of_the_whole():
    assert relative([3.0, 4.0 + 1e-3], [3.0, 4.0]) == pytest.approx(2e-4)


FAULTY = """
import numpy as np
import pytest

def test_holds():
    np.testing.assert_allclose([1.0, 2.0], [1.0, 2.0], rtol=1e-5)
    assert 1.0 == pytest.approx(1.0 + 1e-8)

def test_compares_nothing():
    np.testing.assert_allclose(np.zeros((0, 3)), np.zeros((0, 3)))
"""


def test_a_planted_fault_that_passes_ends_the_run(tmp_path):
    (tmp_path / "test_faulty.py").write_text(FAULTY)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", f"--bars={tmp_path}/bars"]
    done = subprocess.run(
        [*command, str(tmp_path / "test_faulty.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "2 passed" in done.stdout, done.stdout
    assert "hold with a fault of ten bars:\n  test_faulty" in done.stdout
    assert done.stdout.count("test_faulty.py") == 1 and "1e-07 of each" in done.stdout
