"""MaxSim: the similarity of late interaction, between embeddings of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_MASKED = float(np.finfo(np.float32).min)


def maxsim(product: jax.Array, query_mask: jax.Array, document_mask: jax.Array) -> jax.Array:
    """Sum over a query's tokens the largest product with a token of the document.

    Masked tokens do not contribute; without any other token, a similarity is 0. Where several of a
    document's tokens have the largest product, the gradient is divided among them.

    Args:
        product: f32[..., T, S], products of a query's and a document's tokens.
        query_mask: bool[..., T], broadcast; False for padding.
        document_mask: bool[..., S], broadcast; False for padding.

    Returns:
        f32[...].

    Sources: ColBERT, arXiv 2004.12832, equation 3; ColPali, arXiv 2407.01449, equation 1.
    """
    mask = document_mask[..., None, :]
    best = jnp.max(jnp.where(mask, product, _MASKED), axis=-1)
    counts = query_mask & jnp.any(mask, axis=-1)
    return jnp.sum(jnp.where(counts, best, 0.0), axis=-1)
