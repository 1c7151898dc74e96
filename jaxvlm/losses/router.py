"""What a router of experts is held to, and how evenly it deals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def load_balance(aux: Mapping[str, Any]) -> jax.Array:
    """f32[]: E times the products of each expert's share of choices and mean probability.

    It is the number of experts a token chooses where all are chosen alike, and more elsewhere. All
    layers are taken together, as transformers does. No sum over examples: parts of a batch give
    another value than the whole.

    Args:
        aux: of ``Out``: ``router_load`` and ``router_probability``, f32[L, E].

    Source: Switch Transformer, arXiv 2101.03961, equations 4 to 6.
    """
    load, probability = (jnp.sum(aux[k], axis=0) for k in ("router_load", "router_probability"))
    tokens = jnp.maximum(jnp.sum(probability), 1.0)
    return load.shape[0] * jnp.sum(load / tokens * probability / tokens)


def busiest(aux: Mapping[str, Any]) -> jax.Array:
    """f32[]: the load of each layer's busiest expert over the mean load; 1 is even."""
    load = aux["router_load"]
    mean = jnp.maximum(jnp.mean(load, axis=-1), 1e-20)
    return jnp.mean(jnp.max(load, axis=-1) / mean)
