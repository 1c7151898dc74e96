"""Multi-head attention layer of vision encoders, text encoders and decoders."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxvlm.nn.attention_backends import Scores, attend, check_heads, check_platform
from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.dropout import dropout, fold
from jaxvlm.nn.kv_cache import KVCache, Shared, append_kv, attend_cached
from jaxvlm.nn.mask import Mask
from jaxvlm.nn.norm import NORMS, RMSNorm
from jaxvlm.nn.param import Init, affine, fan_in, param, zeros
from jaxvlm.nn.rope import Rope, rotate
from jaxvlm.parallel.rules import Axes, shard

_NORM_ALL_EPS = 1e-6  # independent of the epsilon of the block's other norms


class Context(NamedTuple):
    """Inputs that all layers of a stack share in one forward pass."""

    mask: Mask
    rope: Rope | None = None
    """Rotation of the query tokens; ``None``: no rotary positions."""
    cached: Shared | None = None
    """What the layers share of the KV cache; ``None``: no KV cache."""
    dropout_keys: Any = None
    """u32[B, 2]: dropout keys of the encoder or decoder, and within a block of that block;
    ``None``: no dropout."""


class Attention(nnx.Module):
    """Grouped-query attention.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules.
        spec: dims and variants of the block; ``num_kv_heads`` divides ``num_heads``.
    """

    def __init__(self, init: Init, axes: Axes, spec: BlockSpec):
        D, N, K, H = spec.width, spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.axes, self.spec = axes, spec
        check_heads(axes, N)
        check_platform(axes, spec.attention)
        self.wq = param(init, (D, N, H), ("embed", "heads", "head_dim"), fan_in(D), 1)
        self.wk = param(init, (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in(D), 1)
        self.wv = param(init, (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in(D), 1)
        self.wo = param(init, (N, H, D), ("heads", "head_dim", "embed"), fan_in(N, H), 2)
        heads, kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")
        self.bq = param(init, (N, H), heads, zeros) if spec.qkv_bias else None
        self.bk = param(init, (K, H), kv_heads, zeros) if spec.qkv_bias else None
        self.bv = param(init, (K, H), kv_heads, zeros) if spec.qkv_bias else None
        self.bo = param(init, (D,), ("norm",), zeros) if spec.out_bias else None
        norm = NORMS[spec.norm]
        self.q_norm = norm(init, H, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = norm(init, H, spec.norm_eps) if spec.qk_norm else None
        self.q_norm_all = RMSNorm(init, N * H, _NORM_ALL_EPS) if spec.qk_norm_all else None
        self.k_norm_all = RMSNorm(init, K * H, _NORM_ALL_EPS) if spec.qk_norm_all else None

    def __call__(
        self,
        x: jax.Array,
        context: Context,
        kv: KVCache | None = None,
        source: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache | None]:
        """Attend; return [B, T, D] and the KV cache with the new tokens appended.

        Args:
            x: [B, T, D] hidden states that queries are computed from.
            context: inputs shared by the layers.
            kv: keys and values of earlier tokens.
            source: [B, S, D] hidden states for keys and values in cross-attention; ``None``: ``x``.
        """
        source = x if source is None else source
        q = self._project(x, self.wq, self.bq, "heads")
        k = self._project(source, self.wk, self.bk, "kv_heads")
        v = self._project(source, self.wv, self.bv, "kv_heads")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.q_norm_all is not None and self.k_norm_all is not None:
            q, k = _norm_all(q, self.q_norm_all), _norm_all(k, self.k_norm_all)
        if context.rope is not None:
            q, k = rotate(q, context.rope), rotate(k, context.rope)
        scores = Scores(self.spec.query_scale, self.spec.attention_cap)
        drop = None
        if self.spec.attention_dropout and context.dropout_keys is not None:
            rate, keys = self.spec.attention_dropout, fold(context.dropout_keys, "shares")
            drop = functools.partial(dropout, rate=rate, keys=keys)

        def over(k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
            return attend(q, k, v, mask, self.axes, self.spec.attention, scores, drop)

        if kv is None or context.cached is None:
            out = over(k, v, context.mask)
        else:
            cached, kv = context.cached, append_kv(kv, k, v, context.cached.length)
            if cached.observe is not None:
                kv = kv._replace(observed=cached.observe(q, kv, scores))
            out = attend_cached(over, kv, cached.kept, context.mask)
        out = shard(self.axes, out, "batch", "seq", "heads", "head_dim")
        split = self.axes.splits_rows(x.shape[1])
        return affine(out, self.wo, self.bo, 2, split), kv  # BTNH,NHD->BTD

    def _project(self, x: jax.Array, w: Any, b: Any, heads: str) -> jax.Array:
        y = affine(x, w, b, split=self.axes.splits_rows(x.shape[1]))  # BTD,DNH->BTNH
        return shard(self.axes, y, "batch", "seq", heads, "head_dim")


def _norm_all(x: jax.Array, norm: RMSNorm) -> jax.Array:
    """Normalize [B, T, N, H] over N and H together."""
    return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
