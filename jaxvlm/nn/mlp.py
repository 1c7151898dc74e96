"""MLP of a transformer block, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx

from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.param import Init, affine, fan_in, param, zeros
from jaxvlm.parallel.rules import Axes, shard

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """``act(x W_in) W_out``, or ``(act(x W_gate) * x W_in) W_out`` when gated.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules.
        spec: dims and variants of the block; gated is SwiGLU-like (arXiv 2002.05202).
    """

    def __init__(self, init: Init, axes: Axes, spec: BlockSpec):
        D, F, gated, bias = spec.width, spec.mlp_dim, spec.gated, spec.mlp_bias
        self.axes, self.activation = axes, spec.activation
        self.w_gate = param(init, (D, F), ("embed", "mlp"), fan_in(D), 1) if gated else None
        self.w_in = param(init, (D, F), ("embed", "mlp"), fan_in(D), 1)
        self.w_out = param(init, (F, D), ("mlp", "embed"), fan_in(F), 1)
        self.b_gate = param(init, (F,), ("mlp",), zeros) if gated and bias else None
        self.b_in = param(init, (F,), ("mlp",), zeros) if bias else None
        self.b_out = param(init, (D,), ("norm",), zeros) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [B, T, D] to [B, T, D]."""
        act = ACTIVATIONS[self.activation]
        split = self.axes.splits_rows(x.shape[1])
        h = affine(x, self.w_in, self.b_in, split=split)  # BTD,DF->BTF
        if self.w_gate is None:
            h = act(h)
        else:
            h = h * act(affine(x, self.w_gate, self.b_gate, split=split))
        h = shard(self.axes, h, "batch", "seq", "mlp")
        return affine(h, self.w_out, self.b_out, split=split)  # BTF,FD->BTD
