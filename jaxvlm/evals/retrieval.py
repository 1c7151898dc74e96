"""How well vectors find what belongs together: recall, hits, nDCG, MRR and MAP.

Source: trec_eval's definitions, as BEIR's (arXiv 2104.08663) and sentence-transformers'
    InformationRetrievalEvaluator. docs/embedding_eval.md says where these differ from each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxvlm.config import ConfigError
from jaxvlm.parallel.topk import Late, Search, nearest
from jaxvlm.types import Array

REVERSE, RANDOM = "reverse/", "random/"


@dataclasses.dataclass(frozen=True)
class Relevance:
    """Which documents are right for which query, one entry a pair."""

    query: np.ndarray
    """i64[M], 0..queries."""
    document: np.ndarray
    """i64[M], 0..documents; a pair stands here once."""
    grade: np.ndarray
    """f64[M], above 0; 1 where relevance is yes or no."""
    queries: int
    documents: int

    @classmethod
    def of(
        cls, right: Sequence[Collection[int] | Mapping[int, float]], documents: int
    ) -> Relevance:
        """From each query's right documents, or the grade of each.

        Args:
            right: indices, or index -> grade; those of grade 0 or below are not relevant.
            documents: how many there are.

        Raises:
            ConfigError: an index that no document has.
        """
        found = [
            (i, document, float(right_ones[document] if isinstance(right_ones, Mapping) else 1))
            for i, right_ones in enumerate(right)
            for document in dict.fromkeys(right_ones)
        ]
        found = [entry for entry in found if entry[2] > 0]
        query, document = (np.asarray([entry[i] for entry in found], np.int64) for i in (0, 1))
        if len(document) and not 0 <= document.min() <= document.max() < documents:
            raise ConfigError(
                f"relevance: document {document.max() if document.min() >= 0 else document.min()} "
                f"is right for a query, but there are {documents}, counted from 0"
            )
        return cls(query, document, np.asarray([e[2] for e in found]), len(right), documents)

    @classmethod
    def pairs(cls, count: int) -> Relevance:
        """Query i is about document i and no other."""
        each = np.arange(count)
        return cls(each, each, np.ones(count), count, count)

    @property
    def reverse(self) -> Relevance:
        """Of documents as queries."""
        return Relevance(self.document, self.query, self.grade, self.documents, self.queries)


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """What to measure."""

    ks: tuple[int, ...] = (1, 5, 10)
    """Cut-offs. Beyond the number of documents a cut-off cuts nothing."""
    dims: tuple[int, ...] = ()
    """Prefixes of the vectors (Matryoshka) to measure beside the whole."""
    both_ways: bool = True
    """Documents look for queries too."""
    cosine: bool = True
    """Or products as they are."""
    random: bool = True
    """Rank at random too: the control."""
    seed: int = 0
    """Of the control."""

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ConfigError(f"ks={self.ks}: give cut-offs of at least 1")
        if min(self.dims, default=1) < 1:
            raise ConfigError(f"dims={self.dims}: give numbers of dims of at least 1")


def evaluate(
    queries: Array | Late,
    documents: Array | Late,
    relevance: Relevance,
    mesh: Mesh,
    what: Retrieval | None = None,
    exclude: Sequence[Collection[int]] | None = None,
) -> dict[str, float]:
    """Search and measure.

    Args:
        queries: [Q, E], NumPy or on the devices; or :class:`~jaxvlm.parallel.topk.Late`.
        documents: [N, E], likewise.
        relevance: of these.
        mesh: to search on.
        what: see :class:`Retrieval`.
        exclude: for each query, documents that don't count: itself, where queries are documents.

    Returns:
        ``hit@k``, ``recall@k``, ``ndcg@k``, ``mrr@k`` and ``map@k`` in 0..1. Before these
        names ``dims<n>/`` is of a prefix, ``reverse/`` of documents that look for queries,
        ``random/`` of the control. ``queries``: how many were measured.

    Raises:
        ConfigError: no query has a right document, or what :func:`nearest` refuses.
    """
    what = what or Retrieval()
    sides = (_count(queries), _count(documents))
    if (relevance.queries, relevance.documents) != sides:
        raise ConfigError(
            f"relevance is of {relevance.queries} queries and {relevance.documents} documents, "
            f"but there are vectors of {sides[0]} and {sides[1]}"
        )
    left_out = None if exclude is None else Relevance.of(exclude, relevance.documents)
    report: dict[str, float] = {}
    for prefix, asked, known, right, out in (
        ("", queries, documents, relevance, left_out),
        (REVERSE, documents, queries, relevance.reverse, left_out and left_out.reverse),
    )[: 1 + what.both_ways]:
        depth = min(max(what.ks), right.documents)
        forbidden = None if out is None else _lists(out)
        for dims in (0, *what.dims):
            how = Search(cosine=what.cosine, dims=dims)
            found = nearest(asked, known, depth, mesh, how, forbidden).document
            name = f"{prefix}dims{dims}/" if dims else prefix
            report |= {name + n: x for n, x in scores(found, right, what.ks).items()}
        if what.random:
            drawn = shuffled(right.queries, right.documents, depth, what.seed)
            name = prefix + RANDOM
            report |= {name + n: x for n, x in scores(drawn, right, what.ks).items()}
    return report | {"queries": float(len(np.unique(relevance.query)))}


def scores(found: np.ndarray, relevance: Relevance, ks: Sequence[int]) -> dict[str, float]:
    """Means over the queries that have a right document; the others are left out, as everywhere.

    Args:
        found: i[Q, d] documents, best first; -1 is none.
        relevance: of the Q queries.
        ks: cut-offs; d should reach the largest, or all documents.

    Returns:
        ``hit@k``: one at least is among the first k. ``recall@k``: the share of all right ones that
        is. ``ndcg@k``: gains are grades, discounted by log2(1 + rank), over the same of the best
        order. ``mrr@k``: 1 / rank of the first right one. ``map@k``: the mean, over all right
        ones, of the precision at each that is among the first k.

    Raises:
        ConfigError: no query has a right document.
    """
    total = np.bincount(relevance.query, minlength=relevance.queries)
    asked = total > 0
    if not asked.any():
        raise ConfigError("retrieval: no query has a right document; nothing can be measured")
    gain, total = _gains(found, relevance)[asked], total[asked]
    hit, rank = gain > 0, np.arange(1, found.shape[1] + 1)
    discount = 1 / np.log2(1 + rank)
    first = np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, np.inf)
    precision = np.cumsum(hit, axis=1) / rank * hit
    out: dict[str, Any] = {}
    for k in ks:
        gained = (gain * discount)[:, :k].sum(axis=1)
        out |= {
            f"hit@{k}": np.mean(first <= k),
            f"recall@{k}": np.mean(hit[:, :k].sum(axis=1) / total),
            f"ndcg@{k}": np.mean(gained / _ideal(relevance, k)[asked]),
            f"mrr@{k}": np.mean(np.where(first <= k, 1 / first, 0)),
            f"map@{k}": np.mean(precision[:, :k].sum(axis=1) / total),
        }
    return {name: float(value) for name, value in out.items()}


def shuffled(queries: int, documents: int, depth: int, seed: int) -> np.ndarray:
    """i64[queries, depth]: different documents at random, a function of the arguments alone."""
    rng = np.random.default_rng([seed, queries, documents])
    drawn = [rng.choice(documents, depth, replace=False) for _ in range(queries)]
    return np.stack(drawn)


def _count(side: Array | Late) -> int:
    return len(side.vectors if isinstance(side, Late) else side)


def _lists(pairs: Relevance) -> list[list[int]]:
    """The documents of each query."""
    order = np.argsort(pairs.query, kind="stable")
    ends = np.cumsum(np.bincount(pairs.query, minlength=pairs.queries))
    return [some.tolist() for some in np.split(pairs.document[order], ends[:-1])]


def _gains(found: np.ndarray, relevance: Relevance) -> np.ndarray:
    """f64[Q, d]: the grade of each document that was found; 0 is not right."""
    key = relevance.query * relevance.documents + relevance.document
    order = np.argsort(key)
    ours = np.arange(len(found))[:, None] * relevance.documents + found
    at = np.minimum(np.searchsorted(key[order], ours), len(key) - 1)
    is_right = (key[order][at] == ours) & (found >= 0)
    return np.where(is_right, relevance.grade[order][at], 0)


def _ideal(relevance: Relevance, k: int) -> np.ndarray:
    """f64[Q]: the discounted gains of the first ``k`` places in the best order."""
    order = np.lexsort((-relevance.grade, relevance.query))
    query, grade = relevance.query[order], relevance.grade[order]
    rank = np.arange(len(query)) - np.searchsorted(query, query) + 1
    gain = np.where(rank <= k, grade / np.log2(1 + rank), 0)
    return np.bincount(query, gain, relevance.queries)
