"""Token embedding and output head, and the places of visual tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.nn.param import Init, fan_in, normal, param
from jaxvlm.parallel.rules import Axes, shard


class Embed(nnx.Module):
    """A vocabulary, its embedding and its output matrix.

    Args:
        init: source of parameters.
        axes: mesh and rules.
        vocab_size: V.
        width: D.
        tied: the output matrix is the embedding's transpose.
        scale: of the embeddings; the output matrix has none.
    """

    def __init__(
        self,
        init: Init,
        axes: Axes,
        vocab_size: int,
        width: int,
        tied: bool,
        scale: float = 1.0,
    ):
        V, D = vocab_size, width
        self.axes, self.scale = axes, scale
        self.table = param(init, (V, D), ("vocab", "embed"), normal(width**-0.5))
        self.out = None if tied else param(init, (D, V), ("embed", "vocab"), fan_in(D))

    def __call__(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        """i32[B, T] -> [B, T, D] of ``dtype``."""
        x = self.table[...].astype(dtype)[tokens]
        if self.scale != 1.0:
            x = x * jnp.asarray(self.scale, dtype)
        return shard(self.axes, x, "batch", "seq", "embed")

    def head(self) -> jax.Array:
        """[D, V]."""
        return self.table[...].T if self.out is None else self.out[...]


def place_images(x: jax.Array, visual: jax.Array, start: jax.Array) -> jax.Array:
    """Put each picture's visual tokens at their places in the row.

    Args:
        x: [B, T, D] token embeddings.
        visual: [B, I, P, D].
        start: i32[B, I], the place of a picture's first token; -1 is no picture.

    Returns:
        [B, T, D].
    """
    length, num_patches = x.shape[1], visual.shape[2]
    index = start[:, :, None] + jnp.arange(num_patches)
    # Places of absent pictures lie past the row, each its own, and are dropped: a set with
    # unique indices has a gather for a gradient, never a scatter-add.
    beyond = length + jnp.arange(index.shape[1] * num_patches).reshape(index.shape[1:])
    index = jnp.where(start[:, :, None] >= 0, index, beyond)
    return place_tokens(x, visual.reshape(x.shape[0], -1, x.shape[2]), index.reshape(len(x), -1))


def place_tokens(x: jax.Array, visual: jax.Array, index: jax.Array) -> jax.Array:
    """Put visual tokens at places in the row.

    Args:
        x: [B, T, D] token embeddings.
        visual: [B, Q, D].
        index: i32[B, Q]; each its own, and past the row where a token has no place.

    Returns:
        [B, T, D].
    """

    def one_row(row: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
        return row.at[at].set(values, mode="drop", unique_indices=True)

    return jax.vmap(one_row)(x, visual.astype(x.dtype), index)
