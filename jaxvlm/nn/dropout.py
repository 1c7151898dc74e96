"""Dropout: a mask depends on the seed, the step, the row, and the places in the model and the row.

A row's key comes with the batch (``Batch.noise``), and what stands below folds in where it is. So a
mask is the same on any mesh, in any microbatch, chunk or stage, and where a pass is made again.
No key, no dropout: there is no mode to set.
"""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError
from jaxvlm.types import KEYS

N = TypeVar("N", bound=jax.Array | None)


def fold(noise: N, place: str | int | jax.Array) -> N:
    """Keys of a place, from those of what it is a part of.

    Args:
        noise: u32[n, 2], a key a row; ``None``: nothing is dropped.
        place: a name, or a number.
    """
    if noise is None:
        return noise
    number = zlib.crc32(place.encode()) if isinstance(place, str) else place

    def one(key: jax.Array) -> jax.Array:
        own = jax.random.wrap_key_data(key, impl=KEYS)
        return jax.random.key_data(jax.random.fold_in(own, number))

    folded: Any = jax.vmap(one)(noise)
    return folded


def dropout(x: jax.Array, rate: float, noise: jax.Array | None) -> jax.Array:
    """``x / (1 - rate)``, but zero where a row's key says so, with probability ``rate``.

    Args:
        x: [n * m, ...]; where m is not 1, a row's m parts (pictures) have keys of their own.
        rate: in [0, 1).
        noise: u32[n, 2]; ``None``: ``x`` as it is.

    Raises:
        ValueError: rows that the keys do not divide.

    Source: Srivastava et al., Dropout, JMLR 15 (2014), section 10: scaled in training.
    """
    if noise is None or not rate:
        return x
    if len(x) % len(noise):
        raise ValueError(f"{len(x)} rows for {len(noise)} keys")
    if (parts := len(x) // len(noise)) > 1:
        own = fold(noise, "parts")
        each = jax.vmap(lambda i: fold(own, i), out_axes=1)(jnp.arange(parts))
        noise = each.reshape(-1, 2)

    def keep(key: jax.Array) -> jax.Array:
        one = jax.random.wrap_key_data(key, impl=KEYS)
        return jax.random.bernoulli(one, 1 - rate, x.shape[1:])

    return jnp.where(jax.vmap(keep)(noise), x / (1 - rate), 0)


def check_rate(rate: float, where: str) -> None:
    """Refuse what is no probability of being dropped.

    Raises:
        ConfigError: naming ``where``.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"{where}={rate:g}: a share, from 0 (none) to below 1")
