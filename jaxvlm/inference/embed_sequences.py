"""Embeddings of images and text by a decoder: one per sequence of the batch."""

from __future__ import annotations

import jax

from jaxvlm.inference.generate import Decodes
from jaxvlm.nn.norm import unit
from jaxvlm.nn.pooling import last_token
from jaxvlm.types import Batch


def embed_sequences(model: Decodes, batch: Batch, dims: int = 0) -> jax.Array:
    """Embeds each sequence by its last token.

    Args:
        model: module with its parameters.
        batch: one conversation per sequence, padded on either side.
        dims: number of dims to truncate embeddings to; 0 keeps all D.

    Returns:
        f32[B, D] or f32[B, dims] of unit length; zero for a sequence of padding.

    Source: last-token pooling as in Qwen3-VL-Embedding, arXiv 2601.04720; truncated embeddings
        (Matryoshka), arXiv 2205.13147.
    """
    hidden = model.post(model.blocks(model.pre(batch))).hidden
    return unit(last_token(hidden, batch.segment)[:, : dims or None])
