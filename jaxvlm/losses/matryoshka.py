"""Matryoshka: a loss of several prefixes of the vectors, so that each prefix is a vector too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.losses.similarity import clean, normalised
from jaxvlm.types import Loss, Pairs, Sums, Vectors


@dataclasses.dataclass(frozen=True)
class Matryoshka:
    """``sum_d weight_d loss(prefix_d)``, prefix_d the first d numbers, of unit length again.

    Each term and metric of ``loss`` is there once a dim, as ``loss_64``.

    Args:
        loss: of :class:`~jaxvlm.types.Vectors`.
        dims: lengths of prefixes; the vectors' own width is trained where it is one of them.
        weights_of_dims: a factor each; empty: 1.

    Source: arXiv 2205.13147, equation 1; of unit length as sentence-transformers' MatryoshkaLoss.
    """

    loss: Any
    dims: tuple[int, ...]
    weights_of_dims: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Loss):
            raise ConfigError(f"Matryoshka goes around a loss, not {self.loss!r}")
        if not self.dims or min(self.dims) < 1 or len(set(self.dims)) < len(self.dims):
            raise ConfigError(f"dims={self.dims}: give one or more, each above 0 and once")
        if self.weights_of_dims and len(self.weights_of_dims) != len(self.dims):
            raise ConfigError(
                f"dim_weights={self.weights_of_dims}: {len(self.weights_of_dims)} for "
                f"{len(self.dims)} dims ({self.dims}); give one each, or none"
            )
        if self.weights_of_dims and (
            min(self.weights_of_dims) < 0 or not 0 < sum(self.weights_of_dims) < math.inf
        ):
            raise ConfigError(
                f"dim_weights={self.weights_of_dims}: each 0 or more, and one above 0 at least"
            )

    @property
    def additive(self) -> bool:
        """As the loss that it goes around."""
        return self.loss.additive

    def coefficients(self) -> Mapping[str, float]:
        """The loss's own, times each dim's weight."""
        weights = self.weights_of_dims or (1.0,) * len(self.dims)
        own = self.loss.coefficients()
        return {
            _named(term, dim): weight * factor
            for dim, weight in zip(self.dims, weights, strict=True)
            for term, factor in own.items()
        }

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """The loss's own, for each dim."""
        own = self.loss.weights(batch)
        return {_named(term, dim): x for dim in self.dims for term, x in own.items()}

    def __call__(self, out: Vectors, batch: Pairs) -> Sums:
        """Sums over ``batch``.

        Raises:
            ConfigError: a dim is larger than the vectors are wide.
        """
        width = out.query.shape[-1]
        if max(self.dims) > width:
            raise ConfigError(
                f"dims={self.dims}: {max(self.dims)} is more than the vectors' width of {width}"
            )
        out, sums = clean(out, batch), Sums({}, {})
        for dim in self.dims:
            terms, metrics = self.loss(_prefix(out, dim), batch)
            sums.terms.update({_named(name, dim): x for name, x in terms.items()})
            sums.metrics.update({_named(name, dim): x for name, x in metrics.items()})
        return sums


def _named(name: str, dim: int) -> str:
    return f"{name}_{dim}"


def _prefix(out: Vectors, dim: int) -> Vectors:
    query, document = (normalised(x[..., :dim]) for x in (out.query, out.document))
    return out._replace(query=query, document=document)
