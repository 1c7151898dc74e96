"""Attention masks, as ids of tokens or as intervals of keys, which need no [T, S] matrix.

Where segments and bidirectional groups are contiguous, a query attends to one interval of keys in
its own segment, and to one in its parent's: from these a kernel knows the blocks it can skip.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.types import Batch


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


class Mask(NamedTuple):
    """Conditions under which a query attends to a key. All of them hold:

    * segment: the key has the query's segment, or its segment is the query's parent;
    * causal: the key is not after the query, or both are in one bidirectional group;
    * sliding window: the key's position is less than ``window`` before the query's.

    A window is measured in rotary positions, not in indices of the packed sequence: the positions
    of a child segment continue its parent's, so it attends to what it would in an unpacked
    sequence.

    ``None`` turns a condition off. Segment 0 is padding: no other token attends to it.
    """

    q_index: Any = None
    """i32[1 or B, T]: index in the sequence; ``None``: not causal."""
    k_index: Any = None
    """i32[1 or B, S]."""
    q_segment: Any = None
    """i32[B, T]: segment id."""
    k_segment: Any = None
    """i32[B, S]."""
    q_parent: Any = None
    """i32[B, T]: id of another segment that the query attends to; 0 is none."""
    q_group: Any = None
    """i32[B, T]: bidirectional group, 0 is none."""
    k_group: Any = None
    """i32[B, S]."""
    window: Any = None
    """i32[]: positions that a query attends to, its own included; 0 is no limit."""
    q_position: Any = None
    """i32[B, T]: rotary position; read if there is a window."""
    k_position: Any = None
    """i32[B, S]."""

    far_groups: Any = None
    """i32[]: 1 if tokens of a bidirectional group attend to each other beyond the window too."""

    spans: Spans | None = None
    """The same mask as intervals of keys, without the queries of padding, for kernels that skip
    blocks; ``None``: it is not known to be intervals, as with a KV cache."""

    def dense(self) -> jax.Array | None:
        """Return the mask as bool[1 or B, T, S], or ``None`` if everything is allowed."""
        allowed = None
        if self.q_index is not None:
            allowed = self.q_index[:, :, None] >= self.k_index[:, None, :]
            if self.q_group is not None:
                same = self.q_group[:, :, None] == self.k_group[:, None, :]
                allowed = allowed | (same & (self.q_group > 0)[:, :, None])
        if self.q_segment is not None:
            joined = self.q_segment[:, :, None] == self.k_segment[:, None, :]
            if self.q_parent is not None:
                of_parent = self.q_parent[:, :, None] == self.k_segment[:, None, :]
                joined = joined | (of_parent & (self.q_parent > 0)[:, :, None])
            allowed = joined if allowed is None else allowed & joined
        if self.window is not None:
            distance = self.q_position[:, :, None] - self.k_position[:, None, :]
            near = (distance < self.window) | (jnp.asarray(self.window) == 0)
            if self.q_group is not None and self.far_groups is not None:
                same = self.q_group[:, :, None] == self.k_group[:, None, :]
                far = same & (self.q_group > 0)[:, :, None] & (jnp.asarray(self.far_groups) > 0)
                near = near | far
            allowed = near if allowed is None else allowed & near
        return allowed

    def after(self, valid: jax.Array) -> Mask:
        """Return this mask with C more keys before its own, of which all queries see the valid.

        Args:
            valid: bool[B, C].

        Raises:
            ValueError: the mask has a window or bidirectional groups, which read what they are.
        """
        if self.window is not None or self.q_group is not None or self.q_parent is not None:
            raise ValueError("keys before a mask's own are causal, of the query's segment alone")
        earlier = jnp.full((1, valid.shape[1]), -1, self.k_index.dtype)
        segment = jnp.where(valid, self.q_segment[:, :1], 0)
        return Mask(
            q_index=self.q_index,
            k_index=jnp.concatenate([earlier, self.k_index], axis=1),
            q_segment=self.q_segment,
            k_segment=jnp.concatenate([segment, self.k_segment], axis=1),
        )

    def windowed(self, window: int, far_groups: bool) -> Mask:
        """Return this mask with a sliding window; see the fields of these names.

        Within a segment, positions do not decrease.
        """
        spans = self.spans
        if spans is not None and window:
            far = self.q_group if far_groups else None
            spans = within_window(spans, window, self.q_position, far)
        return self._replace(window=window, far_groups=int(far_groups), spans=spans)


def segment_mask(segment: jax.Array) -> Mask:
    """Return the mask of an encoder for packed sequences.

    Args:
        segment: i32[B, T], the tokens of a segment consecutive; 0 is padding.
    """
    spans = of_segments(segment.shape[1], False, segment)
    return Mask(q_segment=segment, k_segment=segment, spans=spans)


def batch_mask(batch: Batch) -> Mask:
    """Return the decoder's mask for a batch of packed sequences."""
    length, segment, group = batch.tokens.shape[1], batch.segment, batch.bidirectional
    index = jnp.arange(length, dtype=jnp.int32)[None]
    return Mask(
        q_index=index,
        k_index=index,
        q_segment=segment,
        k_segment=segment,
        q_parent=batch.parent,
        q_group=group,
        k_group=group,
        q_position=batch.positions[:, 0],
        k_position=batch.positions[:, 0],
        spans=of_segments(length, True, segment, batch.parent, group),
    )


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
