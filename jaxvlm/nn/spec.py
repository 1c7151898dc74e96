"""What a transformer block is made of."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Dims and variants of a block; ViT and decoder are two values of it."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm: str  # a name in jaxvlm.nn.norm.NORMS
    norm_eps: float
    activation: str  # a name in jaxvlm.nn.mlp.ACTIVATIONS
    gated: bool
    attention: str  # backend
    qkv_bias: bool = False
    out_bias: bool = False  # of attention's last projection
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normed, head by head, before they are rotated
    post_norms: bool = False  # what attention and MLP add to the stream is normed too
    norm_after: bool = False  # the sum is normed, not what attention and MLP read (BERT)
    query_scale: float = 0.0  # of attention's scores; 0: head_dim ** -0.5
    qk_norm_all: bool = False  # an RMSNorm over all heads of the queries, another of the keys
    layer_scale: float = 0.0  # first value of a learned factor on what is added; 0: none
    attention_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they don't
    dropout: float = 0.0  # of what is added
    attention_dropout: float = 0.0  # of the shares with which a token attends
    num_experts: int = 0  # each an MLP of mlp_dim; 0: one MLP for every token
    experts_per_token: int = 0
    normalize_experts: bool = True  # the shares of a token's experts add up to 1
    expert_matmul: str = "auto"  # a name in jaxvlm.nn.grouped.MATMULS
