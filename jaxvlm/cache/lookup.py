"""Result of looking a batch's images up in the cache, and where each image's tokens are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.types import PAGE, Batch

ROWS, BATCHES, ALL = PartitionSpec(BATCH_AXES), PartitionSpec(None, BATCH_AXES), PartitionSpec()
"""Partition specs: split over data shards in the first dim, in the second, or replicated."""


class LookupResult(NamedTuple):
    """What a step knows of each image of a batch before it encodes any. All fields are [B, I]."""

    first: Any
    """i32: index of its first token among the vision encoder's tokens of its sequence."""
    size: Any
    """i32: number of its tokens; 0: there is no image."""
    stale: Any
    """bool: it has to be encoded: a miss, or cached tokens that may not be read."""
    cached: Any
    """bool: its tokens are in the cache, of whatever age."""
    staleness: Any
    """i32: updates of the vision encoder since its tokens were computed; 0 where not ``cached``."""
    drift: Any
    """f32: as in ``CacheState``."""
    weight: Any
    """f32: factor of the gradient at its tokens: 1 / probability where it was drawn, else 1."""
    lost: Any = None
    """bool: it came without pixels because its pages were expected to hold it, and they do not.
    Its tokens are NaNs and are not written to the cache. ``None``: all images have pixels."""

    @property
    def present(self) -> Any:
        """bool: there is an image."""
        return self.size > 0

    @property
    def encoded(self) -> Any:
        """bool: the vision encoder computes its tokens, which are written to the cache."""
        return self.stale if self.lost is None else self.stale & ~self.lost

    @property
    def hit(self) -> Any:
        """bool: its tokens are read from the cache."""
        return self.present & ~self.stale


def with_stored_tokens(
    in_pages: tuple[jax.Array, ...], batch: Batch, version: jax.Array
) -> tuple[jax.Array, ...]:
    """Add the images whose tokens came with the batch, from the host cache, to those in pages.

    Args:
        in_pages: [B, I] each: whether it is cached, staleness, refresh version, drift and gradient
            norm of what is in pages.
        batch: with its images.
        version: i32[]: the vision encoder's.

    Returns:
        The same five arrays, those of the host cache where an image came with its tokens.
    """
    if batch.stored_age is None:
        return in_pages
    version_at, *others = batch.stored_age
    lag = version - version_at
    is_known = batch.is_stored & (lag >= 0)  # never negative; guards the read
    pairs = zip((True, lag, *others), in_pages, strict=True)
    return tuple(jnp.where(is_known, new, old) for new, old in pairs)


def pages_used(pages: jax.Array, size: jax.Array) -> jax.Array:
    """Return bool[B, I, n]: which of the n pages that an image may have its tokens need."""
    return jnp.arange(pages.shape[-1]) * PAGE < size[..., None]


def image_membership(seen: LookupResult, length: int) -> jax.Array:
    """Return bool[B, length, I]: which image of its sequence each visual token belongs to."""
    place, first = jnp.arange(length)[:, None], seen.first[:, None]
    return (first <= place) & (place < first + seen.size[:, None])


def slice_images(
    rows: jax.Array, seen: LookupResult, length: int, order: jax.Array | None = None
) -> jax.Array:
    """Slice each image's part out of packed sequences, padded with zeros to one length.

    Args:
        rows: [B, Q, X]: packed as the vision encoder's tokens are.
        seen: where each image's tokens are.
        length: of the slices.
        order: i32[n]: numbers b * I + i of the images to slice; ``None``: all.

    Returns:
        [B * I, length, X], or [n, length, X] in the given order.
    """
    count = seen.size.shape[1]
    number = jnp.arange(seen.size.size) if order is None else order
    size, first = (x.reshape(-1)[number, None] for x in (seen.size, seen.first))
    inside = jnp.arange(length)
    row, last = number[:, None] // count, rows.shape[1] - 1
    taken = rows[row, jnp.minimum(first + inside, last)]
    return jnp.where((inside < size)[..., None], taken, 0)


def local_index(pages: jax.Array, of: jax.Array) -> jax.Array:
    """Convert global page numbers to indices into a shard's array ``of``; -1 becomes 0."""
    return jnp.maximum(pages - jax.lax.axis_index(BATCH_AXES) * of.shape[0], 0)


def on_shards(mesh: Mesh, run: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
    """Run a function on each data shard.

    Args:
        mesh: of the run.
        run: takes and returns a shard's arrays.
        specs: partition specs of its arguments.
        out: partition specs of its results.
    """
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out)
