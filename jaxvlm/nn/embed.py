"""Token embedding, output projection, and insertion of visual tokens into sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvlm.nn.param import Init, fan_in, normal, param
from jaxvlm.parallel.mesh import on_island
from jaxvlm.parallel.rules import Axes, shard


class Embed(nnx.Module):
    """Token embedding and output projection.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules.
        vocab_size: V.
        width: D.
        tied: the output projection is the embedding table's transpose.
        scale: factor of the input embeddings; not applied to the output projection.
        head: whether there is an output projection.
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
        """Embed tokens i32[B, T] as [B, T, D] of ``dtype``."""
        table = self.table[...]
        if on_island():
            # XLA's partitioner aborts on a gather from rows that are split over one
            # axis and columns that are split over another (jaxlib 0.10.2).
            table = shard(self.axes, table, "vocab", "embed")
        x = lookup(table, tokens, dtype)
        if self.scale != 1.0:
            x = x * jnp.asarray(self.scale, dtype)
        return shard(self.axes, x, "batch", "stream", "embed")

    def head(self) -> jax.Array | None:
        """Return the output projection [D, V], or ``None`` if the model has none."""
        if self.tied:
            return self.table[...].T
        return None if self.out is None else self.out[...]


def lookup(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Look up rows of ``table`` [V, D] as ``dtype``; the table's gradient is summed in float32.

    A token may occur in a batch thousands of times. Summed in bfloat16, its gradient stops growing
    at some 256 times one summand: a third of it is lost at 4,096 occurrences.

    Returns:
        [*tokens.shape, D].
    """
    shape, table_dtype = table.shape, table.dtype

    @jax.custom_vjp
    def rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if tokens.size == 1:
            # Twice: XLA slices a single row, and all-gathers a table whose rows are sharded for it.
            both = table.astype(dtype)[jnp.repeat(tokens.reshape(1), 2)]
            return both[:1].reshape(*tokens.shape, -1)
        return table.astype(dtype)[tokens]

    def rows_bwd(tokens: jax.Array, grads: jax.Array) -> tuple[jax.Array, Any]:
        total = jnp.zeros(shape, jnp.float32).at[tokens].add(grads.astype(jnp.float32))
        return total.astype(table_dtype), np.zeros(tokens.shape, jax.dtypes.float0)

    rows.defvjp(lambda table, tokens: (rows(table, tokens), tokens), rows_bwd)
    return rows(table, tokens)


def image_places(start: jax.Array, num_tokens: int, length: int) -> jax.Array:
    """Compute the sequence index of each visual token, for images of one size.

    Args:
        start: i32[B, I], sequence index of an image's first token; -1 is an unused slot.
        num_tokens: visual tokens per image.
        length: T, tokens of the sequence.

    Returns:
        i32[B, I * num_tokens], for :func:`place_tokens`.
    """
    index = start[:, :, None] + jnp.arange(num_tokens)
    # Tokens of unused slots get distinct indices past the sequence, and are dropped: a set with
    # unique indices has a gather for a gradient, never a scatter-add.
    beyond = length + jnp.arange(index.shape[1] * num_tokens).reshape(index.shape[1:])
    return jnp.where(start[:, :, None] >= 0, index, beyond).reshape(len(start), -1)


def token_places(source: jax.Array, count: int) -> jax.Array:
    """Invert a map from tokens to features: compute the sequence index of each feature.

    Args:
        source: i32[B, T], the feature of each token, each feature at most once; below 0 is none.
        count: Q, features per sequence.

    Returns:
        i32[B, Q], for :func:`place_tokens`; past the sequence for features that no token holds.
    """
    T = source.shape[1]
    at, beyond = jnp.arange(T), T + jnp.arange(count)

    def one_row(row: jax.Array) -> jax.Array:
        feature = jnp.where(row >= 0, row, count + at)
        return beyond.at[feature].set(at, mode="drop", unique_indices=True)

    return jax.vmap(one_row)(source)


def mix_tokens(x: jax.Array, visual: jax.Array, source: jax.Array, weight: jax.Array) -> jax.Array:
    """Replace embeddings of image tokens by weighted sums of visual tokens.

    Several tokens may read the same visual token, so the gradient is a scatter-add.

    Args:
        x: [B, T, D] token embeddings.
        visual: [B, Q, D] visual tokens.
        source: i32[B, T, K] visual tokens to sum; a token whose first is below 0 is kept.
        weight: f32[B, T, K] their weights.

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
    """Replace embeddings of image tokens by visual tokens.

    Args:
        x: [B, T, D] token embeddings.
        visual: [B, Q, D] visual tokens.
        index: i32[B, Q] their sequence indices, all distinct; past the sequence for a visual token
            that is not used.

    Returns:
        [B, T, D].
    """

    def one_row(row: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
        return row.at[at].set(values, mode="drop", unique_indices=True)

    return jax.vmap(one_row)(x, visual.astype(x.dtype), index)
