"""What a step knows of a batch's pictures, and which of the tower's tokens are whose."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.types import PAGE, Batch


class Seen(NamedTuple):
    """What a step knows of a batch's pictures before it encodes one. Of each, [B, I]."""

    first: Any
    """i32: the place of its first token among the tower's tokens of its row."""
    size: Any
    """i32: its tokens; 0 is no picture."""
    stale: Any
    """bool: it has to be encoded."""
    known: Any
    """bool: its tokens are kept, however old."""
    lag: Any
    """i32: updates of the tower since they were made; 0 where they are not ``known``."""
    drift: Any
    """f32: as in ``CacheState``."""
    weight: Any
    """f32: factor of the gradient at its tokens: 1 / probability of one that was drawn."""
    lost: Any = None
    """bool: it came without pixels, since it was thought to be in its pages, and is not; such a
    one's tokens are NaNs, and are not kept. ``None``: all came with pixels."""

    @property
    def here(self) -> Any:
        """bool: there is a picture."""
        return self.size > 0

    @property
    def encoded(self) -> Any:
        """bool: the tower makes its tokens, to be kept."""
        return self.stale if self.lost is None else self.stale & ~self.lost

    @property
    def found(self) -> Any:
        """bool: its tokens are read."""
        return self.here & ~self.stale


def with_stored(
    kept: tuple[jax.Array, ...], batch: Batch, version: jax.Array
) -> tuple[jax.Array, ...]:
    """What is known of pictures, of those too whose tokens came with the batch and have an age.

    Args:
        kept: [B, I] each: known, lag, due, drift and pull of what is in pages.
        batch: with its pictures.
        version: i32[]: the tower's.

    Returns:
        As ``kept``.
    """
    if batch.stored_age is None:
        return kept
    made, *others = batch.stored_age
    lag = version - made
    is_known = batch.is_stored & (lag >= 0)  # a guard: none is of a version to come
    return tuple(
        jnp.where(is_known, new, old) for new, old in zip((True, lag, *others), kept, strict=True)
    )


def pages_used(pages: jax.Array, size: jax.Array) -> jax.Array:
    """bool[B, I, n]: which of the places for a picture's pages its tokens need."""
    return jnp.arange(pages.shape[-1]) * PAGE < size[..., None]


def inside_of(seen: Seen, length: int) -> jax.Array:
    """bool[B, length, I]: which of the pictures of its row each of the tower's tokens is of."""
    place, first = jnp.arange(length)[:, None], seen.first[:, None]
    return (first <= place) & (place < first + seen.size[:, None])


def cut_out(rows: jax.Array, seen: Seen, length: int, order: jax.Array | None = None) -> jax.Array:
    """[B * I, length, X]: of rows [B, Q, X], each picture's part, and zeros behind it.

    Args:
        rows: what lies as the tower's tokens do.
        seen: where each picture is.
        length: of a window.
        order: i32[n]: of the pictures that are asked for; ``None``: all.
    """
    count = seen.size.shape[1]
    number = jnp.arange(seen.size.size) if order is None else order
    size, first = (x.reshape(-1)[number, None] for x in (seen.size, seen.first))
    inside = jnp.arange(length)
    row, last = number[:, None] // count, rows.shape[1] - 1
    taken = rows[row, jnp.minimum(first + inside, last)]
    return jnp.where((inside < size)[..., None], taken, 0)
