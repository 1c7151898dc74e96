"""Pooling of a sequence's hidden states into one embedding."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def last_token(hidden: jax.Array, segment: jax.Array) -> jax.Array:
    """Take the hidden state of each sequence's last token that is not padding.

    Args:
        hidden: [B, T, D] hidden states.
        segment: i32[B, T]; 0 is padding, which may be on either side.

    Returns:
        f32[B, D]; zero for a sequence of padding only.
    """
    return _taken(hidden, segment, segment.shape[1] - 1 - jnp.argmax(segment[:, ::-1] > 0, axis=1))


def first_token(hidden: jax.Array, segment: jax.Array) -> jax.Array:
    """Take the hidden state of the first token that is not padding; as :func:`last_token`."""
    return _taken(hidden, segment, jnp.argmax(segment > 0, axis=1))


def mean_token(hidden: jax.Array, segment: jax.Array) -> jax.Array:
    """Average the hidden states of tokens that are not padding; as :func:`last_token`."""
    weight = (segment > 0).astype(jnp.float32)[:, :, None]
    total = jnp.sum(hidden.astype(jnp.float32) * weight, axis=1)
    return total / jnp.maximum(jnp.sum(weight, axis=1), 1)


def _taken(hidden: jax.Array, segment: jax.Array, where: jax.Array) -> jax.Array:
    x = jnp.take_along_axis(hidden, where[:, None, None], axis=1)[:, 0]
    return jnp.where(jnp.any(segment > 0, axis=1)[:, None], x, 0).astype(jnp.float32)


POOLS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "last": last_token,
    "mean": mean_token,
    "first": first_token,
}
"""``EmbeddingConfig.pool`` -> (hidden [B, T, D], segment i32[B, T]) -> f32[B, D]."""
