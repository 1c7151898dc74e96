"""Expected values of retrieval metrics over all orders of documents with equal similarity.

A search has to return tied documents in some order, e.g. that of the corpus, in which positives may
stand first. A metric that depended on it would flatter a model that can't tell documents apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import gammaln


class Ties(NamedTuple):
    """Groups of tied documents at each rank of Q rankings of depth d; all f64[Q, d]."""

    start: np.ndarray
    """Documents ranked before the group."""
    size: np.ndarray
    """Documents of the group."""
    relevant: np.ndarray
    """Relevant documents of the group."""
    before: np.ndarray
    """Relevant documents ranked before the group."""
    gain: np.ndarray
    """Expected grade at the rank: the mean of the group."""

    @classmethod
    def of(
        cls,
        gain: np.ndarray,
        similarity: np.ndarray | None,
        cut: int,
        documents: int,
        total: np.ndarray,
        grades: np.ndarray,
    ) -> Ties:
        """Finds the groups.

        Args:
            gain: f[Q, d], grade of each retrieved document; 0 is not relevant.
            similarity: f[Q, d], descending; ``None``: no two documents are tied.
            cut: the largest rank that metrics are cut off at. If the group there goes on behind the
                last retrieved document, all documents that were not retrieved belong to it.
            documents: number of all documents.
            total: i[Q], relevant documents of each query.
            grades: f[Q], sum of their grades.
        """
        rows, depth = gain.shape
        rank = np.broadcast_to(np.arange(depth), gain.shape)
        first = np.ones(gain.shape, bool)
        if similarity is not None:
            one, following = similarity[:, :-1], similarity[:, 1:]
            first[:, 1:] = (following != one) | np.isneginf(following)  # -inf: nothing retrieved
        start = np.maximum.accumulate(np.where(first, rank, 0), axis=1)
        is_last = np.concatenate([first[:, 1:], np.ones((rows, 1), bool)], axis=1)
        end = np.minimum.accumulate(np.where(is_last, rank + 1, depth)[:, ::-1], axis=1)[:, ::-1]
        hits = np.pad(np.cumsum(gain > 0, axis=1), ((0, 0), (1, 0)))
        sums = np.pad(np.cumsum(gain, axis=1), ((0, 0), (1, 0)))
        each = np.arange(rows)[:, None]
        before: np.ndarray = hits[each, start]
        relevant: np.ndarray = hits[each, end] - before
        graded: np.ndarray = sums[each, end] - sums[each, start]
        size: np.ndarray = end - start
        # The group at the cut that has no end among the retrieved ones.
        goes_on = (start == start[:, cut - 1 : cut]) & (end == depth) & (start < cut)
        goes_on &= (depth < documents) & (size > 1) & (similarity is not None)
        size = np.where(goes_on, documents - start, size)
        relevant = np.where(goes_on, total[:, None] - before, relevant)
        graded = np.where(goes_on, grades[:, None] - sums[each, start], graded)
        return cls(start, size, relevant, before, graded / size)

    @property
    def hits(self) -> np.ndarray:
        """Probability that the document at a rank is relevant."""
        return self.relevant / self.size

    @property
    def precision(self) -> np.ndarray:
        """Expected precision at a rank if its document is relevant, else 0."""
        place = np.arange(self.size.shape[1]) - self.start
        others = (self.relevant - 1) / np.maximum(self.size - 1, 1)
        return self.hits * (1 + self.before + place * others) / (1 + self.start + place)

    @property
    def reciprocal_rank(self) -> np.ndarray:
        """Probability that a rank has the first relevant document, divided by the rank."""
        rank = np.arange(self.size.shape[1])
        place = rank - self.start
        m, r = self.size, self.relevant
        here = (self.before == 0) & (r > 0) & (m - place - 1 >= r - 1)
        chance = _choose(m - place - 1, r - 1, here) - _choose(m, r, here)
        return np.where(here, np.exp(chance), 0.0) / (1 + rank)

    def any_hit(self, k: int) -> np.ndarray:
        """f64[Q]: probability that a relevant document is among the first ``k``."""
        start, m, r, before = (x[:, k - 1] for x in self[:4])
        drawn = k - start
        can_miss = (before == 0) & (m - r >= drawn)
        miss = _choose(m - r, drawn, can_miss) - _choose(m, drawn, can_miss)
        return np.where(can_miss, 1 - np.exp(miss), 1.0)


def _choose(n: np.ndarray, k: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Logarithm of the number of ways to choose k of n; 0 where ``where`` is False."""
    n, k = np.where(where, n, 0), np.where(where, k, 0)
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
