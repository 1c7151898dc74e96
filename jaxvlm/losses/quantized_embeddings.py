"""Quantization-aware training of embeddings: int8, or binary with one bit for each dim."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError, check_choice
from jaxvlm.losses.similarity import clean
from jaxvlm.types import Array, Embeddings, Loss, Pairs, Sums

PRECISIONS = ("float32", "int8", "binary")
_STEPS = 255


@dataclasses.dataclass(frozen=True)
class QuantizedEmbeddings:
    """``sum_p loss(q_p)``, q_p the embeddings quantized to precision p and dequantized.

    ``int8``: the range of each dim over the batch's documents, applied to queries too, is divided
    into 255 steps, and a value becomes the middle of its step. ``binary``: a value becomes its
    sign, and an embedding has length 1. Rounding has gradient 1 (straight-through), and 0 outside
    of the range, where a value is clipped. These are the values of the codes that
    ``jaxvlm embed --quantize`` writes.

    Each term and metric of ``loss`` is reported for each precision, e.g. as ``loss_int8``.

    Args:
        loss: a loss over :class:`~jaxvlm.types.Embeddings`, one embedding for each item.
        precisions: ``float32`` (the embeddings as they are), ``int8``, ``binary``.

    Source: the straight-through estimator of arXiv 1308.3432; steps as sentence-transformers'
        ``quantize_embeddings``.
    """

    loss: Any
    precisions: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Loss):
            raise ConfigError(f"QuantizedEmbeddings wraps a loss, not {self.loss!r}")
        if not self.precisions or len(set(self.precisions)) < len(self.precisions):
            raise ConfigError(f"precisions={self.precisions}: give one or more different ones")
        for name in self.precisions:
            check_choice("precisions", name, PRECISIONS)

    @property
    def additive(self) -> bool:
        """Whether the wrapped loss is a sum over examples; int8's ranges need the whole batch."""
        return self.loss.additive and "int8" not in self.precisions

    def coefficients(self) -> Mapping[str, float]:
        """Return the wrapped loss's coefficients, for each precision."""
        own = self.loss.coefficients()
        return {_named(n, p): x for p in self.precisions for n, x in own.items()}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """Return the wrapped loss's weights, for each precision."""
        own = self.loss.weights(batch)
        return {_named(n, p): x for p in self.precisions for n, x in own.items()}

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        """Return sums over ``batch``.

        Raises:
            ConfigError: there is one embedding for each token.
        """
        out, sums = clean(out, batch), Sums({}, {})
        if out.query_mask is not None:
            raise ConfigError(
                f"precisions={self.precisions} need one embedding for each item, not one for each "
                "token"
            )
        ranges = _ranges(out.document, jnp.asarray(batch.valid))
        for name in self.precisions:
            terms, metrics = self.loss(_quantized(out, name, ranges), batch)
            sums.terms.update({_named(n, name): x for n, x in terms.items()})
            sums.metrics.update({_named(n, name): x for n, x in metrics.items()})
        return sums


def int8(x: jax.Array, ranges: Array) -> jax.Array:
    """Round each value to the middle of its step; gradient 1 inside of the range, 0 outside.

    Args:
        x: f32[..., E].
        ranges: f32[2, E], the minimum and the maximum of each dim.
    """
    low, high = jax.lax.stop_gradient(jnp.asarray(ranges))
    step = jnp.where(high == low, 1.0, (high - low) / _STEPS)
    inside = (x >= low) & (x <= high)
    code = jnp.clip(jnp.floor((jax.lax.stop_gradient(x) - low) / step), 0, _STEPS - 1)
    value = jnp.minimum(low + (code + 0.5) * step, high)
    return _through(jnp.where(inside, x, jax.lax.stop_gradient(x)), value)


def binary(x: jax.Array) -> jax.Array:
    """Return the sign of each value, normalized to unit length; gradient 1."""
    return _through(x, jnp.where(x > 0, 1.0, -1.0) * x.shape[-1] ** -0.5)


def _through(x: jax.Array, value: jax.Array) -> jax.Array:
    """Return ``value`` with the gradient of ``x`` (straight-through)."""
    return jax.lax.stop_gradient(value) + (x - jax.lax.stop_gradient(x))


def _ranges(document: jax.Array, valid: jax.Array) -> jax.Array:
    """Return the minimum and maximum of each dim over valid documents, f32[2, E]."""
    valid = valid[..., None]
    low = jnp.min(jnp.where(valid, document, jnp.inf), axis=(0, 1))
    high = jnp.max(jnp.where(valid, document, -jnp.inf), axis=(0, 1))
    return jax.lax.stop_gradient(jnp.stack([low, high]))


def _quantized(out: Embeddings, precision: str, ranges: jax.Array) -> Embeddings:
    if precision == "float32":
        return out
    quantize = (lambda x: int8(x, ranges)) if precision == "int8" else binary
    return out._replace(query=quantize(out.query), document=quantize(out.document))


def _named(name: str, precision: str) -> str:
    return f"{name}_{precision}"
