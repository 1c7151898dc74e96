"""Token embedding and output head, and the places of visual tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        head: whether there is an output matrix.
    """

    def __init__(
        self,
        init: Init,
        axes: Axes,
        vocab_size: int,
        width: int,
        tied: bool,
        scale: float = 1.0,
        head: bool = True,
    ):
        V, D = vocab_size, width
        self.axes, self.scale, self.tied = axes, scale, tied
        self.table = param(init, (V, D), ("vocab", "embed"), normal(width**-0.5))
        own = head and not tied
        self.out = param(init, (D, V), ("embed", "vocab"), fan_in(D)) if own else None

    def __call__(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        """i32[B, T] -> [B, T, D] of ``dtype``."""
        x = lookup(self.table[...], tokens, dtype)
        if self.scale != 1.0:
            x = x * jnp.asarray(self.scale, dtype)
        return shard(self.axes, x, "batch", "stream", "embed")

    def head(self) -> jax.Array | None:
        """[D, V]; ``None`` where there is none."""
        if self.tied:
            return self.table[...].T
        return None if self.out is None else self.out[...]


def lookup(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Rows of ``table`` [V, D] as ``dtype``; their gradients add up in float32.

    A token may stand in a batch thousands of times. Added up in bfloat16, its gradient stops to
    grow at some 256 times one part: a third of it is gone at 4,096.

    Returns:
        [*tokens.shape, D].
    """
    shape, kind = table.shape, table.dtype

    @jax.custom_vjp
    def rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table.astype(dtype)[tokens]

    def back(tokens: jax.Array, grads: jax.Array) -> tuple[jax.Array, Any]:
        whole = jnp.zeros(shape, jnp.float32).at[tokens].add(grads.astype(jnp.float32))
        return whole.astype(kind), np.zeros(tokens.shape, jax.dtypes.float0)

    rows.defvjp(lambda table, tokens: (rows(table, tokens), tokens), back)
    return rows(table, tokens)


def image_places(start: jax.Array, num_tokens: int, length: int) -> jax.Array:
    """Where in a row the visual tokens of pictures of one size go.

    Args:
        start: i32[B, I], the place of a picture's first token; -1 is no picture.
        num_tokens: of a picture.
        length: T, of the row.

    Returns:
        i32[B, I * num_tokens], for :func:`place_tokens`.
    """
    index = start[:, :, None] + jnp.arange(num_tokens)
    # Places of absent pictures lie past the row, each its own, and are dropped: a set with
    # unique indices has a gather for a gradient, never a scatter-add.
    beyond = length + jnp.arange(index.shape[1] * num_tokens).reshape(index.shape[1:])
    return jnp.where(start[:, :, None] >= 0, index, beyond).reshape(len(start), -1)


def token_places(source: jax.Array, count: int) -> jax.Array:
    """The other way round: from the feature of each token to the place of each feature.

    Args:
        source: i32[B, T], each feature of the row at most once; below 0 is none.
        count: Q, features of a row.

    Returns:
        i32[B, Q], for :func:`place_tokens`; features that no token holds lie past the row.
    """
    T = source.shape[1]
    at, beyond = jnp.arange(T), T + jnp.arange(count)

    def one_row(row: jax.Array) -> jax.Array:
        where = jnp.where(row >= 0, row, count + at)
        return beyond.at[where].set(at, mode="drop", unique_indices=True)

    return jax.vmap(one_row)(source)


def mix_tokens(x: jax.Array, visual: jax.Array, source: jax.Array, weight: jax.Array) -> jax.Array:
    """Put weighted sums of visual tokens in the row, instead of what stands there.

    Several tokens may hold a part of the same feature, so the gradient is a scatter-add.

    Args:
        x: [B, T, D].
        visual: [B, Q, D].
        source: i32[B, T, K]; a token whose first is below 0 stays.
        weight: f32[B, T, K].

    Returns:
        [B, T, D].
    """
    visual = visual.astype(x.dtype)
    mixed = jnp.zeros_like(x)
    for k in range(source.shape[2]):
        taken = jnp.take_along_axis(visual, jnp.maximum(source[..., k : k + 1], 0), axis=1)
        mixed += weight[..., k : k + 1].astype(x.dtype) * taken
    return jnp.where(source[..., :1] >= 0, mixed, x)


def place_tokens(x: jax.Array, visual: jax.Array, index: jax.Array) -> jax.Array:
    """Put visual tokens at places in the row, instead of what stands there.

    Args:
        x: [B, T, D].
        visual: [B, Q, D].
        index: i32[B, Q]; each its own, and past the row where a token has no place.

    Returns:
        [B, T, D].
    """

    def one_row(row: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
        return row.at[at].set(values, mode="drop", unique_indices=True)

    return jax.vmap(one_row)(x, visual.astype(x.dtype), index)
