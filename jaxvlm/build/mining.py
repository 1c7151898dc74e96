"""Hard negatives: documents that a model takes for right and that are not.

Source: NV-Retriever, arXiv 2407.15831 (TopK-PercPos is ``relative_margin``, TopK-MarginPos is
    ``absolute_margin``); options and their order as sentence-transformers' ``mine_hard_negatives``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxvlm.build.examples import Gathered
from jaxvlm.config import ConfigError
from jaxvlm.data.examples import Example
from jaxvlm.parallel.topk import Search, nearest

_MANY = 10  # candidates for each negative that is wanted, where a margin may strike some out
_PAIRS = 4096


@dataclasses.dataclass(frozen=True)
class Mining:
    """Which documents become negatives. A query's positives and itself never do."""

    num_negatives: int = 3
    range_min: int = 0
    """Of what the bounds below leave, the best so many are passed over."""
    range_max: int = 0
    """Candidates: the best so many documents; 0: as many as should do."""
    max_score: float | None = None
    """Cosine of a negative, at most."""
    min_score: float | None = None
    absolute_margin: float | None = None
    """By how much a negative scores below the query's positive, the lowest of several."""
    relative_margin: float | None = None
    """The same as a share of the positive's score: 0.05 is NV-Retriever's 95 %."""
    sampling: str = "top"
    """``top``: the hardest that are left; ``random``: any of them."""
    seed: int = 0
    """Of ``random``."""

    def __post_init__(self) -> None:
        if self.num_negatives < 1 or self.range_min < 0 or self.range_max < 0:
            raise ConfigError(
                f"num_negatives={self.num_negatives} is at least 1, range_min={self.range_min} and "
                f"range_max={self.range_max} at least 0"
            )
        if self.range_max and self.range_max - self.range_min < self.num_negatives:
            raise ConfigError(
                f"range_min={self.range_min} to range_max={self.range_max} leave no room for "
                f"num_negatives={self.num_negatives}"
            )
        if self.sampling not in ("top", "random"):
            raise ConfigError(f"sampling={self.sampling!r}: top or random")
        for name in ("max_score", "min_score"):
            score = getattr(self, name)
            if score is not None and not -1 <= score <= 1:
                raise ConfigError(f"{name}={score:g}: scores are cosines, -1 to 1")
        for name in ("absolute_margin", "relative_margin"):
            margin = getattr(self, name)
            if margin is not None and not 0 <= margin <= 2:
                raise ConfigError(f"{name}={margin:g}: 0 to 2")

    @property
    def bounded(self) -> bool:
        """Whether candidates may be struck out."""
        bounds = (self.max_score, self.min_score, self.absolute_margin, self.relative_margin)
        return any(bound is not None for bound in bounds)


@dataclasses.dataclass(frozen=True)
class Mined:
    """Negatives of each query, the hardest first."""

    document: np.ndarray
    """i32[Q, num_negatives]; -1 where there are no more."""
    score: np.ndarray
    """f32[Q, num_negatives] cosines; -inf there."""
    positive: np.ndarray
    """f32[Q]: the lowest score of a query's positives; inf where it has none."""
    struck: dict[str, int]
    """Bound -> candidates that it struck out, of those that the bounds before it left."""


def check(count: int, how: Mining) -> None:
    """Refuse a corpus of too few documents, before they are embedded.

    Raises:
        ConfigError: as :func:`mine`.
    """
    if count < 2:
        raise ConfigError(f"mine: a corpus of {count} has nothing to choose negatives from")
    for name in ("num_negatives", "range_max"):
        if (asked := getattr(how, name)) > count:
            raise ConfigError(f"mine: {name}={asked}, but the corpus has {count} documents")


def mine(
    queries: Any,
    documents: Any,
    right: Sequence[Collection[int]],
    mesh: Mesh,
    how: Mining,
    exclude: Sequence[Collection[int]] | None = None,
) -> Mined:
    """Search all documents for each query's hard negatives; exact, and the same on every mesh.

    Args:
        queries: f32[Q, E], NumPy or :class:`~jaxvlm.io.parts.Parts`.
        documents: f32[N, E], likewise; compared by cosine.
        right: of each query, its positives; they are no negatives. Without one no margin holds.
        mesh: to search on.
        how: see :class:`Mining`.
        exclude: of each query, more that are none.

    Raises:
        ConfigError: there are too few documents for what is asked.
    """
    check(count := len(documents), how)
    out = [{*x, *y} for x, y in zip(right, exclude or [()] * len(right), strict=True)]
    span = how.range_max or how.range_min + how.num_negatives * (_MANY if how.bounded else 1)
    found = nearest(queries, documents, min(span, count), mesh, Search(), out)
    positive = _lowest(queries, documents, right)
    score, struck = _bounded(found.score.copy(), positive, how)
    # What is left, in order; then its ranks.
    order = np.argsort(np.isneginf(score), axis=1, kind="stable")[:, how.range_min :]
    score = np.take_along_axis(score, order, axis=1)
    document = np.take_along_axis(found.document, order, axis=1)
    if how.sampling == "random":
        chosen = _drawn(np.sum(~np.isneginf(score), axis=1), how)
        there = chosen >= 0
        score = np.where(there, np.take_along_axis(score, chosen, axis=1), -np.inf)
        document = np.take_along_axis(document, chosen, axis=1)
    wanted = [(0, 0), (0, how.num_negatives)]  # a corpus may be smaller than what is wanted
    score = np.pad(score, wanted, constant_values=-np.inf)[:, : how.num_negatives]
    document = np.pad(document, wanted, constant_values=-1)[:, : how.num_negatives]
    document = np.where(np.isneginf(score), -1, document)
    return Mined(document, score.astype(np.float32), positive, struck)


def _bounded(
    score: np.ndarray, positive: np.ndarray, how: Mining
) -> tuple[np.ndarray, dict[str, int]]:
    """Scores, -inf where a bound strikes one out."""
    at = positive[:, None]
    over = {
        "absolute_margin": lambda x, bound: x + bound > at,
        "relative_margin": lambda x, bound: x > at - np.abs(at) * bound,
        "max_score": lambda x, bound: x > bound,
        "min_score": lambda x, bound: x < bound,
    }
    struck = {}
    for name, is_over in over.items():
        bound = getattr(how, name)
        if bound is not None:
            bad = is_over(score, np.float32(bound)) & ~np.isneginf(score)
            score[bad] = -np.inf
            struck[name] = int(bad.sum())
    return score, struck


def cosines(queries: Any, documents: Any, query: np.ndarray, document: np.ndarray) -> np.ndarray:
    """f32[M]: of pairs, given by their indices i[M]."""
    out = np.zeros(len(query), np.float32)
    for first in range(0, len(query), _PAIRS):
        some = slice(first, first + _PAIRS)
        a, b = _unit(queries[query[some]]), _unit(documents[document[some]])
        out[some] = np.sum(a * b, axis=1)
    return out


def _unit(x: Any) -> np.ndarray:
    rows = np.asarray(x, np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _lowest(queries: Any, documents: Any, right: Sequence[Collection[int]]) -> np.ndarray:
    """f32[Q]: the lowest cosine of a query and one of its positives."""
    query = np.repeat(np.arange(len(right)), [len(x) for x in right])
    document = np.asarray([i for x in right for i in sorted(x)], np.int64)
    lowest = np.full(len(right), np.inf, np.float32)
    np.minimum.at(lowest, query, cosines(queries, documents, query, document))
    return lowest


def _drawn(counts: np.ndarray, how: Mining) -> np.ndarray:
    """i64[Q, num_negatives] different places below each count, ascending, -1 where there are no
    more; a function of (seed, query, count) alone."""
    out = np.full((len(counts), how.num_negatives), -1)
    for i, count in enumerate(counts.tolist()):
        rng = np.random.default_rng([how.seed, i])
        some = rng.choice(count, min(count, how.num_negatives), replace=False)
        out[i, : len(some)] = np.sort(some)
    return out


def excluded(gathered: Gathered) -> list[set[int]]:
    """Of each query, documents that are itself, or negatives that it has already."""
    out = [set(same) for same in gathered.same]
    for query, _, own in gathered.places:
        out[query].update(own)
    return out


def with_negatives(
    examples: Sequence[Example], gathered: Gathered, mined: Mined
) -> tuple[list[Example], list[tuple[int, ...]]]:
    """Examples with mined negatives behind their own.

    Args:
        examples: what was gathered.
        gathered: from them.
        mined: for its queries.

    Returns:
        The examples, and the documents of each: its positive and then its negatives.
    """
    out, of = [], []
    for example, (query, positive, own) in zip(examples, gathered.places, strict=True):
        new = tuple(i for i in mined.document[query].tolist() if i >= 0)
        more = tuple(gathered.documents[i] for i in new)
        # A teacher's scores do not cover what is new.
        scores = () if more else example.scores
        out.append(example._replace(negatives=example.negatives + more, scores=scores))
        of.append((positive, *own, *new))
    return out, of
