"""Qwen3's decoders (arXiv 2505.09388), and those of Qwen3-VL: Hugging Face config.

Llama's decoder with norms of queries and keys, and sliding windows as in Qwen2. Dense, or a mixture
of experts in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import DecoderConfig
from jaxvlm.hf.families import llama, qwen2
from jaxvlm.hf.families.config_reader import ConfigFields, read
from jaxvlm.hf.families.positions import LOCAL, read_rotary, read_windows

_FIELDS = ConfigFields(
    {**qwen2.READS, "head_dim": 128, "attention_bias": False},
    {**llama.ONLY, "model_type": ("qwen3",)},
    llama.IGNORED,
)
_VL_TEXT = ConfigFields(
    {
        **llama.READS,
        "vocab_size": 151_936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128_000,
        "attention_bias": False,
    },
    {**llama.ONLY, "model_type": ("qwen3_vl_text",)},
    llama.IGNORED,
)
_EXPERTS = {
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": None,  # in published files; transformers 5 writes num_local_experts
    "num_local_experts": 128,
}
_EXPERTS_ONLY: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": (None, []),
    "output_router_logits": (False,),
}
# The weight of a loss that output_router_logits=False turns off; windows are in all layers or none.
_EXPERTS_IGNORED = llama.IGNORED | {"router_aux_loss_coef", "max_window_layers"}
_MOE = ConfigFields(
    {
        **_VL_TEXT.reads,
        **_EXPERTS,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "head_dim": None,
        "norm_topk_prob": False,
    },
    {**llama.ONLY, **_EXPERTS_ONLY, "model_type": ("qwen3_moe",)},
    _EXPERTS_IGNORED,
)
_VL_MOE_TEXT = ConfigFields(
    {
        **_VL_TEXT.reads,
        **_EXPERTS,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": None,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1408,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
    },
    {
        **llama.ONLY,
        **_EXPERTS_ONLY,
        "model_type": ("qwen3_vl_moe_text",),
        "sliding_window": (None,),
        "use_sliding_window": (False,),
        "norm_topk_prob": (True,),
    },
    _EXPERTS_IGNORED,
)
_KINDS = {
    "qwen3": _FIELDS,
    "qwen3_vl_text": _VL_TEXT,
    "qwen3_moe": _MOE,
    "qwen3_vl_moe_text": _VL_MOE_TEXT,
}


def decoder_from_hf(group: Mapping[str, Any], where: str) -> DecoderConfig:
    """Read a Qwen3 decoder's settings; arguments and errors as Llama's."""
    kind = group.get("model_type", "qwen3")
    text = read(group, _KINDS.get(kind, _FIELDS), where)
    bias = bool(text["attention_bias"])
    variants: dict[str, Any] = {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}
    if "moe" in kind:
        variants |= {
            "mlp_dim": text["moe_intermediate_size"],
            "num_experts": text["num_experts"] or text["num_local_experts"],
            "experts_per_token": text["num_experts_per_tok"],
            "normalize_experts": bool(text.get("norm_topk_prob", True)),
        }
    if "vl" in kind:
        keys = ("mrope_section", "mrope_interleaved")
        rotary = qwen2.sections(text, where, 500_000.0, (24, 20, 20), keys)
    else:
        rotary = read_rotary(text, where, 10_000.0)
        variants |= _windows(text, where) if "moe" in kind else qwen2.windows(text, where)
    return llama.decoder(text, where, rotary, **variants)


def _windows(text: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not text["use_sliding_window"] or text["sliding_window"] is None:
        return {}
    depth = text["num_hidden_layers"]
    return read_windows(text["sliding_window"], [LOCAL] * depth, depth, where)
