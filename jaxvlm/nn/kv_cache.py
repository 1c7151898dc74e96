"""KV cache: keys and values of earlier tokens, for generation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    """Keys and values; the number of valid tokens is kept elsewhere, since all layers share it."""

    k: Any
    """[B, S, K, H], or [L, B, S, K, H] for a stack."""
    v: Any
    """[B, S, K, H], or [L, B, S, K, H] for a stack."""


def init(shape: tuple[int, ...], dtype: Any) -> KVCache:
    """Return an empty cache; ``shape`` is [L, B, S, K, H]."""
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def append(cache: KVCache, k: jax.Array, v: jax.Array, length: jax.Array) -> KVCache:
    """Return ``cache`` with ``k`` and ``v`` [B, T, K, H] written from index ``length`` (i32[])."""
    start = (0, length, 0, 0)
    return KVCache(
        jax.lax.dynamic_update_slice(cache.k, k.astype(cache.k.dtype), start),
        jax.lax.dynamic_update_slice(cache.v, v.astype(cache.v.dtype), start),
    )
