"""State of the visual-token cache: pages of features, and the fields that decide on a hit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxvlm.parallel.sharding import batch_sharding, replicated
from jaxvlm.types import PAGE

_STEP = np.uint32(0x9E3779B9)
"""Distance between the last words of the keys of an image's pages; odd, so that they all differ."""


class CacheState(NamedTuple):
    """Pages of visual tokens, sharded over the batch axes of the mesh and over nothing else."""

    pages: Any
    """[C, PAGE, D]: output of the vision encoder, before the connector, in the encoder's dtype."""
    key: Any
    """u32[C, 4]: hash of the image and of the page's number in it; zeros where a page is empty."""
    page_version: Any
    """i32[C]: the vision encoder's version when the page was written."""
    refresh_at: Any
    """i32[C]: the version from which on the page is stale; used where ``drift`` was measured."""
    drift: Any
    """f32[C]: relative change of its image's tokens per update at learning rate 1; 0: it was
    never measured."""
    grad_norm: Any
    """f32[C]: norm of the loss's gradient at its image's tokens, when the image was last shown."""
    version: Any
    """i32[]: rises with each update of the vision encoder's parameters, and with nothing else."""
    step: Any
    """i32[]: rises with each step; random draws are a function of it."""
    mean_drift: Any
    """f32[]: running mean of ``drift``, used for pages that have none; 0: none was measured."""


def init(count: int, width: int, dtype: Any) -> CacheState:
    """Create an empty cache; call it under ``jit`` with shardings, so that it is created sharded.

    Args:
        count: C, number of pages.
        width: D, channels of a token.
        dtype: of the features.
    """
    number, zero = jnp.zeros(count, jnp.int32), jnp.zeros((), jnp.int32)
    real = jnp.zeros(count, jnp.float32)
    return CacheState(
        jnp.zeros((count, PAGE, width), dtype),
        jnp.zeros((count, 4), jnp.uint32),
        number, number, real, real, zero, zero, jnp.zeros((), jnp.float32),
    )  # fmt: skip


def advance(state: CacheState, updates: jax.Array | int) -> CacheState:
    """Return the state after updates of the vision encoder. No other function sets the version.

    Args:
        state: of the cache.
        updates: bool[] or i32[]: whether a step updated the vision encoder's parameters, or how
            many updates made elsewhere have replaced them.
    """
    # The version rises with each update, even one that leaves the parameters unchanged: otherwise
    # an encoder that gets no gradient would make no token stale, and as only stale tokens are
    # encoded with a gradient, it would never change again.
    return state._replace(version=state.version + updates)


def shardings(mesh: Mesh) -> CacheState:
    """Return the sharding of each field: pages over the batch axes, scalars replicated."""
    sharded, on_all = batch_sharding(mesh), replicated(mesh)
    return CacheState(*[sharded] * 6, *[on_all] * 3)


def pages_after_halving(count: int, shards: int, times: int) -> int:
    """Return C of a cache of ``count`` pages on ``shards`` data shards after ``times`` halvings."""
    return (count // shards >> times) * shards


def renumber_pages(pages: jax.Array, count: int, allocated: int, shards: int) -> jax.Array:
    """Renumber pages for a halved cache, in which each data shard keeps the first of its pages.

    Args:
        pages: i32[..., n]: each image's pages among ``count``; -1 where it has none.
        count: C of the cache that ``pages`` are numbered for.
        allocated: C of the cache that is allocated, ``count`` or less.
        shards: number of data shards.

    Returns:
        i32[..., n]: page numbers below ``allocated``; -1 for all of an image that has lost one.
    """
    if allocated == count:
        return pages
    per_shard, left_per_shard = count // shards, allocated // shards
    is_present = (pages < 0) | (pages % per_shard < left_per_shard)
    has_all = (pages >= 0) & jnp.all(is_present, axis=-1, keepdims=True)
    return jnp.where(has_all, pages // per_shard * left_per_shard + pages % per_shard, -1)


def page_keys(image: jax.Array, pages: int) -> jax.Array:
    """Return the keys u32[..., pages, 4] of the pages of images with keys u32[..., 4]."""
    number = jnp.arange(pages, dtype=jnp.uint32) * _STEP
    image = jnp.broadcast_to(image[..., None, :], (*image.shape[:-1], pages, 4))
    return image.at[..., 3].set(image[..., 3] ^ number)
