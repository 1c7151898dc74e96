"""Keys and values of tokens already seen, for generation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    """Rows up to a length kept outside (all layers share it)."""

    k: Any
    """[B, S, K, H], or [L, B, S, K, H] for a stack."""
    v: Any
    """As ``k``."""


def init(shape: tuple[int, ...], dtype: Any) -> KVCache:
    """An empty cache; ``shape`` is [L, B, S, K, H]."""
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def append(cache: KVCache, k: jax.Array, v: jax.Array, length: jax.Array) -> KVCache:
    """``cache`` with ``k`` and ``v`` [B, T, K, H] written from place ``length`` (i32[]) on."""
    start = (0, length, 0, 0)
    return KVCache(
        jax.lax.dynamic_update_slice(cache.k, k.astype(cache.k.dtype), start),
        jax.lax.dynamic_update_slice(cache.v, v.astype(cache.v.dtype), start),
    )
