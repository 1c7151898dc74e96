"""How like a query and a document are: of a vector a row, or of a vector a token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError
from jaxvlm.losses.late import maxsim
from jaxvlm.types import Pairs, Vectors

SIMILARITIES = ("cosine", "dot")
_TILE = 4 * 2**20
"""Products of vectors in a tile whose size is chosen: 16 MiB of float32."""


def check_similarity(similarity: str) -> None:
    """Refuse one that is not known."""
    check_choice("similarity", similarity, SIMILARITIES)


def check_choice(field: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a setting's value that is not known."""
    if value not in known:
        raise ConfigError(f"{field}={value!r}; known: {', '.join(known)}")


def prepared(out: Vectors, pairs: Pairs, similarity: str) -> Vectors:
    """Vectors whose products are similarities: :func:`clean`, and of unit length for cosines."""
    out = clean(out, pairs)
    if similarity == "cosine":
        return out._replace(query=normalised(out.query), document=normalised(out.document))
    return out


def clean(out: Vectors, pairs: Pairs) -> Vectors:
    """In float32; what is not there is zero, whatever stood in its place, and so is its gradient.

    Where tokens have vectors, the result says which of them are seen.

    Raises:
        ConfigError: queries and documents have not the same kind of vectors.
    """
    query, document = (jnp.asarray(x, jnp.float32) for x in (out.query, out.document))
    if document.ndim != query.ndim + 1 or query.shape[-1] != document.shape[-1]:
        raise ConfigError(
            f"queries {query.shape} and documents {document.shape}: a loss of pairs takes [b, E] "
            "and [b, K, E], or a vector a token, [b, T, E] and [b, K, S, E]"
        )
    there = jnp.asarray(pairs.there)
    document = jnp.where(_like(there, document), document, 0.0)
    query = jnp.where(_like(there[:, 0], query), query, 0.0)
    query_seen = document_seen = None
    if query.ndim == 3:
        query_seen = _seen(out.query_seen, query) & there[:, :1]
        document_seen = _seen(out.document_seen, document) & there[:, :, None]
        query = jnp.where(query_seen[..., None], query, 0.0)
        document = jnp.where(document_seen[..., None], document, 0.0)
    return out._replace(
        query=query, document=document, query_seen=query_seen, document_seen=document_seen
    )


def normalised(x: jax.Array) -> jax.Array:
    """Of unit length along the last dim; a zero stays zero, and its gradient is finite."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def crossed(query: Any, query_seen: Any, document: Any, document_seen: Any) -> jax.Array:
    """Similarities of prepared queries with all of some documents.

    Args:
        query: f32[r, E], or f32[r, T, E] where ``query_seen`` is bool[r, T].
        query_seen: ``None``: a vector a row.
        document: f32[c, K, E], or f32[c, K, S, E].
        document_seen: bool[c, K, S], or ``None``.

    Returns:
        f32[r, c, K].
    """
    if query_seen is None:
        return _product("re,cke->rck", query, document)
    product = _product("rte,ckse->rckts", query, document)
    return maxsim(product, query_seen[:, None, None], document_seen)


def own(vectors: Vectors) -> jax.Array:
    """f32[b, K]: of prepared queries with their own documents."""
    if vectors.query_seen is None:
        return _product("be,bke->bk", vectors.query, vectors.document)

    @jax.checkpoint  # the products of tokens are made again rather than kept
    def one(_: None, x: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        document, seen = x
        return None, maxsim(
            _product("bte,bse->bts", vectors.query, document), vectors.query_seen, seen
        )

    by_document = [jnp.moveaxis(x, 1, 0) for x in (vectors.document, vectors.document_seen)]
    return jax.lax.scan(one, None, tuple(by_document))[1].T


def _product(letters: str, query: jax.Array, document: jax.Array) -> jax.Array:
    """In float32 on every chip: bfloat16's error times CLIP's factor of 100 is half a logit."""
    return jnp.einsum(letters, query, document, precision=jax.lax.Precision.HIGHEST)


def tile_size(vectors: Vectors, chunk: int) -> int:
    """Examples on a side of a tile: ``chunk``, or what keeps a tile's products in 16 MiB."""
    if chunk:
        return chunk
    count = vectors.document.shape[1]
    if vectors.query_seen is not None:
        count *= vectors.query.shape[1] * vectors.document.shape[2]
    return max(1, int((_TILE / count) ** 0.5))


def factor_of(out: Vectors, temperature: float, max_scale: float) -> jax.Array:
    """f32[]: what similarities are multiplied by: ``1 / temperature``, or what is learned.

    ``exp(min(scale, log(max_scale)))``, with no gradient at the bound and beyond it: from there
    only weight decay brings ``scale`` back. CLIP bounds the parameter itself after each update.

    Args:
        out: ``scale`` is read where ``temperature`` is 0.
        temperature: 0: learned.
        max_scale: bound of the factor that is learned; 0: none.

    Raises:
        ConfigError: nothing is learned.
    """
    if temperature:
        return jnp.float32(1.0 / temperature)
    if out.scale is None:
        raise ConfigError(
            "temperature=0 takes the model's learned scale, and this model has none; set a "
            "temperature, e.g. 0.05"
        )
    scale = jnp.asarray(out.scale, jnp.float32)
    if max_scale:
        bound = jnp.log(jnp.float32(max_scale))
        scale = jnp.where(scale < bound, scale, bound)
    return jnp.exp(scale)


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def _seen(seen: Any, x: jax.Array) -> jax.Array:
    return jnp.ones(x.shape[:-1], bool) if seen is None else jnp.asarray(seen)
