"""Similarities of queries and documents, with one embedding for each item or for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError, check_choice
from jaxvlm.losses.maxsim import maxsim
from jaxvlm.losses.positives import num_examples
from jaxvlm.types import Embeddings, Pairs

SIMILARITIES = ("cosine", "dot")
_TILE = 4 * 2**20
"""Most products of embeddings in a tile of automatic size: 16 MiB of float32."""


class PairLoss:
    """Methods of ``types.Loss`` that most losses over pairs share."""

    def coefficients(self) -> Mapping[str, float]:
        """Return one term with factor 1."""
        return {"loss": 1.0}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """Return the number of queries."""
        return {"loss": num_examples(batch)}


def check_similarity(similarity: str) -> None:
    """Refuse an unknown similarity."""
    check_choice("similarity", similarity, SIMILARITIES)


def prepared(out: Embeddings, pairs: Pairs, similarity: str) -> Embeddings:
    """Return embeddings whose products are similarities: :func:`clean`, normalized for cosines."""
    out = clean(out, pairs)
    if similarity == "cosine":
        return out._replace(query=normalised(out.query), document=normalised(out.document))
    return out


def clean(out: Embeddings, pairs: Pairs) -> Embeddings:
    """Cast embeddings to float32 and set padding, and its gradient, to zero.

    Where tokens have embeddings, the result has masks of them.

    Raises:
        ConfigError: queries and documents do not have the same kind of embeddings.
    """
    query, document = (jnp.asarray(x, jnp.float32) for x in (out.query, out.document))
    if document.ndim != query.ndim + 1 or query.shape[-1] != document.shape[-1]:
        raise ConfigError(
            f"queries {query.shape} and documents {document.shape}: a loss over pairs takes [b, E] "
            "and [b, K, E], or with an embedding for each token [b, T, E] and [b, K, S, E]"
        )
    valid = jnp.asarray(pairs.valid)
    document = jnp.where(_like(valid, document), document, 0.0)
    query = jnp.where(_like(valid[:, 0], query), query, 0.0)
    query_mask = document_mask = None
    if query.ndim == 3:
        query_mask = _mask(out.query_mask, query) & valid[:, :1]
        document_mask = _mask(out.document_mask, document) & valid[:, :, None]
        query = jnp.where(query_mask[..., None], query, 0.0)
        document = jnp.where(document_mask[..., None], document, 0.0)
    return out._replace(
        query=query, document=document, query_mask=query_mask, document_mask=document_mask
    )


def normalised(x: jax.Array) -> jax.Array:
    """Normalize to unit length along the last dim; zeros stay zero, with finite gradients."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def crossed(query: Any, query_mask: Any, document: Any, document_mask: Any) -> jax.Array:
    """Return similarities of prepared queries with all of some documents.

    Args:
        query: f32[r, E], or f32[r, T, E] where ``query_mask`` is bool[r, T].
        query_mask: bool[r, T]; ``None``: one embedding for each query.
        document: f32[c, K, E], or f32[c, K, S, E].
        document_mask: bool[c, K, S], or ``None``.

    Returns:
        f32[r, c, K].
    """
    if query_mask is None:
        return _product("re,cke->rck", query, document)
    product = _product("rte,ckse->rckts", query, document)
    return maxsim(product, query_mask[:, None, None], document_mask)


def own(embeddings: Embeddings) -> jax.Array:
    """Return similarities of prepared queries with their own documents, f32[b, K]."""
    if embeddings.query_mask is None:
        return _product("be,bke->bk", embeddings.query, embeddings.document)

    @jax.checkpoint  # recompute the products of tokens rather than keep them
    def one(_: None, x: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        document, mask = x
        product = _product("bte,bse->bts", embeddings.query, document)
        return None, maxsim(product, embeddings.query_mask, mask)

    by_document = [jnp.moveaxis(x, 1, 0) for x in (embeddings.document, embeddings.document_mask)]
    return jax.lax.scan(one, None, tuple(by_document))[1].T


def _product(letters: str, query: jax.Array, document: jax.Array) -> jax.Array:
    """Multiply in float32 on every chip: bfloat16's error times CLIP's 100 is half a logit."""
    return jnp.einsum(letters, query, document, precision=jax.lax.Precision.HIGHEST)


def tile_size(embeddings: Embeddings, size: int) -> int:
    """Return the examples on a side of a tile: ``size``, or as many as fit in 16 MiB if it is 0."""
    if size:
        return size
    count = embeddings.document.shape[1]
    if embeddings.query_mask is not None:
        count *= embeddings.query.shape[1] * embeddings.document.shape[2]
    return max(1, int((_TILE / count) ** 0.5))


def factor_of(out: Embeddings, temperature: float, max_scale: float) -> jax.Array:
    """Return the factor of similarities, f32[]: ``1 / temperature``, or the learned scale.

    The learned one is ``exp(min(scale, log(max_scale)))``. Its gradient is that of ``exp`` at the
    bound and above it too, so that ``scale`` can come back; the optimizer keeps the parameter
    within its bound after each update (``InfoNCE.bounds``), as CLIP's training does.

    Args:
        out: the model's output; ``scale`` is read where ``temperature`` is 0.
        temperature: a fixed temperature; 0: learned.
        max_scale: bound of the learned factor; 0: none.

    Raises:
        ConfigError: ``temperature`` is 0 and the model has no learned scale.
    """
    if temperature:
        return jnp.float32(1.0 / temperature)
    if out.scale is None:
        raise ConfigError(
            "temperature=0 uses the model's learned scale, and this model has none; set a "
            "temperature, e.g. 0.05"
        )
    scale = jnp.asarray(out.scale, jnp.float32)
    if max_scale:
        above = jnp.maximum(scale - jnp.log(jnp.float32(max_scale)), 0.0)
        scale = scale - jax.lax.stop_gradient(above)
    return jnp.exp(scale)


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def _mask(mask: Any, x: jax.Array) -> jax.Array:
    return jnp.ones(x.shape[:-1], bool) if mask is None else jnp.asarray(mask)
