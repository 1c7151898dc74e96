"""Hard negatives: documents that a model wrongly scores close to a query.

Source: NV-Retriever, arXiv 2407.15831 (TopK-PercPos is ``relative_margin``, TopK-MarginPos is
    ``absolute_margin``); options and their order as sentence-transformers' ``mine_hard_negatives``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxvlm.config import ConfigError
from jaxvlm.data.pairs.examples import Example
from jaxvlm.evals.zero_shot import unit
from jaxvlm.inference.examples import Gathered
from jaxvlm.parallel.exact_search import Search, nearest

_CANDIDATES_PER_NEGATIVE = 10  # where a score or margin may exclude some candidates
_PAIRS = 4096  # pairs per step of computing cosines


@dataclasses.dataclass(frozen=True)
class MiningConfig:
    """How negatives are chosen; a query's positives and the query itself never become negatives."""

    num_negatives: int = 3
    """Maximum number of negatives to mine for each query."""
    range_min: int = 0
    """Number of best-scoring candidates to skip, after the scores and margins below are applied."""
    range_max: int = 0
    """Number of best-scoring documents to take as candidates; 0 means range_min + num_negatives, or
    range_min + 10 * num_negatives if a score or margin is set."""
    max_score: float | None = None
    """Maximum cosine of a negative with its query."""
    min_score: float | None = None
    """Minimum cosine of a negative with its query."""
    absolute_margin: float | None = None
    """Minimum difference by which a negative scores below the query's lowest-scoring positive."""
    relative_margin: float | None = None
    """The same margin as a fraction of the positive's score: 0.05 is NV-Retriever's 95 %."""
    sampling: str = "top"
    """``top`` takes the hardest remaining candidates, ``random`` a random choice of them."""
    seed: int = 0
    """Seed of ``random``."""
    cosine: bool = True
    """Whether to compare by cosine instead of by dot product."""

    def __post_init__(self) -> None:
        if self.num_negatives < 1 or self.range_min < 0 or self.range_max < 0:
            raise ConfigError(
                f"num_negatives={self.num_negatives} must be at least 1, "
                f"range_min={self.range_min} and range_max={self.range_max} at least 0"
            )
        if self.range_max and self.range_max - self.range_min < self.num_negatives:
            raise ConfigError(
                f"range_min={self.range_min} to range_max={self.range_max} holds fewer "
                f"candidates than num_negatives={self.num_negatives}; raise range_max"
            )
        if self.sampling not in ("top", "random"):
            raise ConfigError(f"sampling={self.sampling!r}: use top or random")
        for name in ("max_score", "min_score"):
            score = getattr(self, name)
            if score is None or (-1 <= score <= 1 if self.cosine else math.isfinite(score)):
                continue
            use = "scores are cosines; use a number from -1 to 1" if self.cosine else "use a number"
            raise ConfigError(f"{name}={score:g}: {use}")
        for name in ("absolute_margin", "relative_margin"):
            margin = getattr(self, name)
            most = 2 if self.cosine or name == "relative_margin" else math.inf
            if margin is not None and not 0 <= margin <= most:
                raise ConfigError(f"{name}={margin:g}: use a number from 0 to {most:g}")

    @property
    def bounded(self) -> bool:
        """Whether a score or margin may exclude candidates."""
        bounds = (self.max_score, self.min_score, self.absolute_margin, self.relative_margin)
        return any(bound is not None for bound in bounds)


@dataclasses.dataclass(frozen=True)
class Mined:
    """The mined negatives of each query, the hardest first."""

    document: np.ndarray
    """i32[Q, num_negatives]; -1 where there are no more."""
    score: np.ndarray
    """f32[Q, num_negatives] cosines; -inf where there are no more."""
    positive: np.ndarray
    """f32[Q]: the lowest score of a query's positives; inf where it has none."""
    excluded: dict[str, int]
    """Score or margin -> number of candidates that it excluded, in the order they were applied."""


def check(count: int, mining: MiningConfig) -> None:
    """Refuse a corpus with too few documents, before they are embedded.

    Args:
        count: number of documents of the corpus.
        mining: settings.

    Raises:
        ConfigError: the corpus has fewer documents than ``mining`` needs.
    """
    if count < 2:
        raise ConfigError(f"mine: the corpus has {count} documents; negatives need at least 2")
    for name in ("num_negatives", "range_max"):
        if (value := getattr(mining, name)) > count:
            raise ConfigError(f"mine: {name}={value}, but the corpus has {count} documents")


def mine(
    queries: Any,
    documents: Any,
    positives: Sequence[Collection[int]],
    mesh: Mesh,
    mining: MiningConfig,
    exclude: Sequence[Collection[int]] | None = None,
) -> Mined:
    """Search all documents for hard negatives of each query; exact, and equal on every mesh.

    Args:
        queries: f32[Q, E], NumPy or :class:`~jaxvlm.inference.resumable_array.ResumableArray`.
        documents: f32[N, E], of either type too.
        positives: indices of each query's positives, which never become its negatives. Margins
            do not apply to a query without positives.
        mesh: mesh to search on.
        mining: see :class:`MiningConfig`.
        exclude: for each query, indices of further documents that must not become negatives.

    Returns:
        The negatives of each query and their scores.

    Raises:
        ConfigError: the corpus has fewer documents than ``mining`` needs.
    """
    check(count := len(documents), mining)
    excluded = [{*x, *y} for x, y in zip(positives, exclude or [()] * len(positives), strict=True)]
    factor = _CANDIDATES_PER_NEGATIVE if mining.bounded else 1
    candidates = mining.range_max or mining.range_min + mining.num_negatives * factor
    result = nearest(
        queries, documents, min(candidates, count), mesh, Search(mining.cosine), excluded
    )
    positive = _lowest_positive(queries, documents, positives, mining.cosine)
    score, counts = _apply_bounds(result.score.copy(), positive, mining)
    # Sort the remaining candidates to the front, then skip the first range_min of them.
    order = np.argsort(np.isneginf(score), axis=1, kind="stable")[:, mining.range_min :]
    score = np.take_along_axis(score, order, axis=1)
    document = np.take_along_axis(result.document, order, axis=1)
    if mining.sampling == "random":
        chosen = _sample(np.sum(~np.isneginf(score), axis=1), mining)
        is_chosen = chosen >= 0
        score = np.where(is_chosen, np.take_along_axis(score, chosen, axis=1), -np.inf)
        document = np.take_along_axis(document, chosen, axis=1)
    padding = [(0, 0), (0, mining.num_negatives)]  # the corpus may be smaller than num_negatives
    score = np.pad(score, padding, constant_values=-np.inf)[:, : mining.num_negatives]
    document = np.pad(document, padding, constant_values=-1)[:, : mining.num_negatives]
    document = np.where(np.isneginf(score), -1, document)
    return Mined(document, score.astype(np.float32), positive, counts)


def _apply_bounds(
    score: np.ndarray, positive: np.ndarray, mining: MiningConfig
) -> tuple[np.ndarray, dict[str, int]]:
    """Set the scores of excluded candidates to -inf; also count them per setting."""
    lowest = positive[:, None]
    violates = {
        "absolute_margin": lambda x, bound: x + bound > lowest,
        "relative_margin": lambda x, bound: x > lowest - np.abs(lowest) * bound,
        "max_score": lambda x, bound: x > bound,
        "min_score": lambda x, bound: x < bound,
    }
    counts = {}
    for name, violation in violates.items():
        bound = getattr(mining, name)
        if bound is not None:
            excluded = violation(score, np.float32(bound)) & ~np.isneginf(score)
            score[excluded] = -np.inf
            counts[name] = int(excluded.sum())
    return score, counts


def similarities(
    queries: Any, documents: Any, query: np.ndarray, document: np.ndarray, cosine: bool = True
) -> np.ndarray:
    """Computes f32[M] similarities of M pairs.

    Args:
        queries: f32[Q, E], as for :func:`mine`.
        documents: f32[N, E], as for :func:`mine`.
        query: i[M], index of each pair's query.
        document: i[M], index of each pair's document.
        cosine: whether to compute cosines instead of dot products.
    """
    out = np.zeros(len(query), np.float32)
    for first in range(0, len(query), _PAIRS):
        some = slice(first, first + _PAIRS)
        pair = (queries[query[some]], documents[document[some]])
        a, b = (np.asarray(x, np.float32) for x in pair)
        a, b = (unit(a), unit(b)) if cosine else (a, b)
        out[some] = np.sum(a * b, axis=1)
    return out


def _lowest_positive(
    queries: Any, documents: Any, positives: Sequence[Collection[int]], cosine: bool
) -> np.ndarray:
    """f32[Q]: the lowest similarity of a query with one of its positives; inf without positives."""
    query = np.repeat(np.arange(len(positives)), [len(x) for x in positives])
    document = np.asarray([i for x in positives for i in sorted(x)], np.int64)
    lowest = np.full(len(positives), np.inf, np.float32)
    np.minimum.at(lowest, query, similarities(queries, documents, query, document, cosine))
    return lowest


def _sample(counts: np.ndarray, mining: MiningConfig) -> np.ndarray:
    """i64[Q, num_negatives] distinct indices below each count, ascending, -1 where there are no
    more; a function of (seed, query, count) alone."""
    out = np.full((len(counts), mining.num_negatives), -1)
    for i, count in enumerate(counts.tolist()):
        rng = np.random.default_rng([mining.seed, i])
        some = rng.choice(count, min(count, mining.num_negatives), replace=False)
        out[i, : len(some)] = np.sort(some)
    return out


def excluded(gathered: Gathered) -> list[set[int]]:
    """For each query, documents that equal it, and the negatives that it already has."""
    out = [set(same) for same in gathered.same]
    for query, _, negatives in gathered.indices:
        out[query].update(negatives)
    return out


def with_negatives(
    examples: Sequence[Example], gathered: Gathered, mined: Mined
) -> tuple[list[Example], list[tuple[int, ...]]]:
    """Append the mined negatives to those that the examples already have.

    Args:
        examples: the examples that ``gathered`` was built from.
        gathered: their queries and documents.
        mined: the negatives of those queries.

    Returns:
        The examples, and the document indices of each: its positive, then its negatives.
    """
    out, indices = [], []
    # Scores do not cover the new negatives; examples with and without are no one data set.
    keeps = not any(mined.document[query].max() >= 0 for query, _, _ in gathered.indices)
    for example, (query, positive, negatives) in zip(examples, gathered.indices, strict=True):
        new = tuple(i for i in mined.document[query].tolist() if i >= 0)
        more = tuple(gathered.documents[i] for i in new)
        scores = example.scores if keeps else ()
        out.append(example._replace(negatives=example.negatives + more, scores=scores))
        indices.append((positive, *negatives, *new))
    return out, indices
