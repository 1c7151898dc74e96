"""A transformer block, and a stack of blocks run by a scan over layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jaxvlm.config import check_choice
from jaxvlm.nn.attention import Attention, Context
from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.dropout import dropout, fold
from jaxvlm.nn.kernels import SAVED
from jaxvlm.nn.kv_cache import KVCache
from jaxvlm.nn.mlp import MLP
from jaxvlm.nn.moe import MoE, Routed
from jaxvlm.nn.norm import NORMS
from jaxvlm.nn.param import Init, constant, param
from jaxvlm.parallel.pipeline.forward import AXIS
from jaxvlm.parallel.pipeline.in_turn import in_turn
from jaxvlm.parallel.rules import Axes, shard


class BlockOutputs(NamedTuple):
    """Outputs of a block in addition to hidden states; a stack's have a leading dim L."""

    kv: KVCache | None
    """KV cache with the new tokens appended."""
    routed: Routed | None
    """Router statistics of a mixture of experts."""


class Block(nnx.Module):
    """Transformer block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    With ``post_norms`` the outputs of attention and MLP have a norm as well. With ``norm_after``:
    ``norm(x + attention(x))``, then ``norm(x + mlp(x))`` (arXiv 1706.03762).
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
    ) -> tuple[jax.Array, BlockOutputs]:
        """Map hidden states [B, T, D] to [B, T, D]; return the other outputs too."""
        after = self.norm_after
        y, kv = self.attn(x if after else self.norm1(x), context, kv)
        x = x + self._dropout(_residual(y, self.post_norm1, self.scale1), context, "attn")
        x = self.norm1(x) if after else x
        y, routed = self._mlp(x if after else self.norm2(x), context)
        x = x + self._dropout(_residual(y, self.post_norm2, self.scale2), context, "mlp")
        x = self.norm2(x) if after else x
        return shard(self.axes, x, "batch", "stream", "embed"), BlockOutputs(kv, routed)

    def _dropout(self, y: jax.Array, context: Context, name: str) -> jax.Array:
        return dropout(y, self.dropout, fold(context.dropout_keys, name)) if self.dropout else y

    def _mlp(self, x: jax.Array, context: Context) -> tuple[jax.Array, Routed | None]:
        if not isinstance(self.mlp, MoE):
            return self.mlp(x), None
        segment = context.mask.q_segment
        return self.mlp(x, None if segment is None else segment > 0)


def _residual(y: jax.Array, norm: Any, scale: Any) -> jax.Array:
    """Apply post-norm and LayerScale to the output of attention or MLP."""
    y = y if norm is None else norm(y)
    return y if scale is None else y * scale[...].astype(y.dtype)


class Local(NamedTuple):
    """A second context for some layers: those with sliding windows or another RoPE base."""

    context: Context
    """The second context; its fields are ``None`` where those of the first are."""
    pattern: tuple[bool, ...]
    """True for layers that use it; static, repeated over the depth."""


class Stack(nnx.Module):
    """``depth`` blocks with parameters stacked on a leading dim, run by a scan over layers.

    The scan compiles one block, whatever the depth.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules.
        spec: dims and variants of the block.
        depth: L, at least 1.
        remat: a name in :data:`REMAT`: the activations of a block saved for the backward pass.
        staged: whether the mesh axis ``pipeline`` splits the layers. A call for all of them (with
            ``first=None``) then runs each stage's on its devices, one stage after the other.
    """

    def __init__(
        self, init: Init, axes: Axes, spec: BlockSpec, depth: int, remat: str, staged: bool = False
    ):
        check_choice("remat", remat, REMAT)
        self.blocks = Block(init.stacked(depth), axes, spec)
        self.depth, self.remat = depth, remat
        self.staged = staged and axes.mesh.shape[AXIS] > 1

    def __call__(
        self,
        x: jax.Array,
        context: Context,
        kv: KVCache | None = None,
        local: Local | None = None,
        deep: jax.Array | None = None,
        first: jax.Array | None = None,
    ) -> tuple[jax.Array, BlockOutputs]:
        """Run all blocks on hidden states [B, T, D]; arguments and results as :meth:`within`."""
        return self.within(context, local, deep)(x, kv, first=first)

    def within(
        self, context: Context, local: Local | None = None, deep: jax.Array | None = None
    ) -> Callable[..., tuple[jax.Array, BlockOutputs]]:
        """Return a function that runs the blocks; a block is traced once over all of its calls.

        Args:
            context: inputs shared by the blocks; closed over, so that they are not stacked.
            local: a second context, for some of the layers.
            deep: [K, B, T, D] added to the hidden states after the first K blocks, one per block
                (DeepStack).

        Returns:
            ``run(x, kv=None, skip_first=0, skip_last=0, first=None)``, which maps hidden states
            [B, T, D] to hidden states and :class:`BlockOutputs`. ``kv`` is a KV cache with a
            leading dim L. ``skip_first`` blocks are left out at the start (they were run before),
            ``skip_last`` at the end (an encoder whose features come from an earlier layer).
            ``first``, i32[], is the number of the first block, if the parameters are those of
            consecutive blocks of a larger stack (a pipeline stage); ``None``: of the whole stack.
        """
        graph, every = nnx.split(self.blocks)

        @functools.cache
        def block(is_local: bool) -> Any:
            return block_in(local.context if local is not None and is_local else context)

        def block_in(default: Context) -> Any:
            def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
                params, kv, chosen, i = layer
                # Everything below reads the named value only, so that when it is offloaded no copy
                # of the residual stream stays on the device.
                x = checkpoint_name(x, _BLOCK_INPUT)
                shared = default if local is None else _choose(chosen, local.context, default)
                if shared.dropout_keys is not None:
                    shared = shared._replace(dropout_keys=fold(shared.dropout_keys, i))
                x, side = nnx.merge(graph, params)(x, shared, kv)
                return x if deep is None else x + _level(deep, i), side

            return REMAT[self.remat](body)

        def run(
            x: jax.Array,
            kv: KVCache | None = None,
            skip_first: int = 0,
            skip_last: int = 0,
            first: jax.Array | None = None,
        ) -> tuple[jax.Array, BlockOutputs]:
            params, layers = every, range(skip_first, self.depth - skip_last)
            if len(layers) < self.depth:
                params = jax.tree.map(lambda p: p[layers.start : layers.stop], params)
            index = jnp.arange(jax.tree.leaves(params)[0].shape[0])
            choice, is_local = _chosen(local, layers, index, first)
            # One scan, not one for the first blocks and one for the others: each would copy its
            # slice of all parameters.
            number = None
            if deep is not None or context.dropout_keys is not None:
                number = index if first is None else first + index
                number = number + layers.start if layers.start else number
            xs, cached = (params, kv, choice, number), context.cached
            if not (self.staged and first is None):
                return _scan(block(is_local), x, xs)

            def block_with(kept: Any) -> Any:
                if cached is None or kept is None:
                    return block(is_local)
                return block_in(context._replace(cached=cached._replace(kept=kept)))

            kept = None if cached is None else cached.kept
            return _scan_on_stages(block_with, self.blocks.axes.mesh, x, xs, kept)

        return run


def _scan(block: Any, x: jax.Array, xs: Any) -> tuple[jax.Array, BlockOutputs]:
    """Scan over layers; a KV cache is written in place, not layer by layer into another one."""
    params, kv, choice, number = xs
    if kv is None:
        return jax.lax.scan(block, x, xs)

    def body(carry: Any, layer: Any) -> tuple[Any, BlockOutputs]:
        x, k, v = carry
        params, part, choice, number, i = layer
        x, side = block(x, (params, KVCache(k, v, part, layer=i), choice, number))
        return (x, side.kv.k, side.kv.v), side._replace(kv=side.kv.observed)

    layers = (params, kv.part, choice, number, jnp.arange(len(kv.k)))
    (x, k, v), side = jax.lax.scan(body, (x, kv.k, kv.v), layers)
    return x, side._replace(kv=kv._replace(k=k, v=v, observed=side.kv))


def _scan_on_stages(
    block_with: Callable[[Any], Any], mesh: Mesh, x: jax.Array, xs: Any, kept: Any
) -> tuple[jax.Array, BlockOutputs]:
    """Scan over layers, each on its stage, which updates its part of a KV cache in place.

    ``block_with(kept)`` is the block that reads the kept places of its own stage.
    """
    params, kv, *others = xs
    held, rest = (None, None) if kv is None else ((kv.k, kv.v), kv._replace(k=None, v=None))

    def scan(x: jax.Array, held: Any, xs: Any, kept: Any) -> Any:
        params, own, *others = xs
        if held is not None:
            own = own._replace(k=held[0], v=held[1])
        x, side = _scan(block_with(kept), x, (params, own, *others))
        if side.kv is None:
            return x, None, side
        return x, side.kv[:2], side._replace(kv=side.kv._replace(k=None, v=None))

    x, held, side = in_turn(scan, mesh, x, held, (params, rest, *others), kept)
    if held is not None:
        side = side._replace(kv=side.kv._replace(k=held[0], v=held[1]))
    return x, side


def _chosen(
    local: Local | None, layers: range, index: jax.Array, first: jax.Array | None
) -> tuple[jax.Array | None, bool]:
    """Return which layers use the local context, if only some do; and whether all do."""
    if local is None:
        return None, False
    each = [local.pattern[i % len(local.pattern)] for i in layers]
    if len(set(each)) == 1:
        return None, each[0]
    choice = jnp.asarray(each)
    return (choice if first is None else choice[first + index]), False


def _level(deep: jax.Array, i: jax.Array) -> jax.Array:
    """Return ``deep[i]``, or zeros after the last level."""
    last = len(deep) - 1
    level = jax.lax.dynamic_index_in_dim(deep, jnp.minimum(i, last), keepdims=False)
    return jnp.where(i <= last, level, 0)


_BLOCK_INPUT = "block_input"


def _choose(is_local: jax.Array | None, local: Context, context: Context) -> Context:
    """Select one of two contexts, leaf by leaf; an array that both hold is passed through."""
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


def _dots(body: Any) -> Any:
    """Save outputs of matmuls with weights and of attention kernels; recompute elementwise ops,
    and where no kernel computes attention its scores.
    """
    policies = jax.checkpoint_policies
    policy = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(SAVED)
    )
    # A scan's body cannot be merged with its recomputation.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


REMAT: dict[str, Any] = {
    "none": lambda body: body,
    "dots": _dots,
    "full": lambda body: jax.checkpoint(body, prevent_cse=False),
    "offload": _offload,
}
"""Name -> rematerialization of a block. ``offload`` saves each block's input in pinned host
memory."""
