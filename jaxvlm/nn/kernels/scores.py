"""What the attention kernels of all platforms compute alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HIDDEN = -1e30
"""The score of a masked key: finite, so that the difference of two is a number."""
_LOG2_E = 1.4426950408889634  # powers of 2 are cheaper than powers of e


class Form(NamedTuple):
    """Static arguments of the kernels."""

    sizes: Any
    """Sizes of blocks, as the platform's kernels define them."""
    factor: float
    """Scale of the products of queries and keys."""
    cap: float
    """Soft cap of the scores; 0: none."""
    interpret: bool


def dot(a: jax.Array, b: jax.Array, dims: Any) -> jax.Array:
    """Multiply matrices, with dimension numbers ``dims``; f32, and exact for float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.float32)


def scores(form: Form, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the scores times log2(e), and their derivatives by ``factor`` times the products.

    ``None``: the derivatives are 1.
    """
    if not form.cap:
        return products * (form.factor * _LOG2_E), None
    turned = jnp.tanh(products * (form.factor / form.cap))
    return turned * (form.cap * _LOG2_E), 1 - turned * turned


def ended(most: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finish the softmax of queries whose keys are all visited.

    Args:
        most: f32, each query's largest score.
        total: f32, the sum of the powers of 2 of its scores, less ``most``.

    Returns:
        Whether it has a key (if not, it has summed up the values of hidden ones); what its sum of
        values is divided by; and the logarithm to base 2 of the sum of the powers, such that all
        weights of a query without keys are 0 in the backward pass.
    """
    some = most > 0.5 * HIDDEN
    total = jnp.where(some, total, 1.0)
    return some, total, jnp.where(some, most + jnp.log2(total), -HIDDEN)
