"""Rotary position embedding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rope(NamedTuple):
    """The rotation of each token, computed once and used by every layer."""

    cos: jax.Array
    """f32[B, T, H/2]."""
    sin: jax.Array
    """f32[B, T, H/2]."""


def rope(positions: jax.Array, head_dim: int, theta: float) -> Rope:
    """Rotation angles.

    Args:
        positions: i32[B, R, T]; only R = 1 here (sections of M-RoPE come with the families).
        head_dim: H, even.
        theta: base of the wavelengths.

    Source: RoFormer, arXiv 2104.09864, eq. 15.
    """
    if positions.shape[1] != 1:
        raise ValueError(f"positions have {positions.shape[1]} rows; this decoder takes 1")
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angle = positions[:, 0, :, None].astype(jnp.float32) * theta**-exponent
    return Rope(jnp.cos(angle), jnp.sin(angle))


def rotate(x: jax.Array, turn: Rope) -> jax.Array:
    """Rotate the two halves of each head: Hugging Face's ``rotate_half`` layout.

    Args:
        x: [B, T, N, H].
        turn: of the same B, T and H.

    Returns:
        [B, T, N, H], the dtype kept; computed in float32.
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = turn.cos[:, :, None], turn.sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
