"""RMSNorm and LayerNorm, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.nn.param import Init, ones, param, zeros


class RMSNorm(nnx.Module):
    """``x / rms(x) * scale`` (arXiv 1910.07467).

    Args:
        init: source of parameters.
        width: D.
        eps: added to the mean square.
    """

    def __init__(self, init: Init, width: int, eps: float):
        self.eps = eps
        self.scale = param(init, (width,), ("norm",), ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D], the dtype kept."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * self.scale[...].astype(x.dtype)


class LayerNorm(nnx.Module):
    """``(x - mean) / std * scale + bias``; arguments as :class:`RMSNorm`."""

    def __init__(self, init: Init, width: int, eps: float):
        self.eps = eps
        self.scale = param(init, (width,), ("norm",), ones)
        self.bias = param(init, (width,), ("norm",), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D], the dtype kept."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


NORMS = {"rms": RMSNorm, "layer": LayerNorm}
