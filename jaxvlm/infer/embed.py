"""One vector for a row: what an embedding model makes of pictures and text."""

from __future__ import annotations

import jax

from jaxvlm.infer.generate import Decodes
from jaxvlm.nn.norm import unit
from jaxvlm.nn.pool import last_token
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
