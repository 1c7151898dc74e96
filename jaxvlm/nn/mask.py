"""Who may attend to whom, described by what a kernel can use rather than as a matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.types import Batch


class Mask(NamedTuple):
    """A query attends to a key when

    (same segment, or the key's segment is the query's parent) and
    (the key is not later, or both are in one bidirectional group) and
    (the key's position is less than ``window`` before the query's).

    A window is measured in positions, not in places of the row: a packed child goes on where its
    parent's positions end, so it sees what it would see in a row of its own.

    ``None`` means that the condition is not in use. Segment 0 is padding: nothing else
    attends to it.
    """

    q_index: Any = None
    """i32[1 or B, T]: place in the row; ``None`` is not causal."""
    k_index: Any = None
    """i32[1 or B, S]."""
    q_segment: Any = None
    """i32[B, T]."""
    k_segment: Any = None
    """i32[B, S]."""
    q_parent: Any = None
    """i32[B, T]."""
    q_group: Any = None
    """i32[B, T]: bidirectional group, 0 is none."""
    k_group: Any = None
    """i32[B, S]."""
    window: Any = None
    """i32[]: positions that a query sees, its own counted; 0 is no limit."""
    q_position: Any = None
    """i32[B, T]; read where there is a window."""
    k_position: Any = None
    """i32[B, S]."""

    far_groups: Any = None
    """i32[]: 1 where a bidirectional group is seen beyond the window too."""

    def dense(self) -> jax.Array | None:
        """bool[1 or B, T, S], or ``None`` where everything is allowed."""
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


def batch_mask(batch: Batch) -> Mask:
    """The decoder's mask over a batch's own tokens."""
    index = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
    return Mask(
        q_index=index,
        k_index=index,
        q_segment=batch.segment,
        k_segment=batch.segment,
        q_parent=batch.parent,
        q_group=batch.bidirectional,
        k_group=batch.bidirectional,
        q_position=batch.positions[:, 0],
        k_position=batch.positions[:, 0],
    )
