"""Compute the size that an image of any size is resized to before it is cut into patches."""

from __future__ import annotations

import math

MAX_ASPECT_RATIO = 200
"""Maximum ratio of the longer to the shorter side."""


def fit(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Round an image's size to multiples of ``side``, with its number of pixels within bounds.

    Args:
        width: width of the image in pixels.
        height: height of the image in pixels.
        side: pixels that both sides become multiples of.
        least: minimum of width times height.
        most: maximum of width times height; an image with a side of only ``side`` may exceed it.

    Returns:
        (width, height).

    Raises:
        ValueError: one side is more than :data:`MAX_ASPECT_RATIO` times the other.

    Source: ``smart_resize`` of transformers' ``image_processing_qwen2_vl.py``.
    """
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(f"one side is over {MAX_ASPECT_RATIO} times the other")
    sizes = (width, height)
    wide, high = (round(size / side) * side for size in sizes)
    if wide * high > most:
        shrink = math.sqrt(width * height / most)
        wide, high = (max(side, math.floor(size / shrink / side) * side) for size in sizes)
    elif wide * high < least:
        grow = math.sqrt(least / (width * height))
        wide, high = (math.ceil(size * grow / side) * side for size in sizes)
    return wide, high
