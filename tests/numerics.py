"""Comparisons of floats, and the bounds that their bars rest on.

A bar goes with the terms of what is added up, not with each number: where terms cancel, what is
left of them may be no larger than their rounding. ``close`` and ``close_in_norm`` measure so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

UNIT = 2.0**-24
"""A rounding of float32, as a share of what is rounded."""

WATCHERS: list[Callable] = []
"""Called after each comparison that holds, with what was found and expected, the bar in words, the
share of it that was used, and whether a fault of ``FAULT`` bars fails."""
FAULT = 10


def rounding(terms: int, unit: float = UNIT, deviations: float = 8) -> float:
    """The bound between two sums of the same terms in any order, as a share of the terms' size.

    Each side rounds once an addition. Roundings have no common sign: they come to √terms of them
    (Higham and Mary, 2019) and never to more than ``terms``. Eight standard deviations are passed
    by chance in one of 10¹³ sums; the norm of many errors is within two.

    Args:
        terms: how many are added up on the longest way to a number, one after another: products of
            matrices in a row add their own.
        unit: a rounding of the type that they are added up in.
        deviations: 8 for the largest of many errors, 2 for their norm.
    """
    return 2 * min(terms, deviations * math.sqrt(terms)) * unit


def terms_of(bar: float, deviations: float = 8) -> int:
    """How many terms ``rounding`` allows to float32 at ``bar``."""
    ratio = bar / (2 * UNIT)
    return round(max(ratio, (ratio / deviations) ** 2))


def plain(x) -> np.ndarray:
    """An array of JAX, torch or NumPy, or a number, in float64."""
    return np.asarray(x.detach() if hasattr(x, "detach") else x).astype(np.float64)


def relative(found, expected) -> float:
    """The error in L2, as a share of what is expected."""
    found, expected = plain(found), plain(expected)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def close(found, expected, bar: float, about: object = "", least: float = 0.0) -> float:
    """Hold each number to ``bar`` of the largest one expected; returns the largest error's share.

    Args:
        found: an array of JAX, torch or NumPy, or a number.
        expected: of the same shape.
        bar: see ``rounding``.
        about: what a failure names.
        least: what is expected counts as this large at least, as a sum that cancels has to.
    """
    return _held(found, expected, bar, about, least, LARGEST)


def close_in_norm(found, expected, bar: float, about: object = "", least: float = 0.0) -> float:
    """Hold the error in L2 to ``bar`` of what is expected; otherwise as ``close``."""
    return _held(found, expected, bar, about, least, NORM)


def moved(x: np.ndarray, by: float) -> np.ndarray:
    """``x``, its first number off by ``by``: so much in L2 and in the largest error."""
    step = np.zeros(x.shape)
    step.flat[0] = by
    return x + step


LARGEST = "the largest", lambda x: float(np.abs(x).max(initial=0.0))
NORM = "the norm", lambda x: float(np.linalg.norm(x))


def _held(found, expected, bar, about, least, of) -> float:
    name, size = of
    ours, theirs = plain(found), plain(expected)
    assert ours.shape == theirs.shape, (about, ours.shape, theirs.shape)
    whole = max(size(theirs), least)
    assert whole > 0, f"{about}: nothing is compared, for what is expected is 0 or empty"

    def error(x):
        return size(x - theirs) / whole

    off = error(ours)
    assert off <= bar, f"{about}: off by {off:.3g} of {whole:.3g}, the bar is {bar:.3g}"
    for watch in WATCHERS:
        fault = moved(theirs, FAULT * bar * whole)
        watch(found, expected, f"{bar:.2g} of {name}", off / bar, error(fault) > bar)
    return off
