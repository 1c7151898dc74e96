"""Prompts, with their pictures in full, one below the other as the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.data.spans import Expanded
from jaxvlm.types import Batch


class PromptShape(NamedTuple):
    """What rows of prompts have room for."""

    tokens: int
    """T."""
    images: int
    """I: pictures, or their tiles; 0: none, and no field that speaks of them."""
    position_rows: int = 1
    """R."""
    taps: int = 0
    """K, see ``Batch.image_source``."""


def lay_prompts(
    rows: Sequence[Expanded | None],
    shape: PromptShape,
    *,
    pad_id: int,
    mask: str = "causal",
    padding: str = "left",
) -> Batch:
    """Rows of one prompt each; pixels and keys of pictures are the caller's to fill in.

    Args:
        rows: of each row; ``None`` is a row of padding.
        shape: what they have room for.
        pad_id: of padding.
        mask: which tokens see each other both ways, see ``DecoderConfig.visual_mask``.
        padding: the side where it lies: left | right.

    Returns:
        A batch without pictures, nothing in it trained on.

    Raises:
        ValueError: a side that is none.
    """
    if padding not in ("left", "right"):
        raise ValueError(f"padding={padding!r} is neither left nor right")
    B, (T, images, R, taps) = len(rows), shape
    tokens = np.full((B, T), pad_id, np.int32)
    segment, group = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    positions = np.zeros((B, R, T), np.int32)
    start = np.full((B, images), -1, np.int32)
    source = np.full((B, T, taps), -1, np.int32)
    weight = np.zeros((B, T, taps), np.float32)
    for i, row in enumerate(rows):
        if row is None:
            continue
        first = T - len(row.ids) if padding == "left" else 0
        here = slice(first, first + len(row.ids))
        tokens[i, here], segment[i, here] = row.ids, 1
        positions[i, :, here], group[i, here] = row.positions, row.tile
        start[i, : len(row.starts)] = [first + at for at in row.starts]
        if row.source is not None:
            source[i, here], weight[i, here] = row.source, row.weight
    both_ways = mask == "prompt" or (mask == "prefix" and images > 0)
    return Batch(
        tokens,
        np.zeros((B, T), np.float32),
        positions,
        segment,
        bidirectional=(segment if mask == "prompt" else group) if both_ways else None,
        image_start=start if images else None,
        image_source=source if taps else None,
        image_weight=weight if taps > 1 else None,
    )
