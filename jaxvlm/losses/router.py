"""Load balance of a mixture of experts: the auxiliary loss and a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def load_balance(aux: Mapping[str, Any]) -> jax.Array:
    """Return the load-balancing loss, f32[].

    It is E times the sum over experts of the fraction of choices times the mean probability: the
    number of experts a token chooses where the load is even, and more elsewhere. All layers are
    taken together, as in transformers. It is no sum over examples: the mean over microbatches is
    another value than the whole batch's.

    Args:
        aux: ``Out.aux``, with ``router_load`` and ``router_probability``, f32[L, E].

    Source: Switch Transformer, arXiv 2101.03961, equations 4 to 6.
    """
    load, probability = (jnp.sum(aux[k], axis=0) for k in ("router_load", "router_probability"))
    tokens = jnp.maximum(jnp.sum(probability), 1.0)
    return load.shape[0] * jnp.sum(load / tokens * probability / tokens)


def busiest(aux: Mapping[str, Any]) -> jax.Array:
    """Return the load of each layer's busiest expert over the mean load, f32[]; 1 is even."""
    load = aux["router_load"]
    mean = jnp.maximum(jnp.mean(load, axis=-1), 1e-20)
    return jnp.mean(jnp.max(load, axis=-1) / mean)
