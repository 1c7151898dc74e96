"""Vectors that are trained to be kept in fewer bits: eight a dim, or one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError
from jaxvlm.losses.similarity import check_choice, clean
from jaxvlm.types import Array, Loss, Pairs, Sums, Vectors

PRECISIONS = ("float32", "int8", "binary")
_STEPS = 255


@dataclasses.dataclass(frozen=True)
class Quantized:
    """``sum_p loss(q_p)``, q_p the vectors as they are read back when kept in precision p.

    ``int8``: each dim's range over the batch's documents, of queries too, is cut in 255 steps, and
    a number becomes the middle of its step. ``binary``: it becomes its sign, and a vector has
    length 1. Rounding has gradient 1 (straight through), and 0 outside of the range, where a number
    is cut off. These are the values of the codes that ``jaxvlm embed --quantize`` writes.

    Each term and metric of ``loss`` is there once a precision, as ``loss_int8``.

    Args:
        loss: of :class:`~jaxvlm.types.Vectors`, one vector an item.
        precisions: ``float32`` (the vectors as they are), ``int8``, ``binary``.

    Source: the straight-through estimator of arXiv 1308.3432; steps as sentence-transformers'
        ``quantize_embeddings``.
    """

    loss: Any
    precisions: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Loss):
            raise ConfigError(f"Quantized goes around a loss, not {self.loss!r}")
        if not self.precisions or len(set(self.precisions)) < len(self.precisions):
            raise ConfigError(f"precisions={self.precisions}: give one or more, each once")
        for name in self.precisions:
            check_choice("precisions", name, PRECISIONS)

    @property
    def additive(self) -> bool:
        """As the loss that it goes around; but ranges are of the whole batch."""
        return self.loss.additive and "int8" not in self.precisions

    def coefficients(self) -> Mapping[str, float]:
        """The loss's own, for each precision."""
        own = self.loss.coefficients()
        return {_named(n, p): x for p in self.precisions for n, x in own.items()}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """Likewise."""
        own = self.loss.weights(batch)
        return {_named(n, p): x for p in self.precisions for n, x in own.items()}

    def __call__(self, out: Vectors, batch: Pairs) -> Sums:
        """Sums over ``batch``.

        Raises:
            ConfigError: the vectors are those of tokens.
        """
        out, sums = clean(out, batch), Sums({}, {})
        if out.query_seen is not None:
            raise ConfigError(
                f"precisions={self.precisions} are of one vector an item, not of a vector a token"
            )
        ranges = _ranges(out.document, jnp.asarray(batch.there))
        for name in self.precisions:
            terms, metrics = self.loss(_kept(out, name, ranges), batch)
            sums.terms.update({_named(n, name): x for n, x in terms.items()})
            sums.metrics.update({_named(n, name): x for n, x in metrics.items()})
        return sums


def int8(x: jax.Array, ranges: Array) -> jax.Array:
    """``x`` with each number the middle of its step; gradient 1 inside of the range.

    Args:
        x: f32[..., E].
        ranges: f32[2, E], the least and the greatest value of each dim.
    """
    low, high = jax.lax.stop_gradient(jnp.asarray(ranges))
    step = jnp.where(high == low, 1.0, (high - low) / _STEPS)
    inside = (x >= low) & (x <= high)
    code = jnp.clip(jnp.floor((jax.lax.stop_gradient(x) - low) / step), 0, _STEPS - 1)
    value = jnp.minimum(low + (code + 0.5) * step, high)
    return _through(jnp.where(inside, x, jax.lax.stop_gradient(x)), value)


def binary(x: jax.Array) -> jax.Array:
    """The sign of each number, of unit length; gradient 1."""
    return _through(x, jnp.where(x > 0, 1.0, -1.0) * x.shape[-1] ** -0.5)


def _through(x: jax.Array, value: jax.Array) -> jax.Array:
    """``value``, with the gradient of ``x``."""
    return jax.lax.stop_gradient(value) + (x - jax.lax.stop_gradient(x))


def _ranges(document: jax.Array, there: jax.Array) -> jax.Array:
    """f32[2, E]: of the documents that are there."""
    there = there[..., None]
    low = jnp.min(jnp.where(there, document, jnp.inf), axis=(0, 1))
    high = jnp.max(jnp.where(there, document, -jnp.inf), axis=(0, 1))
    return jax.lax.stop_gradient(jnp.stack([low, high]))


def _kept(out: Vectors, precision: str, ranges: jax.Array) -> Vectors:
    if precision == "float32":
        return out
    kept = (lambda x: int8(x, ranges)) if precision == "int8" else binary
    return out._replace(query=kept(out.query), document=kept(out.document))


def _named(name: str, precision: str) -> str:
    return f"{name}_{precision}"
