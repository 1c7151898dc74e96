"""A pre-norm transformer block, and a scan over many of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxvlm.config import ConfigError
from jaxvlm.nn.attention import Attention, Context
from jaxvlm.nn.kv import KVCache
from jaxvlm.nn.mlp import MLP
from jaxvlm.nn.norm import NORMS
from jaxvlm.nn.param import Init
from jaxvlm.parallel.rules import Axes, shard


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Dims and variants of a block; ViT and decoder are two values of it."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm: str  # rms | layer
    norm_eps: float
    activation: str
    gated: bool
    bias: bool
    attention: str  # backend


class Block(nnx.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, init: Init, axes: Axes, spec: BlockSpec):
        norm = NORMS[spec.norm]
        self.axes = axes
        self.norm1 = norm(init, spec.width, spec.norm_eps)
        self.attn = Attention(
            init,
            axes,
            width=spec.width,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bias=spec.bias,
            backend=spec.attention,
        )
        self.norm2 = norm(init, spec.width, spec.norm_eps)
        self.mlp = MLP(
            init,
            axes,
            width=spec.width,
            mlp_dim=spec.mlp_dim,
            activation=spec.activation,
            gated=spec.gated,
            bias=spec.bias,
        )

    def __call__(
        self, x: jax.Array, context: Context, kv: KVCache | None = None
    ) -> tuple[jax.Array, KVCache | None]:
        """[B, T, D] -> [B, T, D], and the KV cache with the new tokens in it."""
        y, kv = self.attn(self.norm1(x), context, kv)
        x = x + y
        x = x + self.mlp(self.norm2(x))
        return shard(self.axes, x, "batch", "seq", "embed"), kv


class Stack(nnx.Module):
    """``depth`` blocks, their parameters stacked on a leading dim and scanned over.

    A scan compiles one block's program whatever the depth.

    Args:
        init: source of parameters.
        axes: mesh and rules.
        spec: the block.
        depth: L, at least 1.
        remat: a name in :data:`REMAT`: what of a block is kept for the backward pass.
    """

    def __init__(self, init: Init, axes: Axes, spec: BlockSpec, depth: int, remat: str):
        if remat not in REMAT:
            raise ConfigError(f"remat={remat!r}; known: {', '.join(REMAT)}")
        self.blocks = Block(init.stacked(depth), axes, spec)
        self.depth, self.remat = depth, remat

    def __call__(
        self, x: jax.Array, context: Context, kv: KVCache | None = None, skip_last: int = 0
    ) -> tuple[jax.Array, KVCache | None]:
        """[B, T, D] -> [B, T, D] through all blocks but the last ``skip_last``.

        Args:
            x: the residual stream.
            context: what the blocks share; closed over, so nothing of it is stacked.
            kv: caches with a leading dim L, or ``None``.
            skip_last: blocks left out at the end (a tower read before its last layers).
        """
        graph, params = nnx.split(self.blocks)
        if skip_last:
            params = jax.tree.map(lambda p: p[: self.depth - skip_last], params)

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            layer_params, layer_kv = layer
            # All that follows depends on the named value alone, so that an offloaded one
            # leaves nothing of the residual stream on the device.
            x = checkpoint_name(x, _BLOCK_INPUT)
            return nnx.merge(graph, layer_params)(x, context, layer_kv)

        return jax.lax.scan(REMAT[self.remat](body), x, (params, kv))


_BLOCK_INPUT = "block_input"


def _offload(body: Any) -> Any:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


REMAT: dict[str, Any] = {
    "none": lambda body: body,
    # Matmuls with weights are kept; attention's products and all elementwise work are redone.
    "dots": lambda body: jax.checkpoint(
        body,
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        prevent_cse=False,  # a scan's body cannot be merged with its recomputation
    ),
    "full": lambda body: jax.checkpoint(body, prevent_cse=False),
    "offload": _offload,
}
"""Name -> what wraps a block. ``offload`` keeps each block's input in pinned host memory."""
