"""Expand image placeholders in token ids: each becomes a span of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from jaxvlm.types import Span

_MARKERS = re.compile(
    r"<(?:image|img|video)(?:[ _-]?\d+)?>|<(?:image|video)_?(?:placeholder|soft_token|pad)>"
    r"|<ImageHere>|<\|(?:image|video)(?:_pad|_\d+)?\|>|<IMG_CONTEXT>|<start_of_image>|\[IMG\]"
    r"|\[VIDEO\]",
    re.IGNORECASE,
)
"""How other formats and models mark an image's place; jaxvlm's own mark is among them."""
MARK = "<image>"
"""Marks an image's place in a text, whatever the file's or tokenizer's own marker is."""


def foreign_markers(text: str) -> list[str]:
    """List the image markers of other formats and models in a text."""
    return [marker for marker in _MARKERS.findall(text) if marker not in (MARK, VIDEO_MARK)]


ImageSpans = int | Callable[[str], "int | Span"]
"""Spans of images: a function of the image file, or one number of image tokens for all."""


VIDEO_MARK = "<video>"
"""Marks a video's place in a file or a prompt; a record's turns have ``MARK`` there, too."""
BOTH_MARKS = re.compile(f"{MARK}|{VIDEO_MARK}")


class Lead(NamedTuple):
    """What is written for an image or a video in a conversation, besides its mark."""

    before: str = ""
    """As :attr:`Span.lead`."""
    behind: str = ""
    """As :attr:`Span.trail`."""
    is_video: bool = False

    @classmethod
    def of(cls, span: Span) -> Lead:
        """Return the lead of an image or a video with these tokens."""
        return cls(span.lead, span.trail, span.is_video)


class Expanded(NamedTuple):
    """Token ids with every image placeholder expanded to its span."""

    ids: Int32[np.ndarray, " T"]
    positions: Int32[np.ndarray, "R T"]
    tile: Int32[np.ndarray, " T"]
    """Tile whose visual feature a token holds, from 1 and counted over all images; 0 is none."""
    starts: list[int]
    """For each tile, the index of the token that holds its first feature."""
    source: Int32[np.ndarray, "T K"] | None = None
    """Same as ``Batch.image_source``; ``None`` if the spans have no sources."""
    weight: Float32[np.ndarray, "T K"] | None = None
    """Same as ``Batch.image_weight``."""


def expand(ids: np.ndarray, image_id: int, spans: list[Span], taps: int = 0) -> Expanded:
    """Replace each image token of a conversation by its span.

    Args:
        ids: i32[n], each image being one token.
        image_id: id of the image token.
        spans: one span for each image, in order.
        taps: K, number of features that a token is the sum of; 0 if the spans have no sources.
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
        at_span = slice(at, at + len(span.ids))
        out[at_span] = span.ids
        positions[:, at_span] += span.positions
        tile[at_span] = np.where(span.tile > 0, span.tile + len(starts), 0)
        before.append(len(starts))
        starts += (at + span.starts).tolist()
    expanded = Expanded(out, positions.astype(np.int32), tile, starts)
    if not taps:
        return expanded
    source = np.full((len(out), taps), -1, np.int32)
    weight = np.zeros((len(out), taps), np.float32)
    inside = np.isin(wide, is_image)
    source[inside], weight[inside] = sources(spans, before, taps)
    return expanded._replace(source=source, weight=weight)


def before(expanded: Expanded, end: int) -> Expanded:
    """Return the tokens before ``end``, with all images."""
    source, weight = (None if x is None else x[:end] for x in (expanded.source, expanded.weight))
    return Expanded(
        expanded.ids[:end],
        expanded.positions[:, :end],
        expanded.tile[:end],
        expanded.starts,
        source,
        weight,
    )


def after(expanded: Expanded, start: int) -> Expanded:
    """Return the tokens from ``start`` on, which belong to no image."""
    tile = expanded.tile[start:]
    return Expanded(expanded.ids[start:], expanded.positions[:, start:], tile, [])


def max_taps(spans: Iterable[Span]) -> int:
    """K: maximum number of features of a token; 0 if no span has sources."""
    return max((s.sources.feature.shape[1] for s in spans if s.sources is not None), default=0)


def sources(
    spans: Sequence[Span], before: Sequence[int], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the feature sources of the tokens of all spans.

    Args:
        spans: spans of images.
        before: number of tiles that precede each image's own in its sequence.
        count: K, number of features that a token is the sum of.

    Returns:
        i32[n, K] as ``Batch.image_source`` and f32[n, K] as ``Batch.image_weight``.

    Raises:
        ValueError: some span has no sources.
    """
    index = np.full((sum(len(span.ids) for span in spans), count), -1, np.int32)
    weight = np.zeros(index.shape, np.float32)
    at = 0
    for span, tiles in zip(spans, before, strict=True):
        if span.sources is None:
            raise ValueError("a span has no sources, but others have; give all of them sources")
        own, share, _, per_tile = span.sources
        block = slice(at, at + len(own)), slice(0, own.shape[1])
        index[block] = np.where(own >= 0, own + tiles * per_tile, own)
        weight[block] = 1.0 if share is None else share
        at += len(own)
    return index, weight
