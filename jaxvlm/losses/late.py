"""Late interaction: how like a query and a document are whose every token has a vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_UNSEEN = float(np.finfo(np.float32).min)


def maxsim(product: jax.Array, query_seen: jax.Array, document_seen: jax.Array) -> jax.Array:
    """The sum over a query's tokens of the largest product with a token of the document.

    Tokens that are not seen count for nothing; without any, a similarity is 0. Where several of a
    document's tokens are equally near, the gradient is shared among them.

    Args:
        product: f32[..., T, S] of a query's and a document's tokens.
        query_seen: bool[..., T], broadcast.
        document_seen: bool[..., S], broadcast.

    Returns:
        f32[...].

    Sources: ColBERT, arXiv 2004.12832, equation 3; ColPali, arXiv 2407.01449, equation 1.
    """
    seen = document_seen[..., None, :]
    best = jnp.max(jnp.where(seen, product, _UNSEEN), axis=-1)
    counts = query_seen & jnp.any(seen, axis=-1)
    return jnp.sum(jnp.where(counts, best, 0.0), axis=-1)
