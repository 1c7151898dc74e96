"""One vector for a row: what an embedding model makes of pictures and text."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxvlm.infer.generate import Decodes
from jaxvlm.nn.norm import unit
from jaxvlm.types import Batch


def embed(model: Decodes, batch: Batch, dims: int = 0) -> jax.Array:
    """f32[B, D], or [B, dims]: of unit length; zero for a row of padding.

    Args:
        model: with its parameters in it.
        batch: one conversation a row, padded on either side.
        dims: keep the first so many dims of a vector; 0 is all.

    Source: last-token pooling as in Qwen3-VL-Embedding, arXiv 2601.04720; vectors that can be
        cut, Matryoshka, arXiv 2205.13147.
    """
    hidden = model.post(model.blocks(model.pre(batch))).hidden
    return unit(last_token(hidden, batch.segment)[:, : dims or None])


def last_token(hidden: jax.Array, segment: jax.Array) -> jax.Array:
    """f32[B, D]: the state of each row's last token that is no padding; zero where all are.

    Args:
        hidden: [B, T, D].
        segment: i32[B, T]; 0 is padding.
    """
    real = segment > 0
    last = segment.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
    x = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return jnp.where(jnp.any(real, axis=1)[:, None], x, 0).astype(jnp.float32)
