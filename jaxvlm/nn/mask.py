"""Attention masks, as per-token ids that kernels can use instead of a [T, S] matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.nn.spans import Spans, of_segments, within_window
from jaxvlm.types import Batch


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
