"""Exact top-k search: the documents of a corpus that score highest for a query, over a mesh.

Documents are split over the mesh's batch axes. Each device scores its own in tiles, keeps the top
k, and the devices' top k are merged: a matrix of all queries against all documents never exists.
Tiles have one shape on every mesh and normalization happens in them, so that scores, and with them
ties, are bit-identical on one device and on many.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxvlm.config import ConfigError
from jaxvlm.parallel.mesh import BATCH_AXES, batch_shards
from jaxvlm.parallel.sharding import batch_sharding, replicated

_TINY = 1e-12
_TILES = {2: (256, 2048), 3: (8, 64)}  # queries and documents; late interaction has many scores
Best = tuple[jax.Array, jax.Array]
"""f32[q, k] scores, best first, and i32[q, k] document indices."""


class Late(NamedTuple):
    """One embedding for each token, compared by late interaction (MaxSim): ColBERT, ColPali."""

    embeddings: Any
    """f32[N, S, E]."""
    seen: Any
    """bool[N, S]: True for tokens that count, False for padding."""


class Nearest(NamedTuple):
    """The top k of each query, best first; ties go to the lower index."""

    score: np.ndarray
    """f32[Q, k]; -inf where there are fewer than k documents."""
    document: np.ndarray
    """i32[Q, k]: document indices; -1 where the score is -inf."""


@dataclasses.dataclass(frozen=True)
class Search:
    """Similarity and tile sizes of a search. Sizes change time and memory, not results."""

    cosine: bool = True
    """Whether embeddings are normalized to unit length first; else plain inner products."""
    dims: int = 0
    """Leading dims of an embedding to use (Matryoshka), cut before normalization; 0: all."""
    query_tile: int = 0
    """Queries in a tile; 0: 256, or 8 with late interaction."""
    document_tile: int = 0
    """Documents in a device's tile; 0: 2048, or 64 with late interaction."""
    resident: int = 1 << 18
    """Most documents in device memory at once, for a corpus in host memory."""

    def __post_init__(self) -> None:
        if min(self.dims, self.query_tile, self.document_tile, self.resident - 1) < 0:
            raise ConfigError(
                f"{self}: dims, query_tile and document_tile must be at least 0, resident at "
                "least 1"
            )


def nearest(
    queries: Any,
    documents: Any,
    k: int,
    mesh: Mesh,
    how: Search | None = None,
    exclude: Sequence[Collection[int]] | None = None,
) -> Nearest:
    """Find the ``k`` documents that score highest for each query, exactly.

    Args:
        queries: [Q, E], or :class:`Late`. NumPy, or on the devices of ``mesh``.
        documents: [N, E], or :class:`Late`. Arrays on the mesh's devices are not copied; others
            (NumPy arrays, a memory map, anything with a shape and slices) are copied to the
            devices a part at a time.
        k: 1..N.
        mesh: documents are split over its batch axes.
        how: see :class:`Search`.
        exclude: for each query, document indices to leave out.

    Returns:
        Scores and document indices, the same on every mesh and in every process.

    Raises:
        ConfigError: ``k`` or ``dims`` is out of range, shapes do not fit, or a score is NaN.
    """
    how = how or Search()
    query, corpus = _late(queries), _late(documents)
    _check(query, corpus, k, how)
    host = jax.tree.map(lambda x: _host(x, mesh), query)
    Q, q = len(host.embeddings), _size(how.query_tile or _TILES[host.embeddings.ndim][0], host)
    left_out = _padded(exclude, Q)
    best_of = [
        (np.full((q, k), -np.inf, np.float32), np.full((q, k), -1, np.int32))
        for _ in range(0, Q, q)
    ]
    tile = _size(how.document_tile or _TILES[corpus.embeddings.ndim][1], corpus)
    for first, count, part in _parts(corpus, tile, how.resident, mesh):
        for i, best in enumerate(best_of):
            rows = slice(i * q, (i + 1) * q)
            some = jax.tree.map(lambda x, rows=rows: _filled(x[rows], q), (host, left_out))
            numbers = np.asarray([first, count], np.int32)
            new = _step(mesh, k, tile, how.cosine, how.dims, best, *some, part, numbers)
            best_of[i] = np.asarray(new[0]), np.asarray(new[1])
    score, index = (np.concatenate([best[i] for best in best_of])[:Q] for i in (0, 1))
    if np.isnan(score).any():
        raise ConfigError("search: some embeddings contain NaN and cannot be ranked")
    return Nearest(score, np.where(np.isneginf(score), -1, index))


def _late(x: Any) -> Late:
    """Wrap ``x``, with ``seen`` ``None`` where there is one embedding for each example."""
    return x if isinstance(x, Late) else Late(x, None)


def _check(queries: Late, documents: Late, k: int, how: Search) -> None:
    of_queries, of_documents = queries.embeddings.shape, documents.embeddings.shape
    alike = len(of_queries) == len(of_documents) and of_queries[-1] == of_documents[-1]
    if not alike or len(of_queries) != (2 if queries.seen is None else 3):
        raise ConfigError(
            f"search: queries {list(of_queries)} and documents {list(of_documents)}: give [Q, E] "
            "and [N, E], or both as [Q, T, E] and [N, S, E] with masks"
        )
    if not of_queries[0] or not 1 <= k <= of_documents[0]:
        raise ConfigError(
            f"search: k={k} of {of_documents[0]} documents for {of_queries[0]} queries; k must be "
            "at least 1 and at most the number of documents, with at least one query"
        )
    if how.dims > of_queries[-1]:
        raise ConfigError(
            f"search: dims={how.dims} is more than the embeddings' {of_queries[-1]} dims"
        )


def _size(most: int, of: Late) -> int:
    """Return a tile's size: it depends on the number of examples alone, never on the devices."""
    return min(most, max(8, 1 << (len(of.embeddings) - 1).bit_length()))


def _host(x: Any, mesh: Mesh) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = jax.jit(lambda x: x, out_shardings=replicated(mesh))(x)
    return np.asarray(x)


def _filled(x: np.ndarray, rows: int) -> np.ndarray:
    """Pad with zeros to ``rows``."""
    return np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1)) if len(x) < rows else x


def _padded(exclude: Sequence[Collection[int]] | None, count: int) -> np.ndarray:
    """Return i32[Q, X], padded with -1 to a power of two, so that few programs are compiled."""
    if exclude is None:
        return np.full((count, 1), -1, np.int32)
    if len(exclude) != count:
        raise ConfigError(
            f"search: {len(exclude)} lists of excluded documents for {count} queries; give one "
            "list for each query"
        )
    most = max(1, *(len(x) for x in exclude)) if count else 1
    out = np.full((count, 1 << (most - 1).bit_length()), -1, np.int32)
    for row, x in zip(out, exclude):
        row[: len(x)] = sorted(x)
    return out


def _parts(
    documents: Late, tile: int, resident: int, mesh: Mesh
) -> Iterator[tuple[int, int, Late]]:
    """Yield (first index, count, documents on the devices), padded to full tiles on each."""
    count, shards = len(documents.embeddings), batch_shards(mesh)
    tiles = -(-count // (tile * shards))  # tiles of one device
    sharding, x = batch_sharding(mesh), documents.embeddings
    if isinstance(x, jax.Array) and x.sharding.device_set == set(mesh.devices.flat):
        rows = tiles * tile * shards
        fill = jax.jit(
            lambda x: jnp.pad(x, [(0, rows - count)] + [(0, 0)] * (x.ndim - 1)),
            out_shardings=sharding,
        )
        yield 0, count, jax.tree.map(fill if rows > count else lambda x: x, documents)
        return
    parts = -(-tiles // max(1, resident // tile))
    rows = -(-tiles // parts) * tile * shards
    for first in range(0, count, rows):
        some = jax.tree.map(
            lambda x, first=first: jax.device_put(
                _filled(np.asarray(x[first : first + rows]), rows), sharding
            ),
            documents,
        )
        yield first, min(rows, count - first), some


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _step(
    mesh: Mesh,
    k: int,
    tile: int,
    cosine: bool,
    dims: int,
    best: Best,
    queries: Late,
    exclude: jax.Array,
    documents: Late,
    numbers: jax.Array,
) -> Best:
    """Merge the top k of a part of the documents into ``best``."""
    over, everywhere = PartitionSpec(BATCH_AXES), PartitionSpec()

    def on_device(
        best: Best, queries: Late, exclude: jax.Array, mine: Late, numbers: jax.Array
    ) -> Best:
        first, end = numbers[0], numbers[0] + numbers[1]
        start = first + jax.lax.axis_index(BATCH_AXES) * len(mine.embeddings)
        query = queries._replace(embeddings=_ready(queries.embeddings, cosine, dims))

        def score_tile(top_k: Best, tile_number: jax.Array) -> tuple[Best, None]:
            at = tile_number * tile
            some = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, tile), mine)
            score = _scores(query, some._replace(embeddings=_ready(some.embeddings, cosine, dims)))
            index = start + at + jnp.arange(tile, dtype=jnp.int32)
            score = jnp.where(index < end, score, -jnp.inf)
            # Scatter drops indices past the tile; negative ones would count from its end.
            column = jnp.where(exclude < start + at, tile, exclude - start - at)
            score = score.at[jnp.arange(len(score))[:, None], column].set(-jnp.inf, mode="drop")
            top, where = jax.lax.top_k(score, min(k, tile))
            return _merged(k, top_k, (top, index[where])), None

        nothing = jnp.full_like(best[0], -jnp.inf), jnp.full_like(best[1], -1)
        tiles = jnp.arange(len(mine.embeddings) // tile, dtype=jnp.int32)
        top_k, _ = jax.lax.scan(score_tile, nothing, tiles)
        everyones = [jax.lax.all_gather(x, BATCH_AXES, axis=1, tiled=True) for x in top_k]
        return _merged(k, best, (everyones[0], everyones[1]))

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, everywhere, over, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )
    return run(best, queries, exclude, documents, numbers)


def _ready(x: jax.Array, cosine: bool, dims: int) -> jax.Array:
    x = x[..., : dims or None].astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), _TINY) if cosine else x


def _scores(queries: Late, documents: Late) -> jax.Array:
    """f32[q, c]."""
    exact: dict[str, Any] = {"precision": "highest", "preferred_element_type": jnp.float32}
    if queries.seen is None:
        return jnp.einsum("qe,ce->qc", queries.embeddings, documents.embeddings, **exact)
    each = jnp.einsum("qte,cse->qtcs", queries.embeddings, documents.embeddings, **exact)
    most = jnp.max(jnp.where(documents.seen, each, -jnp.inf), axis=-1)
    return jnp.sum(jnp.where(queries.seen[..., None], most, 0), axis=1)


def _merged(k: int, one: Best, other: Best) -> Best:
    """Merge two top k. Ties go to the first: ``one`` has the lower indices."""
    score, index = (jnp.concatenate(pair, axis=1) for pair in zip(one, other))
    top, where = jax.lax.top_k(score, k)
    return top, jnp.take_along_axis(index, where, axis=1)
