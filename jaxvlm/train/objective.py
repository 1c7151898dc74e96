"""The scalar objective of a loss's sums and weights (see ``jaxvlm.types.Loss``)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxvlm.types import Batch, Loss, Pairs, Sums


def scales(loss: Loss, batch: Batch | Pairs) -> dict[str, jax.Array]:
    """Return ``coefficient_k / W_k`` of each term over the global batch; 0 where W_k is 0.

    Args:
        loss: the loss.
        batch: the whole global batch, before it is split into microbatches.
    """
    weights = loss.weights(batch)
    return {
        name: jnp.where(weights[name] > 0, factor / jnp.maximum(weights[name], 1e-20), 0.0)
        for name, factor in loss.coefficients().items()
    }


def total(sums: Sums, scale: Mapping[str, jax.Array]) -> jax.Array:
    """Return ``sum_k scale_k * S_k``, f32[]."""
    return sum((scale[name] * value for name, value in sums.terms.items()), jnp.float32(0))
