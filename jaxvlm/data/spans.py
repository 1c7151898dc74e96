"""Pictures in a row of tokens: each is a span of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from jaxvlm.types import Span

Spans = int | Callable[[str], "int | Span"]
"""A picture's span: of a file, or so many image tokens for all."""


class Expanded(NamedTuple):
    """Tokens in their places, pictures in full."""

    ids: Int32[np.ndarray, " T"]
    positions: Int32[np.ndarray, "R T"]
    tile: Int32[np.ndarray, " T"]
    """From 1, counted through all pictures: the tile whose feature a token holds; 0 is none."""
    starts: list[int]
    """Of each tile, the place of its first feature."""
    source: Int32[np.ndarray, "T K"] | None = None
    """As ``Batch.image_source``; ``None`` where spans have none."""
    weight: Float32[np.ndarray, "T K"] | None = None
    """As ``Batch.image_weight``."""


def expand(ids: np.ndarray, image_id: int, spans: list[Span], taps: int = 0) -> Expanded:
    """A conversation's ids with each picture token replaced by its span.

    Args:
        ids: i32[n], a picture one token.
        image_id: that token.
        spans: one for each, in order.
        taps: K, where spans have sources.
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
    begin, starts, before = np.cumsum(lengths) - lengths, list[int](), []
    for at, span in zip(begin[is_image].tolist(), spans, strict=True):
        here = slice(at, at + len(span.ids))
        out[here] = span.ids
        positions[:, here] += span.positions
        tile[here] = np.where(span.tile > 0, span.tile + len(starts), 0)
        before.append(len(starts))
        starts += (at + span.starts).tolist()
    found = Expanded(out, positions.astype(np.int32), tile, starts)
    if not taps:
        return found
    source = np.full((len(out), taps), -1, np.int32)
    weight = np.zeros((len(out), taps), np.float32)
    inside = np.isin(wide, is_image)
    source[inside], weight[inside] = sources(spans, before, taps)
    return found._replace(source=source, weight=weight)


def most_taps(spans: Iterable[Span]) -> int:
    """K: features of a token, at most; 0 where features just follow each other."""
    return max((s.sources.feature.shape[1] for s in spans if s.sources is not None), default=0)


def sources(
    spans: Sequence[Span], before: Sequence[int], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The features of all spans' tokens, one after another.

    Args:
        spans: of pictures.
        before: tiles that lie before each one's in its row.
        count: K.

    Returns:
        i32[n, K] as ``Batch.image_source`` and f32[n, K] as ``Batch.image_weight``.
    """
    index = np.full((sum(len(span.ids) for span in spans), count), -1, np.int32)
    weight = np.zeros(index.shape, np.float32)
    at = 0
    for span, tiles in zip(spans, before, strict=True):
        if span.sources is None:
            raise ValueError("a span without sources beside one with them")
        own, share, _, per_tile = span.sources
        here = slice(at, at + len(own)), slice(0, own.shape[1])
        index[here] = np.where(own >= 0, own + tiles * per_tile, own)
        weight[here] = 1.0 if share is None else share
        at += len(own)
    return index, weight
