"""How rows of a batch are packed: segments, children that share their parent's images, padding."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

CHILDREN = 3
"""Questions about a segment's images, each a segment of its own."""


class Layout(NamedTuple):
    """Rows of one packing."""

    rows: int
    length: int
    """Tokens of a row; the last 1/64 are padding."""
    chunks: int
    """Conversations of a row."""
    shared: bool = False
    """Whether a conversation is a parent and its children, with 5/8 of its tokens in the parent."""


class LaidOut(NamedTuple):
    """Fields of a batch, each i32[B, T], and where its conversations are."""

    segment: Any
    parent: Any
    """``None`` if there are no children."""
    positions: Any
    """i32[B, 1, T]."""
    prefix: Any
    """Number of the segment on the first half of each, 0 on the rest: a bidirectional group."""
    starts: list[int]
    """First token of each conversation."""
    room: int
    """Tokens of a conversation's first segment."""


def laid_out(layout: Layout) -> LaidOut:
    """Segments of a packing."""
    T, n = layout.length, layout.chunks
    size = (T - T // 64) // n
    room = size * 5 // 8 if layout.shared else size
    segment, parent, positions, prefix = np.zeros((4, T), np.int32)
    number, starts = 0, [size * i for i in range(n)]
    for start in starts:
        own = number + 1
        edges = [start, start + room]
        if layout.shared:
            step = (size - room) // CHILDREN
            edges += [start + room + step * i for i in range(1, CHILDREN)] + [start + size]
        for first, end in itertools.pairwise(edges):
            number += 1
            segment[first:end] = number
            parent[first:end] = own if number > own else 0
            before = room if number > own else 0  # a child's positions continue its parent's
            positions[first:end] = before + np.arange(end - first)
            prefix[first : first + (end - first) // 2] = number

    def whole(x: Any) -> Any:
        return np.tile(x, (layout.rows, 1))

    return LaidOut(whole(segment), whole(parent) if layout.shared else None,
                   whole(positions)[:, None], whole(prefix), starts, room)  # fmt: skip
