"""The MLP of ViT and decoder, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx

from jaxvlm.nn.param import Init, contract, fan_in, param, zeros
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
        init: source of parameters.
        axes: mesh and rules.
        width: D.
        mlp_dim: F.
        activation: a name in :data:`ACTIVATIONS`.
        gated: SwiGLU-like (arXiv 2002.05202).
        bias: biases on all projections.
    """

    def __init__(
        self,
        init: Init,
        axes: Axes,
        *,
        width: int,
        mlp_dim: int,
        activation: str,
        gated: bool,
        bias: bool,
    ):
        D, F = width, mlp_dim
        self.axes, self.activation = axes, activation
        self.w_gate = param(init, (D, F), ("embed", "mlp"), fan_in(D)) if gated else None
        self.w_in = param(init, (D, F), ("embed", "mlp"), fan_in(D))
        self.w_out = param(init, (F, D), ("mlp", "embed"), fan_in(F))
        self.b_gate = param(init, (F,), ("mlp",), zeros) if gated and bias else None
        self.b_in = param(init, (F,), ("mlp",), zeros) if bias else None
        self.b_out = param(init, (D,), ("norm",), zeros) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        act = ACTIVATIONS[self.activation]
        h = contract(x, self.w_in[...])  # BTD,DF->BTF
        if self.b_in is not None:
            h = h + self.b_in[...].astype(h.dtype)
        if self.w_gate is not None:
            gate = contract(x, self.w_gate[...])
            if self.b_gate is not None:
                gate = gate + self.b_gate[...].astype(gate.dtype)
            h = h * act(gate)
        else:
            h = act(h)
        y = contract(shard(self.axes, h, "batch", "seq", "mlp"), self.w_out[...])  # BTF,FD->BTD
        return y if self.b_out is None else y + self.b_out[...].astype(y.dtype)
