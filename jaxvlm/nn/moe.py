"""Mixture of experts instead of an MLP: top-k routing that drops no token."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.grouped_matmul import grouped_matmul, kernel_of
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.param import Init, contract, fan_in, param
from jaxvlm.parallel.per_device import per_device
from jaxvlm.parallel.rules import Axes

TOKEN = ("batch", "seq", "embed")  # logical axes of hidden states, expert indices and weights


class Routed(NamedTuple):
    """Router statistics of a layer; sums over non-padding tokens, which add over microbatches."""

    load: Any
    """f32[E]: number of tokens routed to each expert."""
    probability: Any
    """f32[E]: sum of each expert's router probability over all tokens, whether routed to it or not;
    the sum over experts is the number of tokens."""


class MoE(nnx.Module):
    """``sum_e p_e (act(x W_gate_e) * x W_in_e) W_out_e`` over a token's top experts.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules.
        spec: dims and variants of the block; ``mlp_dim`` is the width of one expert.

    Source: Qwen3, arXiv 2505.09388; dropless by sorting: MegaBlocks, arXiv 2211.15841.
    """

    def __init__(self, init: Init, axes: Axes, spec: BlockSpec):
        D, F, E = spec.width, spec.mlp_dim, spec.num_experts
        self.axes, self.spec = axes, spec
        self.router = param(init, (D, E), ("embed", "experts"), fan_in(D))
        self.w_gate = param(init, (E, D, F), ("experts", "embed", "mlp"), fan_in(D))
        self.w_in = param(init, (E, D, F), ("experts", "embed", "mlp"), fan_in(D))
        self.w_out = param(init, (E, F, D), ("experts", "mlp", "embed"), fan_in(F))

    def __call__(self, x: jax.Array, real: jax.Array | None) -> tuple[jax.Array, Routed]:
        """Map [B, T, D] to [B, T, D]; return router statistics of tokens in ``real`` too.

        Args:
            x: [B, T, D] hidden states.
            real: bool[B, T], tokens that are not padding; ``None``: all.
        """
        split = self.axes.splits_rows(x.shape[1])
        logits = contract(x, self.router[...], 1, split)  # BTD,DE->BTE
        probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        share, chosen = jax.lax.top_k(probability, self.spec.experts_per_token)
        if self.spec.normalize_experts:
            share = share / jnp.sum(share, axis=-1, keepdims=True)
        weights = [w[...].astype(x.dtype) for w in (self.w_gate, self.w_in, self.w_out)]
        y = per_device(
            functools.partial(
                run_experts,
                activation=self.spec.activation,
                kernel=kernel_of(
                    self.spec.expert_matmul,
                    self.axes.platform,
                    getattr(self.axes.mesh.devices.flat[0], "compute_capability", ""),
                ),
                axis="expert" if self.axes.mesh.shape["expert"] > 1 else "",
            ),
            self.axes,
            [
                (x, TOKEN),
                (chosen, TOKEN),
                (share.astype(x.dtype), TOKEN),
                (weights[0], ("experts", "embed", "mlp")),
                (weights[1], ("experts", "embed", "mlp")),
                (weights[2], ("experts", "mlp", "embed")),
            ],
            (x.shape, TOKEN),
            summed="mlp",
        )
        counted = jnp.ones(x.shape[:2]) if real is None else real.astype(jnp.float32)
        votes = jnp.sum(jax.nn.one_hot(chosen, self.spec.num_experts), axis=2)
        load = jnp.einsum("BTE,BT->E", votes, counted)
        return y, Routed(load, jnp.einsum("BTE,BT->E", probability, counted))


def run_experts(
    x: jax.Array,
    chosen: jax.Array,
    share: jax.Array,
    w_gate: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    activation: str,
    kernel: str = "",
    axis: str = "",
) -> jax.Array:
    """Run a token's experts on it: sort tokens by expert, grouped matmuls, and sort back.

    With expert parallelism each device all-gathers the tokens, runs its own experts on the tokens
    routed to them, and reduce-scatters the results. With as many experts per token as devices this
    sends as much as an all-to-all would, and no token is dropped.

    Args:
        x: [B, T, D] hidden states.
        chosen: i32[B, T, top] experts of each token.
        share: [B, T, top] router weights of these experts.
        w_gate: [E, D, F].
        w_in: [E, D, F].
        w_out: [E, F, D].
        activation: a name in ``ACTIVATIONS``.
        kernel: see :func:`jaxvlm.nn.grouped_matmul.grouped_matmul`.
        axis: mesh axis that E is sharded over, as is B; "" is none.

    Returns:
        [B, T, D].
    """
    num_local = w_gate.shape[0]
    expert = chosen
    if axis:
        x, expert, share = (
            jax.lax.all_gather(each, axis, axis=0, tiled=True) for each in (x, chosen, share)
        )
        expert = expert - jax.lax.axis_index(axis) * num_local
        # Tokens of other devices' experts are sorted after those of local ones.
        expert = jnp.where((expert >= 0) & (expert < num_local), expert, num_local)
    (B, T, D), top = x.shape, chosen.shape[2]
    expert = expert.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    inverse = jnp.argsort(order)
    sizes = jnp.bincount(expert, length=num_local + 1).astype(jnp.int32)[:num_local]
    grouped = functools.partial(grouped_matmul, sizes=sizes, kernel=kernel, tail=bool(axis))
    copies = jnp.broadcast_to(x[:, :, None], (B, T, top, D)).reshape(-1, D)
    rows = permute(copies, order, inverse)
    h = ACTIVATIONS[activation](grouped(rows, w_gate)) * grouped(rows, w_in)
    y = permute(grouped(h, w_out), inverse, order)
    out = jnp.einsum("BTKD,BTK->BTD", y.reshape(B, T, top, D), share)
    return jax.lax.psum_scatter(out, axis, scatter_dimension=0, tiled=True) if axis else out


@jax.custom_vjp
def permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return ``x[order]``; with the ``inverse`` permutation, the gradient is a gather."""
    return x[order]


def _permute_fwd(x: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x[order], inverse


def _permute_bwd(inverse: jax.Array, d_out: jax.Array) -> tuple[jax.Array, None, None]:
    return d_out[inverse], None, None


permute.defvjp(_permute_fwd, _permute_bwd)
