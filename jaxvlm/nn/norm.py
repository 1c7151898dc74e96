"""RMSNorm and LayerNorm, computed in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.nn.param import Init, ones, param, zeros


class RMSNorm(nnx.Module):
    """``x / rms(x) * scale`` (arXiv 1910.07467).

    Args:
        init: parameter initialization.
        width: D.
        eps: added to the mean square.
        plus_one: multiply by ``1 + scale`` (Gemma), in float32 before the cast to ``x``'s dtype.
    """

    def __init__(self, init: Init, width: int, eps: float, plus_one: bool = False):
        self.eps, self.plus_one = eps, plus_one
        self.scale = param(init, (width,), ("norm",), zeros if plus_one else ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize [..., D] over D, in ``x``'s dtype."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.plus_one:
            return (y * (1.0 + self.scale[...].astype(jnp.float32))).astype(x.dtype)
        return y.astype(x.dtype) * self.scale[...].astype(x.dtype)


class LayerNorm(nnx.Module):
    """``(x - mean) / std * scale + bias``; arguments as :class:`RMSNorm`."""

    def __init__(self, init: Init, width: int, eps: float):
        self.eps = eps
        self.scale = param(init, (width,), ("norm",), ones)
        self.bias = param(init, (width,), ("norm",), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize [..., D] over D, in ``x``'s dtype."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


NORMS: dict[str, Any] = {
    "rms": RMSNorm,
    "rms_plus_one": functools.partial(RMSNorm, plus_one=True),
    "layer": LayerNorm,
}
"""Name -> norm layer, built with ``(init, width, eps)``."""


def unit(x: jax.Array) -> jax.Array:
    """Scale ``x`` [..., E] to L2 norm 1 along its last dim; zeros stay zeros."""
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))
