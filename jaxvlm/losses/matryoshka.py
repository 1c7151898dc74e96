"""Matryoshka loss: train prefixes of embeddings, so that each prefix is an embedding too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.losses.similarity import clean, normalised
from jaxvlm.types import Embeddings, Loss, Pairs, Sums


@dataclasses.dataclass(frozen=True)
class Matryoshka:
    """``sum_d weight_d loss(prefix_d)``: prefix_d is the first d values, normalized again.

    Each term and metric of ``loss`` is reported for each dim, e.g. as ``loss_64``.

    Args:
        loss: a loss over :class:`~jaxvlm.types.Embeddings`.
        dims: lengths of prefixes; the full width is trained if it is one of them.
        weights_of_dims: a factor for each dim; empty: 1 for all.

    Source: arXiv 2205.13147, equation 1; normalized as in sentence-transformers' MatryoshkaLoss.
    """

    loss: Any
    dims: tuple[int, ...]
    weights_of_dims: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Loss):
            raise ConfigError(f"Matryoshka wraps a loss, not {self.loss!r}")
        if not self.dims or min(self.dims) < 1 or len(set(self.dims)) < len(self.dims):
            raise ConfigError(
                f"matryoshka_dims={self.dims}: give one or more different ones, each above 0"
            )
        if self.weights_of_dims and len(self.weights_of_dims) != len(self.dims):
            raise ConfigError(
                f"matryoshka_weights={self.weights_of_dims}: {len(self.weights_of_dims)} for "
                f"{len(self.dims)} dims ({self.dims}); give one for each dim, or none"
            )
        if self.weights_of_dims and (
            min(self.weights_of_dims) < 0 or not 0 < sum(self.weights_of_dims) < math.inf
        ):
            raise ConfigError(
                f"matryoshka_weights={self.weights_of_dims}: each must be 0 or more, and at least "
                "one above 0"
            )

    @property
    def additive(self) -> bool:
        """Whether the wrapped loss is a sum over examples."""
        return self.loss.additive

    def coefficients(self) -> Mapping[str, float]:
        """Return the wrapped loss's coefficients, times each dim's weight."""
        weights = self.weights_of_dims or (1.0,) * len(self.dims)
        own = self.loss.coefficients()
        return {
            _named(term, dim): weight * factor
            for dim, weight in zip(self.dims, weights, strict=True)
            for term, factor in own.items()
        }

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """Return the wrapped loss's weights, for each dim."""
        own = self.loss.weights(batch)
        return {_named(term, dim): x for dim in self.dims for term, x in own.items()}

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        """Return sums over ``batch``.

        Raises:
            ConfigError: a dim is larger than the embeddings are wide.
        """
        width = out.query.shape[-1]
        if max(self.dims) > width:
            raise ConfigError(
                f"matryoshka_dims={self.dims}: {max(self.dims)} is more than the embeddings' width "
                f"of {width}"
            )
        out, sums = clean(out, batch), Sums({}, {})
        for dim in self.dims:
            terms, metrics = self.loss(_prefix(out, dim), batch)
            sums.terms.update({_named(name, dim): x for name, x in terms.items()})
            sums.metrics.update({_named(name, dim): x for name, x in metrics.items()})
        return sums


def _named(name: str, dim: int) -> str:
    return f"{name}_{dim}"


def _prefix(out: Embeddings, dim: int) -> Embeddings:
    query, document = (normalised(x[..., :dim]) for x in (out.query, out.document))
    return out._replace(query=query, document=document)
