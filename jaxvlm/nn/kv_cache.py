"""The KV cache of generation: keys and values of new tokens, and of the prompt's kept places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.nn.attention_backends import Scores
from jaxvlm.nn.mask import Mask

_SMALLEST = 32
"""Places: the smallest size that a layer's kept places are read in."""


class KVCache(NamedTuple):
    """Keys and values of earlier tokens: of a layer, or, with a leading dim L, of all layers.

    How many of them are valid is :attr:`Shared.length`, which is the same in all layers.
    """

    k: Any
    """[B, S, K, H]."""
    v: Any
    """[B, S, K, H]."""
    part: Part | None = None
    """Which of :attr:`Shared.kept` are the layer's; ``None`` with a prompt that is here whole."""
    observed: Any = None
    """What :attr:`Shared.observe` has returned."""
    layer: Any = None
    """i32[]: the layer that reads and writes; ``None``: ``k`` and ``v`` are those of a layer."""

    @property
    def of_layer(self) -> tuple[jax.Array, jax.Array]:
        """The layer's keys and values, [B, S, K, H]."""
        if self.layer is None:
            return self.k, self.v
        k, v = (jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in self[:2])
        return k, v


class Part(NamedTuple):
    """The layer's part of the places that were kept; that of a stack has a leading dim L."""

    start: Any
    """i32[B]: the layer's first place in :class:`Kept`."""
    count: Any
    """i32[B]: number of the layer's places."""
    size: Any
    """i32[]: index of the size in :func:`read_sizes` that they are read in."""


class Kept(NamedTuple):
    """Keys and values of the places of prompts that were kept, those of all layers in a row.

    Layers keep different numbers of places: no place of it is padding, except at a row's end. On a
    pipeline each stage has a row for its layers, and there is a leading dim of stages.
    """

    k: Any
    """[B, N, K, H]: each key is rotated as its place in the prompt was."""
    v: Any
    """[B, N, K, H]."""
    place: Any = None
    """i32[B, N, K]: the place's index in the prompt, padding counted; ``None``: not asked for."""


class Shared(NamedTuple):
    """What the layers share of a KV cache."""

    length: Any
    """i32[]: number of tokens in :class:`KVCache`."""
    kept: Kept | None = None
    """The places of prompts that were kept; every new token attends to all of them."""
    observe: Callable[[jax.Array, KVCache, Scores], Any] | None = None
    """Static; maps a layer's queries [B, T, N, H], rotated, and its cache to
    :attr:`KVCache.observed`; ``None``: nothing is observed."""


def init_kv_cache(shape: tuple[int, ...], dtype: Any) -> KVCache:
    """Return an empty cache; ``shape`` is [L, B, S, K, H]."""
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def append_kv(cache: KVCache, k: jax.Array, v: jax.Array, length: jax.Array) -> KVCache:
    """Return ``cache`` with ``k`` and ``v`` [B, T, K, H] written from index ``length`` (i32[])."""

    def write(cached: jax.Array, new: jax.Array) -> jax.Array:
        new, start = new.astype(cached.dtype), (0, length, 0, 0)
        if cache.layer is None:
            return jax.lax.dynamic_update_slice(cached, new, start)
        return jax.lax.dynamic_update_slice(cached, new[None], (cache.layer, *start))

    return cache._replace(k=write(cache.k, k), v=write(cache.v, v))


Attend = Callable[[jax.Array, jax.Array, Mask], jax.Array]
"""Attends from given queries to keys and values [B, S, K, H] under a mask."""


def attend_cached(attend: Attend, kv: KVCache, kept: Kept | None, mask: Mask) -> jax.Array:
    """Attend to the tokens of a layer's cache, and to the places of prompts that were kept.

    Args:
        attend: attention of the layer's queries.
        kv: the layer's cache.
        kept: the kept places of all layers; ``None``: there are none.
        mask: of the queries over the S tokens of ``kv``.

    Returns:
        What ``attend`` returns.
    """
    k, v = kv.of_layer
    if kept is None or kv.part is None:
        return attend(k, v, mask)
    part = kv.part

    def of_size(size: int) -> Callable[[], jax.Array]:
        def run() -> jax.Array:
            kept_k, kept_v, valid = _read(kept, part, size)
            keys = jnp.concatenate([kept_k, k], axis=1)
            values = jnp.concatenate([kept_v, v], axis=1)
            return attend(keys, values, mask.after(valid))

        return run

    # A layer is read in the smallest size that holds it: what is not kept is not read either.
    return jax.lax.switch(part.size, [of_size(n) for n in read_sizes(kept.k.shape[1])])


def read_sizes(capacity: int) -> list[int]:
    """Return the sizes that a layer's kept places are read in, each half of the next one."""
    sizes = [capacity]
    while sizes[0] > _SMALLEST and len(sizes) < 8:
        sizes.insert(0, -(-sizes[0] // 2))
    return sizes


def _read(kept: Kept, part: Part, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys and values [B, size, K, H] of a layer, and which are its own, bool[B, size].

    The last layers' begin earlier than their part does, so that they end with the row.
    """
    first = jnp.minimum(part.start, kept.k.shape[1] - size)

    def rows(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size))(x, first)

    at = first[:, None] + jnp.arange(size, dtype=jnp.int32) - part.start[:, None]
    return rows(kept.k), rows(kept.v), (at >= 0) & (at < part.count[:, None])
