"""Specification of a transformer block."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Dims and variants of a transformer block, for vision encoders, text encoders and decoders."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm: str  # a name in jaxvlm.nn.norm.NORMS
    norm_eps: float
    activation: str  # a name in jaxvlm.nn.mlp.ACTIVATIONS
    gated: bool
    attention: str  # "auto", or a name in jaxvlm.nn.attention_backends.BACKENDS
    qkv_bias: bool = False
    out_bias: bool = False  # bias of attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # norm of queries and keys, per head, before rotary embedding
    post_norms: bool = False  # norm of the outputs of attention and MLP, before the residual sum
    norm_after: bool = False  # post-norm: norm of the residual sum, none of the inputs (BERT)
    query_scale: float = 0.0  # factor of attention scores; 0: head_dim ** -0.5
    qk_norm_all: bool = False  # RMSNorm over all heads of the queries, another one for the keys
    layer_scale: float = 0.0  # initial value of LayerScale; 0: no LayerScale
    attention_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: no cap
    dropout: float = 0.0  # rate, on the outputs of attention and MLP before the residual sum
    attention_dropout: float = 0.0  # rate, on attention weights
    num_experts: int = 0  # experts, each an MLP of mlp_dim; 0: one dense MLP
    experts_per_token: int = 0
    normalize_experts: bool = True  # router weights of a token's experts are scaled to sum to 1
    expert_matmul: str = "auto"  # a name in jaxvlm.nn.grouped_matmul.MATMULS

    @classmethod
    def of(cls, config: Any, **rest: Any) -> BlockSpec:
        """Return the spec of a tower's blocks.

        Args:
            config: the tower's settings, a dataclass; those with a name of this class are taken.
            **rest: what ``config`` does not say.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        given = {field.name for field in dataclasses.fields(config)}
        return cls(**{name: getattr(config, name) for name in names & given}, **rest)
