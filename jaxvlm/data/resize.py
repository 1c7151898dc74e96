"""The size that a picture of any size is given before it is cut into patches."""

from __future__ import annotations

import math

STEEPEST = 200
"""Longest to shortest side, at most."""


def fit(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Multiples of ``side`` near a picture's size, so that its pixels stay within two bounds.

    Args:
        width: of the picture, in pixels.
        height: likewise.
        side: pixels that both sides become multiples of.
        least: pixels in all, at least.
        most: pixels in all, at most; a picture of one ``side`` a direction may have more.

    Returns:
        (width, height).

    Raises:
        ValueError: one side is more than :data:`STEEPEST` times the other.

    Source: ``smart_resize`` of transformers' ``image_processing_qwen2_vl.py``.
    """
    if max(width, height) > STEEPEST * min(width, height):
        raise ValueError(f"one side is over {STEEPEST} times the other")
    sizes = (width, height)
    wide, high = (round(size / side) * side for size in sizes)
    if wide * high > most:
        shrink = math.sqrt(width * height / most)
        wide, high = (max(side, math.floor(size / shrink / side) * side) for size in sizes)
    elif wide * high < least:
        grow = math.sqrt(least / (width * height))
        wide, high = (math.ceil(size * grow / side) * side for size in sizes)
    return wide, high
