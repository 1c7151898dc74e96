"""The visual-token cache's state: pages of features, and what says whether they may be read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxvlm.parallel.sharding import batch_sharding, replicated
from jaxvlm.types import PAGE

_STEP = np.uint32(0x9E3779B9)
"""Between the last words of the keys of a picture's pages; odd, so that no two are the same."""


class CacheState(NamedTuple):
    """Pages of visual tokens, split over the batch axes of the mesh and over nothing else."""

    pages: Any
    """[C, PAGE, D]: what the tower made, before the connector, in its dtype."""
    key: Any
    """u32[C, 4]: of the picture, and of which of its pages it is; zeros where a page is empty."""
    row_version: Any
    """i32[C]: the tower's version when the page was written."""
    due: Any
    """i32[C]: the version from which on it is to be made anew, where ``drift`` was measured."""
    drift: Any
    """f32[C]: relative change of its picture's tokens with an update at learning rate 1; 0: it was
    never measured."""
    pull: Any
    """f32[C]: norm of the loss's gradient at its picture's tokens, when last shown."""
    version: Any
    """i32[]: rises with each update of the tower's parameters, and with nothing else."""
    turn: Any
    """i32[]: rises with each step; draws are a function of it."""
    typical: Any
    """f32[]: mean ``drift`` of late, for pages that have none; 0: none was measured."""


def init(count: int, width: int, dtype: Any) -> CacheState:
    """An empty cache; under ``jit``, so that it is born sharded.

    Args:
        count: C.
        width: D.
        dtype: of the features.
    """
    number, zero = jnp.zeros(count, jnp.int32), jnp.zeros((), jnp.int32)
    real = jnp.zeros(count, jnp.float32)
    return CacheState(
        jnp.zeros((count, PAGE, width), dtype),
        jnp.zeros((count, 4), jnp.uint32),
        number, number, real, real, zero, zero, jnp.zeros((), jnp.float32),
    )  # fmt: skip


def advance(state: CacheState, updated: jax.Array) -> CacheState:
    """The state behind a step; nothing else sets the version.

    Args:
        state: of the cache.
        updated: bool[]: whether the step updated the tower's parameters.
    """
    # With each update, though it may leave the tower where it is: else one that stands still made
    # nothing old, and as nothing old was encoded it would stand still for ever.
    return state._replace(version=state.version + updated)


def shardings(mesh: Mesh) -> CacheState:
    """Where each field lies."""
    rows, whole = batch_sharding(mesh), replicated(mesh)
    return CacheState(*[rows] * 6, *[whole] * 3)


def halved(count: int, shards: int, times: int) -> int:
    """C of a cache of ``count`` pages on so many data shards that is halved some times."""
    return (count // shards >> times) * shards


def places(pages: jax.Array, count: int, room: int, shards: int) -> jax.Array:
    """Where pages lie in a cache that has fewer: each shard has the first of its own.

    Args:
        pages: i32[..., n], each picture's among ``count``; -1 where it has none.
        count: C of the cache that they are numbered for.
        room: C of the one that is there.
        shards: of the data.

    Returns:
        i32[..., n]; -1 of all that a picture has where one is not there.
    """
    if room == count:
        return pages
    own, kept = count // shards, room // shards
    here = (pages < 0) | (pages % own < kept)
    there = (pages >= 0) & jnp.all(here, axis=-1, keepdims=True)
    return jnp.where(there, pages // own * kept + pages % own, -1)


def page_keys(picture: jax.Array, pages: int) -> jax.Array:
    """u32[..., pages, 4]: keys of the pages of pictures with keys u32[..., 4]."""
    number = jnp.arange(pages, dtype=jnp.uint32) * _STEP
    picture = jnp.broadcast_to(picture[..., None, :], (*picture.shape[:-1], pages, 4))
    return picture.at[..., 3].set(picture[..., 3] ^ number)
