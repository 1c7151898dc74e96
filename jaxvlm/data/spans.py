"""Pictures in a row of tokens: each is a span of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxvlm.types import Span

Spans = int | Callable[[str], "int | Span"]
"""A picture's span: of a file, or so many image tokens for all."""


class Expanded(NamedTuple):
    """Tokens in their places, pictures in full."""

    ids: Int32[np.ndarray, " T"]
    positions: Int32[np.ndarray, "R T"]
    tile: Int32[np.ndarray, " T"]
    """From 1, counted through all pictures: the tile whose feature a token holds; 0 is none."""


def expand(ids: np.ndarray, image_id: int, spans: list[Span]) -> Expanded:
    """A conversation's ids with each picture token replaced by its span.

    Args:
        ids: i32[n], a picture one token.
        image_id: that token.
        spans: one for each, in order.
    """
    is_image = np.flatnonzero(ids == image_id)
    lengths = np.ones(len(ids), np.int64)
    advance = np.ones(len(ids), np.int64)
    lengths[is_image] = [len(span.ids) for span in spans]
    advance[is_image] = [span.advance for span in spans]
    rows = max((len(span.positions) for span in spans), default=1)
    wide = np.repeat(np.arange(len(ids)), lengths)
    out = ids[wide].astype(np.int32)
    positions = np.tile((np.cumsum(advance) - advance)[wide], (rows, 1))
    tile = np.zeros(len(out), np.int32)
    begin, tiles = np.cumsum(lengths) - lengths, 0
    for at, span in zip(begin[is_image].tolist(), spans, strict=True):
        here = slice(at, at + len(span.ids))
        out[here] = span.ids
        positions[:, here] += span.positions
        tile[here] = np.where(span.tile > 0, span.tile + tiles, 0)
        tiles += int(span.tile.max(initial=0))
    return Expanded(out, positions.astype(np.int32), tile)
