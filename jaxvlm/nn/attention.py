"""The one attention layer of ViT and decoder."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxvlm.nn.kernels import attend
from jaxvlm.nn.kv import KVCache, append
from jaxvlm.nn.mask import Mask
from jaxvlm.nn.norm import RMSNorm
from jaxvlm.nn.param import Init, contract, fan_in, param, zeros
from jaxvlm.nn.rope import Rope, rotate
from jaxvlm.parallel.rules import Axes, shard

_QK_EPS = 1e-6  # of the norms over all heads, whatever the blocks' own


class Context(NamedTuple):
    """What every layer of a stack shares in one call."""

    mask: Mask
    rope: Rope | None = None
    """Rotation of the new tokens; ``None`` without rotary positions."""
    length: Any = None
    """i32[]: tokens already in the KV cache; ``None`` without one."""


class Attention(nnx.Module):
    """Multi-head attention with grouped queries.

    Args:
        init: source of parameters.
        axes: mesh and rules.
        width: D.
        num_heads: N.
        num_kv_heads: K, divides N.
        head_dim: H.
        qkv_bias: biases on queries, keys and values.
        out_bias: a bias on the last projection.
        qk_norm_all: an RMSNorm over all heads of the queries together, one over the keys'.
        backend: see :func:`jaxvlm.nn.kernels.attend`.
    """

    def __init__(
        self,
        init: Init,
        axes: Axes,
        *,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm_all: bool = False,
        backend: str,
    ):
        D, N, K, H = width, num_heads, num_kv_heads, head_dim
        self.axes, self.backend = axes, backend
        self.wq = param(init, (D, N, H), ("embed", "heads", "head_dim"), fan_in(D))
        self.wk = param(init, (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in(D))
        self.wv = param(init, (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in(D))
        self.wo = param(init, (N, H, D), ("heads", "head_dim", "embed"), fan_in(N, H))
        heads, kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")
        self.bq = param(init, (N, H), heads, zeros) if qkv_bias else None
        self.bk = param(init, (K, H), kv_heads, zeros) if qkv_bias else None
        self.bv = param(init, (K, H), kv_heads, zeros) if qkv_bias else None
        self.bo = param(init, (D,), ("norm",), zeros) if out_bias else None
        self.q_norm_all = RMSNorm(init, N * H, _QK_EPS) if qk_norm_all else None
        self.k_norm_all = RMSNorm(init, K * H, _QK_EPS) if qk_norm_all else None

    def __call__(
        self, x: jax.Array, context: Context, kv: KVCache | None = None
    ) -> tuple[jax.Array, KVCache | None]:
        """[B, T, D] -> [B, T, D], and the KV cache with the new tokens in it."""
        q = self._project(x, self.wq, self.bq, "heads")
        k = self._project(x, self.wk, self.bk, "kv_heads")
        v = self._project(x, self.wv, self.bv, "kv_heads")
        if self.q_norm_all is not None and self.k_norm_all is not None:
            q, k = _norm_all(q, self.q_norm_all), _norm_all(k, self.k_norm_all)
        if context.rope is not None:
            q, k = rotate(q, context.rope), rotate(k, context.rope)
        if kv is not None:
            kv = append(kv, k, v, context.length)
            k, v = kv.k, kv.v
        out = attend(q, k, v, context.mask, self.axes, self.backend)
        out = shard(self.axes, out, "batch", "seq", "heads", "head_dim")
        y = contract(out, self.wo[...], 2)  # BTNH,NHD->BTD
        if self.bo is not None:
            y = y + self.bo[...].astype(y.dtype)
        return y, kv

    def _project(self, x: jax.Array, w: Any, b: Any, heads: str) -> jax.Array:
        y = contract(x, w[...])  # BTD,DNH->BTNH
        if b is not None:
            y = y + b[...].astype(y.dtype)
        return shard(self.axes, y, "batch", "seq", heads, "head_dim")


def _norm_all(x: jax.Array, norm: RMSNorm) -> jax.Array:
    """[B, T, N, H] -> [B, T, N, H], normed over N and H together."""
    return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
