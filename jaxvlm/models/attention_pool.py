"""Attention pooling of an image's tokens into one embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.nn.attention import Attention, Context
from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.mask import Mask
from jaxvlm.nn.mlp import MLP
from jaxvlm.nn.norm import LayerNorm
from jaxvlm.nn.param import Init, normal, param
from jaxvlm.parallel.rules import Axes


class AttentionPool(nnx.Module):
    """Attention pooling: a learned query attends to all tokens of an image, then an MLP.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules of the vision encoder.
        spec: dims and variants of the vision encoder's blocks.

    Source: Set Transformer's PMA, arXiv 1810.00825; as in Big Vision's ``MAPHead``.
    """

    def __init__(self, init: Init, axes: Axes, spec: BlockSpec):
        self.probe = param(init, (spec.width,), ("norm",), normal(1.0))
        self.attn = Attention(init, axes, spec)
        self.norm = LayerNorm(init, spec.width, spec.norm_eps)
        self.mlp = MLP(init, axes, spec)

    def __call__(self, x: jax.Array, mask: Mask, count: int) -> jax.Array:
        """Pool each of ``count`` images of a sequence.

        Args:
            x: [B, P, D] tokens.
            mask: mask for ``count`` queries and P keys: which tokens belong to which image.
            count: I, images per sequence.

        Returns:
            [B, I, D].
        """
        probe = jnp.broadcast_to(self.probe[...].astype(x.dtype), (x.shape[0], count, x.shape[-1]))
        x, _ = self.attn(probe, Context(mask), source=x)
        return x + self.mlp(self.norm(x))
