"""Retrieval metrics of embeddings: recall, hit rate, nDCG, MRR and MAP.

Source: trec_eval's definitions, as in BEIR (arXiv 2104.08663) and in sentence-transformers'
    InformationRetrievalEvaluator. docs/embedding_eval.md says where these differ from each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxvlm.config import ConfigError
from jaxvlm.evals import ties
from jaxvlm.parallel.exact_search import Late, Nearest, Search, nearest
from jaxvlm.types import Array

REVERSE, RANDOM = "reverse/", "random/"
_MOST_TIES = 4096  # retrieved to find where a tie ends; a model that collapsed has no end


@dataclasses.dataclass(frozen=True)
class Relevance:
    """Which documents are relevant to which query, as M (query, document) pairs."""

    query: np.ndarray
    """i64[M]: index of the query, below ``queries``."""
    document: np.ndarray
    """i64[M]: index of the document, below ``documents``; a pair occurs once."""
    grade: np.ndarray
    """f64[M]: relevance grade above 0; 1 where relevance is binary."""
    queries: int
    """Number of queries."""
    documents: int
    """Number of documents."""

    @classmethod
    def of(
        cls, relevant: Sequence[Collection[int] | Mapping[int, float]], documents: int
    ) -> Relevance:
        """Builds the relation from the relevant documents of each query.

        Args:
            relevant: for each query, document indices, or index -> grade; documents of grade 0 or
                below are not relevant.
            documents: number of documents.

        Raises:
            ConfigError: an index is negative or not below ``documents``.
        """
        pairs = [
            (i, document, float(of_query[document] if isinstance(of_query, Mapping) else 1))
            for i, of_query in enumerate(relevant)
            for document in dict.fromkeys(of_query)
        ]
        pairs = [pair for pair in pairs if pair[2] > 0]
        query, document = (np.asarray([pair[i] for pair in pairs], np.int64) for i in (0, 1))
        if len(document) and not 0 <= document.min() <= document.max() < documents:
            raise ConfigError(
                f"relevance: document {document.max() if document.min() >= 0 else document.min()} "
                f"is relevant to a query, but there are {documents} documents, counted from 0; "
                "give the indices of these documents"
            )
        return cls(query, document, np.asarray([p[2] for p in pairs]), len(relevant), documents)

    @classmethod
    def pairs(cls, count: int) -> Relevance:
        """Builds the relation in which only document i is relevant to query i."""
        each = np.arange(count)
        return cls(each, each, np.ones(count), count, count)

    @property
    def reverse(self) -> Relevance:
        """The same relation with documents as queries."""
        return Relevance(self.document, self.query, self.grade, self.documents, self.queries)


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """Settings of which metrics to compute."""

    ks: tuple[int, ...] = (1, 5, 10)
    """Cut-offs of the metrics; one above the number of documents includes all of them."""
    dims: tuple[int, ...] = ()
    """Numbers of dims to truncate embeddings to, measured in addition to all dims; at unit length
    again, as the Matryoshka loss trains them and ``jaxvlm embed --dims`` writes them."""
    both_ways: bool = True
    """Whether to search queries with documents too."""
    cosine: bool = True
    """Whether to compare by cosine instead of by dot product."""
    random: bool = True
    """Whether to measure a random ranking too, as a control."""
    seed: int = 0
    """Seed of the control."""

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ConfigError(f"ks={self.ks}: use cut-offs of at least 1")
        if min(self.dims, default=1) < 1:
            raise ConfigError(f"dims={self.dims}: use numbers of dims of at least 1")


def evaluate(
    queries: Array | Late,
    documents: Array | Late,
    relevance: Relevance,
    mesh: Mesh,
    settings: Retrieval | None = None,
    exclude: Sequence[Collection[int]] | None = None,
) -> dict[str, float]:
    """Searches all documents for each query and computes the metrics.

    Args:
        queries: [Q, E], NumPy or jax.Array; or :class:`~jaxvlm.parallel.exact_search.Late`.
        documents: [N, E], of the same types.
        relevance: which documents are relevant to which queries.
        mesh: mesh to search on.
        settings: see :class:`Retrieval`.
        exclude: for each query, documents to leave out, such as the query itself.

    Returns:
        ``hit@k``, ``recall@k``, ``ndcg@k``, ``mrr@k`` and ``map@k`` in 0..1, with the prefix
        ``dims<n>/`` for truncated embeddings, ``reverse/`` for queries searched with documents and
        ``random/`` for the control. ``queries`` is the number of queries with a relevant document.

    Raises:
        ConfigError: no query has a relevant document, or :func:`nearest` refuses the settings.
    """
    settings = settings or Retrieval()
    counts = (_count(queries), _count(documents))
    if (relevance.queries, relevance.documents) != counts:
        raise ConfigError(
            f"relevance covers {relevance.queries} queries and {relevance.documents} documents, "
            f"but there are embeddings of {counts[0]} and {counts[1]}; give those of the same items"
        )
    excluded = None if exclude is None else Relevance.of(exclude, relevance.documents)
    report: dict[str, float] = {}
    for prefix, q, d, relevant, out in (
        ("", queries, documents, relevance, excluded),
        (REVERSE, documents, queries, relevance.reverse, excluded and excluded.reverse),
    )[: 1 + settings.both_ways]:
        depth = min(max(settings.ks), relevant.documents)
        forbidden = None if out is None else _lists(out)
        for dims in (0, *settings.dims):
            search = Search(cosine=settings.cosine or dims > 0, dims=dims)
            found = _through_ties(q, d, depth, mesh, search, forbidden)
            name = f"{prefix}dims{dims}/" if dims else prefix
            measured = scores(found.document, relevant, settings.ks, found.score)
            report |= {name + n: x for n, x in measured.items()}
        if settings.random:
            shape = (relevant.queries, relevant.documents, depth)
            drawn = shuffled(*shape, settings.seed, forbidden)
            name = prefix + RANDOM
            report |= {name + n: x for n, x in scores(drawn, relevant, settings.ks).items()}
    return report | {"queries": float(len(np.unique(relevance.query)))}


def _through_ties(
    queries: Array | Late,
    documents: Array | Late,
    depth: int,
    mesh: Mesh,
    search: Search,
    exclude: Sequence[Collection[int]] | None,
) -> Nearest:
    """The best ``depth`` documents of each query, and all that score as the last of these does."""
    count, further = _count(documents), depth + 1
    while True:
        found = nearest(queries, documents, min(further, count), mesh, search, exclude)
        last = found.score[:, -1]
        is_open = (last == found.score[:, depth - 1]) & np.isfinite(last)
        if further >= min(count, _MOST_TIES) or not is_open.any():
            return found
        further *= 4


def scores(
    ranked: np.ndarray,
    relevance: Relevance,
    ks: Sequence[int],
    similarity: np.ndarray | None = None,
) -> dict[str, float]:
    """Averages the metrics over the queries that have a relevant document, as all libraries do.

    Args:
        ranked: i[Q, d] document indices, best first; -1 is none.
        relevance: relevant documents of the Q queries.
        ks: cut-offs; d should be at least the largest, or the number of documents.
        similarity: f[Q, d], of each retrieved document: documents of equal similarity are in no
            order, and metrics are expected values over all orders of them. Where the last
            document's equals that of rank max(ks), all documents that were not retrieved are taken
            to be equal too. ``None``: the order is as given.

    Returns:
        ``hit@k``: whether at least one relevant document is among the first k. ``recall@k``: the
        fraction of the relevant documents that are. ``ndcg@k``: the sum of grades discounted by
        log2(1 + rank), divided by that of the best order. ``mrr@k``: 1 / rank of the first relevant
        document. ``map@k``: the mean, over all relevant documents, of the precision at each that is
        among the first k.

    Raises:
        ConfigError: no query has a relevant document.
    """
    total = np.bincount(relevance.query, minlength=relevance.queries)
    has_relevant = total > 0
    if not has_relevant.any():
        raise ConfigError("retrieval: no query has a relevant document; nothing can be measured")
    grades = np.bincount(relevance.query, relevance.grade, minlength=relevance.queries)
    gain, total, grades = (
        _gains(ranked, relevance)[has_relevant],
        *(x[has_relevant] for x in (total, grades)),
    )
    tied = ties.Ties.of(
        gain, None if similarity is None else similarity[has_relevant],
        min(max(ks), ranked.shape[1]), relevance.documents, total, grades,
    )  # fmt: skip
    discount = 1 / np.log2(1 + np.arange(1, ranked.shape[1] + 1))
    gained, hits, precision = tied.gain * discount, tied.hits, tied.precision
    out: dict[str, Any] = {}
    for k in ks:
        out |= {
            f"hit@{k}": np.mean(tied.any_hit(min(k, ranked.shape[1]))),
            f"recall@{k}": np.mean(hits[:, :k].sum(axis=1) / total),
            f"ndcg@{k}": np.mean(gained[:, :k].sum(axis=1) / _ideal(relevance, k)[has_relevant]),
            f"mrr@{k}": np.mean(tied.reciprocal_rank[:, :k].sum(axis=1)),
            f"map@{k}": np.mean(precision[:, :k].sum(axis=1) / total),
        }
    return {name: float(value) for name, value in out.items()}


def shuffled(
    queries: int,
    documents: int,
    depth: int,
    seed: int,
    exclude: Sequence[Collection[int]] | None = None,
) -> np.ndarray:
    """i64[queries, depth]: distinct random documents, a function of the arguments alone.

    Those of ``exclude`` are left out; -1 where there are fewer than ``depth`` others.
    """
    rng = np.random.default_rng([seed, queries, documents])
    drawn = np.full((queries, depth), -1)
    for i, row in enumerate(drawn):
        out = list(exclude[i]) if exclude else []
        more = rng.choice(documents, min(depth + len(out), documents), replace=False)
        more = more[~np.isin(more, out)][:depth]
        row[: len(more)] = more
    return drawn


def _count(embeddings: Array | Late) -> int:
    return len(embeddings.embeddings if isinstance(embeddings, Late) else embeddings)


def _lists(pairs: Relevance) -> list[list[int]]:
    """The documents of each query."""
    order = np.argsort(pairs.query, kind="stable")
    ends = np.cumsum(np.bincount(pairs.query, minlength=pairs.queries))
    return [some.tolist() for some in np.split(pairs.document[order], ends[:-1])]


def _gains(ranked: np.ndarray, relevance: Relevance) -> np.ndarray:
    """f64[Q, d]: the grade of each retrieved document; 0 if it is not relevant."""
    key = relevance.query * relevance.documents + relevance.document
    order = np.argsort(key)
    retrieved = np.arange(len(ranked))[:, None] * relevance.documents + ranked
    at = np.minimum(np.searchsorted(key[order], retrieved), len(key) - 1)
    is_relevant = (key[order][at] == retrieved) & (ranked >= 0)
    return np.where(is_relevant, relevance.grade[order][at], 0)


def _ideal(relevance: Relevance, k: int) -> np.ndarray:
    """f64[Q]: the sum of discounted gains of the first ``k`` ranks in the best order."""
    order = np.lexsort((-relevance.grade, relevance.query))
    query, grade = relevance.query[order], relevance.grade[order]
    rank = np.arange(len(query)) - np.searchsorted(query, query) + 1
    gain = np.where(rank <= k, grade / np.log2(1 + rank), 0)
    return np.bincount(query, gain, relevance.queries)
