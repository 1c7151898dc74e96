"""Attention masks as intervals of keys, from which a kernel knows the blocks that it can skip.

Where segments and bidirectional groups are contiguous, a query attends to one interval of keys in
its own segment, and to one in its parent's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Spans(NamedTuple):
    """The keys that each query attends to: ``start <= key < end``, and the same of the parent.

    An interval with ``start >= end`` is empty. The two do not overlap.
    """

    start: Any
    """i32[1 or B, T]."""
    end: Any
    """i32[1 or B, T]."""
    parent_start: Any = None
    """i32[B, T]; ``None``: no query has a parent."""
    parent_end: Any = None
    """i32[B, T]."""

    def dense(self, num_keys: int) -> jax.Array:
        """Return the mask as bool[1 or B, T, S], for S = ``num_keys``."""
        key = jnp.arange(num_keys, dtype=jnp.int32)
        return allowed(key, *(None if x is None else x[..., None] for x in self))


def allowed(
    key: jax.Array, start: Any, end: Any, parent_start: Any = None, parent_end: Any = None
) -> jax.Array:
    """Tell whether keys of these indices are in the intervals; the arguments are broadcast."""
    own = (key >= start) & (key < end)
    if parent_start is None:
        return own
    return own | ((key >= parent_start) & (key < parent_end))


def of_segments(
    length: int, causal: bool, segment: Any = None, parent: Any = None, group: Any = None
) -> Spans:
    """Compute the intervals of queries that are the keys too.

    Args:
        length: T.
        causal: a query attends to no later key, unless both are in one bidirectional group.
        segment: i32[B, T], the tokens of a segment consecutive; 0 is padding, which attends to
            nothing. ``None``: one segment.
        parent: i32[B, T]: id of another segment, one before, that the query attends to; 0 is none.
        group: i32[B, T]: bidirectional group, 0 is none. Within a segment, the tokens of a group
            are consecutive.
    """
    index = jnp.arange(length, dtype=jnp.int32)[None]
    if segment is None:
        start, end = jnp.zeros_like(index), jnp.full_like(index, length)
    else:
        start, end = _runs(segment)
    last = end
    if causal:
        end = index + 1
        if group is not None:
            _, until = _runs(group)
            end = jnp.where(group > 0, jnp.minimum(until, last), end)
    if segment is None:
        return Spans(start, end)
    real = segment > 0
    start, end = jnp.where(real, start, 0), jnp.where(real, end, 0)
    if parent is None:
        return Spans(start, end)
    rows = jnp.arange(segment.shape[0])[:, None]
    none = jnp.zeros((segment.shape[0], length + 1), jnp.int32)  # ids are at most T
    first = (none + length).at[rows, segment].min(index)
    after = none.at[rows, segment].max(index + 1)
    known = real & (parent > 0)
    of_parent = (jnp.take_along_axis(x, parent, axis=1) for x in (first, after))
    return Spans(start, end, *(jnp.where(known, x, 0) for x in of_parent))


def within_window(spans: Spans, window: int, position: jax.Array, far_group: Any = None) -> Spans:
    """Leave out the keys whose position is ``window`` or more before the query's.

    Args:
        spans: result of :func:`of_segments`.
        window: positions that a query attends to, its own included; at least 1.
        position: i32[B, T]: within a segment they do not decrease.
        far_group: bidirectional groups, as in :func:`of_segments`, whose tokens attend to each
            other beyond the window too.
    """
    oldest = position - (window - 1)
    start = _first_at(spans.start, spans.end, position, oldest)
    if far_group is not None:
        first, _ = _runs(far_group)
        first = jnp.maximum(first, spans.start)
        start = jnp.where(far_group > 0, jnp.minimum(start, first), start)
    spans = spans._replace(start=start)
    if spans.parent_start is None:
        return spans
    parent_start = _first_at(spans.parent_start, spans.parent_end, position, oldest)
    return spans._replace(parent_start=parent_start)


def _first_at(
    start: jax.Array, end: jax.Array, position: jax.Array, oldest: jax.Array
) -> jax.Array:
    """i32[B, T]: the first index in each interval with position ``oldest`` or later, or ``end``."""
    low, high = (jnp.broadcast_to(x, position.shape) for x in (start, jnp.maximum(start, end)))
    last = position.shape[1] - 1
    for _ in range(position.shape[1].bit_length()):  # bisection
        middle = (low + high) // 2
        before = jnp.take_along_axis(position, jnp.minimum(middle, last), axis=1) < oldest
        searching = low < high
        low, high = (
            jnp.where(searching & before, middle + 1, low),
            jnp.where(searching & ~before, middle, high),
        )
    return low


def _changes(ids: jax.Array) -> jax.Array:
    """bool[B, T]: the id differs from the one before."""
    return jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))


def _runs(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """i32[B, T] twice: the first index of the run of equal ids, and the one past its last."""
    length = ids.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None]
    begins = _changes(ids)
    start = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    return start, jax.lax.cummin(jnp.where(ends, index + 1, length), axis=1, reverse=True)
