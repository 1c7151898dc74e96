"""A transformer block, and a scan over many of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxvlm.config import ConfigError
from jaxvlm.nn.attention import Attention, Context
from jaxvlm.nn.dropout import dropout, fold
from jaxvlm.nn.kv import KVCache
from jaxvlm.nn.mlp import MLP
from jaxvlm.nn.moe import MoE, Routed
from jaxvlm.nn.norm import NORMS
from jaxvlm.nn.param import Init, constant, param
from jaxvlm.nn.spec import BlockSpec
from jaxvlm.parallel.rules import Axes, shard


class Side(NamedTuple):
    """What a block gives besides the stream; with a leading dim L from a stack."""

    kv: KVCache | None
    """The KV cache with the new tokens in it."""
    routed: Routed | None
    """Of a mixture of experts."""


class Block(nnx.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; what is added may be normed too.

    With ``norm_after``: ``norm(x + attention(x))``, then ``norm(x + mlp(x))`` (arXiv 1706.03762).
    """

    def __init__(self, init: Init, axes: Axes, spec: BlockSpec):
        norm = functools.partial(NORMS[spec.norm], init, spec.width, spec.norm_eps)
        self.axes, self.norm_after, self.dropout = axes, spec.norm_after, spec.dropout
        self.norm1 = norm()
        self.attn = Attention(init, axes, spec)
        self.post_norm1 = norm() if spec.post_norms else None
        self.norm2 = norm()
        self.mlp = MoE(init, axes, spec) if spec.num_experts else MLP(init, axes, spec)
        self.post_norm2 = norm() if spec.post_norms else None
        D, first = spec.width, constant(spec.layer_scale)
        self.scale1 = param(init, (D,), ("norm",), first) if spec.layer_scale else None
        self.scale2 = param(init, (D,), ("norm",), first) if spec.layer_scale else None

    def __call__(
        self, x: jax.Array, context: Context, kv: KVCache | None = None
    ) -> tuple[jax.Array, Side]:
        """[B, T, D] -> [B, T, D], and what else comes of it."""
        after = self.norm_after
        y, kv = self.attn(x if after else self.norm1(x), context, kv)
        x = x + self._dropped(_added(y, self.post_norm1, self.scale1), context, "attn")
        x = self.norm1(x) if after else x
        y, routed = self._mlp(x if after else self.norm2(x), context)
        x = x + self._dropped(_added(y, self.post_norm2, self.scale2), context, "mlp")
        x = self.norm2(x) if after else x
        return shard(self.axes, x, "batch", "stream", "embed"), Side(kv, routed)

    def _dropped(self, y: jax.Array, context: Context, half: str) -> jax.Array:
        return dropout(y, self.dropout, fold(context.noise, half)) if self.dropout else y

    def _mlp(self, x: jax.Array, context: Context) -> tuple[jax.Array, Routed | None]:
        if not isinstance(self.mlp, MoE):
            return self.mlp(x), None
        segment = context.mask.q_segment
        return self.mlp(x, None if segment is None else segment > 0)


def _added(y: jax.Array, norm: Any, scale: Any) -> jax.Array:
    """What a half of a block adds to the stream."""
    y = y if norm is None else norm(y)
    return y if scale is None else y * scale[...].astype(y.dtype)


class Local(NamedTuple):
    """A second context, and which layers take it: sliding windows, another rotary base."""

    context: Context
    """``None`` in the same places as the first one."""
    pattern: tuple[bool, ...]
    """True where a layer takes it; static, and repeated over the depth."""


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
        self,
        x: jax.Array,
        context: Context,
        kv: KVCache | None = None,
        local: Local | None = None,
        deep: jax.Array | None = None,
        first: jax.Array | None = None,
    ) -> tuple[jax.Array, Side]:
        """[B, T, D] -> [B, T, D] through all blocks; see :meth:`within`, and what it returns."""
        return self.within(context, local, deep)(x, kv, first=first)

    def within(
        self, context: Context, local: Local | None = None, deep: jax.Array | None = None
    ) -> Callable[..., tuple[jax.Array, Side]]:
        """What runs the blocks: however often it is called, a block is traced once.

        Args:
            context: what the blocks share; closed over, so nothing of it is stacked.
            local: what some layers share instead of ``context``.
            deep: [K, B, T, D] what is added to the stream behind the first K blocks, one a block.

        Returns:
            ``run(x, kv=None, skip_first=0, skip_last=0, first=None)``, [B, T, D] -> [B, T, D]:
            the residual stream; caches with a leading dim L, or ``None``; blocks left out at the
            start (they were run before) and at the end (a tower read before its last layers);
            i32[] the number of the first block whose parameters are here, those of some of the
            blocks in a row, ``None``: all are here.
        """
        graph, every = nnx.split(self.blocks)

        @functools.cache
        def block(is_local: bool) -> Any:
            own = local.context if local is not None and is_local else context

            def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
                params, kv, chosen, i = layer
                # All that follows depends on the named value alone, so that an offloaded one
                # leaves nothing of the residual stream on the device.
                x = checkpoint_name(x, _BLOCK_INPUT)
                shared = own if local is None else _choose(chosen, local.context, own)
                if shared.noise is not None:
                    shared = shared._replace(noise=fold(shared.noise, i))
                x, side = nnx.merge(graph, params)(x, shared, kv)
                return x if deep is None else x + _level(deep, i), side

            return REMAT[self.remat](body)

        def run(
            x: jax.Array,
            kv: KVCache | None = None,
            skip_first: int = 0,
            skip_last: int = 0,
            first: jax.Array | None = None,
        ) -> tuple[jax.Array, Side]:
            params, layers = every, range(skip_first, self.depth - skip_last)
            if len(layers) < self.depth:
                params = jax.tree.map(lambda p: p[layers.start : layers.stop], params)
            here = jnp.arange(jax.tree.leaves(params)[0].shape[0])
            choice, is_local = _chosen(local, layers, here, first)
            # One scan, not one for the first blocks and one for the others: each would copy its
            # part of all parameters.
            number = None
            if deep is not None or context.noise is not None:
                number = here if first is None else first + here
                number = number + layers.start if layers.start else number
            return jax.lax.scan(block(is_local), x, (params, kv, choice, number))

        return run


def _chosen(
    local: Local | None, layers: range, here: jax.Array, first: jax.Array | None
) -> tuple[jax.Array | None, bool]:
    """Which of these layers are local, where not all are alike; and whether all are."""
    if local is None:
        return None, False
    each = [local.pattern[i % len(local.pattern)] for i in layers]
    if len(set(each)) == 1:
        return None, each[0]
    choice = jnp.asarray(each)
    return (choice if first is None else choice[first + here]), False


def _level(deep: jax.Array, i: jax.Array) -> jax.Array:
    """``deep[i]``, or zeros behind the last level."""
    last = len(deep) - 1
    found = jax.lax.dynamic_index_in_dim(deep, jnp.minimum(i, last), keepdims=False)
    return jnp.where(i <= last, found, 0)


_BLOCK_INPUT = "block_input"


def _choose(is_local: jax.Array | None, local: Context, context: Context) -> Context:
    """One of two contexts, leaf by leaf; where both hold one array, that array."""
    if is_local is None:
        return context

    def leaf(a: Any, b: Any) -> Any:
        return a if a is b else jnp.where(is_local, a, b)

    return jax.tree.map(leaf, local, context)


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
