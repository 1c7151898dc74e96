"""Dropout whose masks are a function of seed, step, sequence, layer and index in the sequence.

Each sequence's key comes with the batch (``Batch.dropout_keys``), and every layer folds its name or
number into it. So a mask is the same on every mesh, in every microbatch, mini-batch or stage,
and when rematerialization recomputes a forward pass. Without keys there is no dropout: there is no
train/eval mode to set.
"""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError
from jaxvlm.types import KEY_IMPL

N = TypeVar("N", bound=jax.Array | None)


def fold(keys: N, place: str | int | jax.Array) -> N:
    """Derive the dropout keys of a submodule from those of its parent.

    Args:
        keys: u32[n, 2], a key per sequence; ``None``: no dropout.
        place: name or number of the submodule; part of what its masks depend on.
    """
    if keys is None:
        return keys
    number = zlib.crc32(place.encode()) if isinstance(place, str) else place

    def fold_one(key: jax.Array) -> jax.Array:
        wrapped = jax.random.wrap_key_data(key, impl=KEY_IMPL)
        return jax.random.key_data(jax.random.fold_in(wrapped, number))

    folded: Any = jax.vmap(fold_one)(keys)
    return folded


def dropout(x: jax.Array, rate: float, keys: jax.Array | None) -> jax.Array:
    """Zero elements of ``x`` with probability ``rate``, and scale the others by 1 / (1 - rate).

    Args:
        x: [n * m, ...], m consecutive items (images) per sequence; for m > 1 each item has a key of
            its own, folded from its sequence's.
        rate: in [0, 1).
        keys: u32[n, 2]; ``None``: ``x`` is returned unchanged.

    Raises:
        ValueError: n does not divide the first dim of ``x``.

    Source: Srivastava et al., Dropout, JMLR 15 (2014), section 10: scaled in training.
    """
    if keys is None or not rate:
        return x
    if len(x) % len(keys):
        raise ValueError(f"dropout: {len(x)} items are not a multiple of {len(keys)} keys")
    if (per_key := len(x) // len(keys)) > 1:
        of_items = fold(keys, "parts")
        each = jax.vmap(lambda i: fold(of_items, i), out_axes=1)(jnp.arange(per_key))
        keys = each.reshape(-1, 2)

    def keep(key: jax.Array) -> jax.Array:
        wrapped = jax.random.wrap_key_data(key, impl=KEY_IMPL)
        return jax.random.bernoulli(wrapped, 1 - rate, x.shape[1:])

    return jnp.where(jax.vmap(keep)(keys), x / (1 - rate), 0)


def check_rate(rate: float, where: str) -> None:
    """Check that a dropout rate is in [0, 1).

    Raises:
        ConfigError: it is not; the message names the setting ``where``.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"{where}={rate:g}: a dropout rate is at least 0 (off) and below 1")
