"""Gemma's decoders in Hugging Face's words: 1 (arXiv 2403.08295), 2 (2408.00118), 3 (2503.19786).

Llama's, with ``1 + weight`` in the norms and scaled embeddings. 2 norms what is added too, caps
scores and logits and lets every other layer see a window; 3 norms queries and keys instead of
capping, has five such layers to a global one, and another rotary base in them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, DecoderConfig
from jaxvlm.models.families import llama
from jaxvlm.models.families.fields import Fields, activation, read
from jaxvlm.models.families.positions import (
    GLOBAL,
    LOCAL,
    Rotary,
    read_rotary,
    read_windows,
    scaling,
)

_SHARED = {
    **llama.READS,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "attention_bias": False,
    "max_position_embeddings": 8192,
}
_ONLY = {**llama.ONLY, "use_bidirectional_attention": (None, False)}
_FIRST = Fields(
    {
        **_SHARED,
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
    },
    # Torch reads hidden_act alone, and takes its old value "gelu" for the approximation.
    {**_ONLY, "model_type": ("gemma",), "hidden_activation": (None, "gelu_pytorch_tanh")},
    llama.IGNORED,
)
_LATER = {
    **{name: value for name, value in _SHARED.items() if name != "hidden_act"},
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_LATER_ONLY = {**_ONLY, "hidden_act": ("gelu_pytorch_tanh",)}  # torch reads hidden_activation
_SECOND = Fields(
    {**_LATER, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    {**_LATER_ONLY, "model_type": ("gemma2",)},
    llama.IGNORED,
)
_THIRD = Fields(
    {
        **_LATER,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "final_logit_softcapping": None,
        "rope_local_base_freq": None,
        "sliding_window_pattern": 6,
    },
    {**_LATER_ONLY, "model_type": ("gemma3_text",), "attn_logit_softcapping": (None,)},
    llama.IGNORED | {"_sliding_window_pattern"},  # an echo of what made layer_types
)


def decoder_from_hf(group: Mapping[str, Any], where: str) -> DecoderConfig:
    """The decoder of a Gemma ``config.json``, by its ``model_type``; else as Llama's."""
    kind = group.get("model_type", "gemma")
    if kind == "gemma2":
        return _second(read(group, _SECOND, where), where)
    if kind == "gemma3_text":
        return _third(read(group, _THIRD, where), where)
    text = read(group, _FIRST, where)
    act = "gelu_pytorch_tanh" if text["hidden_act"] == "gelu" else text["hidden_act"]
    rotary = read_rotary(text, where, 10_000.0)
    return _decoder(text, where, rotary, activation=activation(act, where + "hidden_act"))


def _decoder(text: Mapping[str, Any], where: str, rotary: Rotary, **variants: Any) -> DecoderConfig:
    bias = bool(text["attention_bias"])
    return llama.decoder(
        text,
        where,
        rotary,
        norm="rms_plus_one",
        embed_scale=text["hidden_size"] ** 0.5,
        qkv_bias=bias,
        out_bias=bias,
        **variants,
    )


def _later(
    text: Mapping[str, Any], where: str, rotary: Rotary, period: int, **variants: Any
) -> DecoderConfig:
    """What 2 and 3 share; the last of every ``period`` layers is global."""
    depth = text["num_hidden_layers"]
    kinds = text["layer_types"] or [LOCAL if (i + 1) % period else GLOBAL for i in range(depth)]
    return _decoder(
        text,
        where,
        rotary,
        activation=activation(text["hidden_activation"], where + "hidden_activation"),
        post_norms=True,
        query_scale=text["query_pre_attn_scalar"] ** -0.5,
        logit_cap=float(text["final_logit_softcapping"] or 0.0),
        **read_windows(text["sliding_window"], kinds, depth, where),
        **variants,
    )


def _second(text: Mapping[str, Any], where: str) -> DecoderConfig:
    cap = float(text["attn_logit_softcapping"] or 0.0)
    return _later(text, where, read_rotary(text, where, 10_000.0), 2, attention_cap=cap)


def _third(text: Mapping[str, Any], where: str) -> DecoderConfig:
    rope = text["rope_parameters"] or {}
    if unknown := set(rope) - {GLOBAL, LOCAL}:
        raise ConfigError(f"{where}rope_parameters: {sorted(unknown)} are no types of layers")
    far = {**(rope.get(GLOBAL) or {}), **(text["rope_scaling"] or {})}
    near = dict(rope.get(LOCAL) or {})
    theta = far.pop("rope_theta", None) or text["rope_theta"] or 1_000_000.0
    local = near.pop("rope_theta", None) or text["rope_local_base_freq"] or 10_000.0
    if near.pop("rope_type", "default") != "default" or near:
        raise ConfigError(f"{where}rope_parameters: {LOCAL} is scaled, which is not supported here")
    if "truncate" in far:
        raise ConfigError(f"{where}rope_parameters: truncate is read by no Gemma")
    scaled = scaling(far, text["max_position_embeddings"], where + "rope_parameters")
    rotary = Rotary(float(theta), scaled)
    found = _later(text, where, rotary, text["sliding_window_pattern"], qk_norm=True)
    # Where all layers are global, nothing turns by the local base.
    return dataclasses.replace(found, local_rope_theta=float(local)) if found.window else found
