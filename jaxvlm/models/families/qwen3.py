"""Qwen3's decoder (arXiv 2505.09388) in Hugging Face's words, Qwen3-VL's text tower included.

Llama's, with normed queries and keys; windows as Qwen2's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import DecoderConfig
from jaxvlm.models.families import llama, qwen2
from jaxvlm.models.families.fields import Fields, read
from jaxvlm.models.families.positions import read_rotary

_FIELDS = Fields(
    {**qwen2.READS, "head_dim": 128, "attention_bias": False},
    {**llama.ONLY, "model_type": ("qwen3",)},
    llama.IGNORED,
)
_VL_TEXT = Fields(
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


def decoder_from_hf(group: Mapping[str, Any], where: str) -> DecoderConfig:
    """The decoder of a Qwen3 ``config.json``; arguments and errors as Llama's."""
    sectioned = group.get("model_type") == "qwen3_vl_text"
    text = read(group, _VL_TEXT if sectioned else _FIELDS, where)
    bias = bool(text["attention_bias"])
    variants = {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}
    if sectioned:
        keys = ("mrope_section", "mrope_interleaved")
        rotary = qwen2.sections(text, where, 500_000.0, (24, 20, 20), keys)
    else:
        rotary = read_rotary(text, where, 10_000.0)
        variants.update(qwen2.windows(text, where))
    return llama.decoder(text, where, rotary, **variants)
