"""Gemma 1 (arXiv 2403.08295), 2 (2408.00118) and 3 (2503.19786): Hugging Face decoder configs.

They are Llama's decoder with ``1 + weight`` in norms and scaled embeddings. Gemma 2 adds
post-norms, soft caps of scores and logits, and a sliding window in every other layer. Gemma 3 has
norms of queries and keys instead of caps, and five sliding-window layers, with another RoPE base,
per global layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, DecoderConfig
from jaxvlm.hf.families import llama
from jaxvlm.hf.families.config_reader import ConfigFields, activation, read
from jaxvlm.hf.families.positions import GLOBAL, LOCAL, Rotary, read_rotary, read_windows, scaling

_SHARED = {
    **llama.READS,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "attention_bias": False,
    "max_position_embeddings": 8192,
}
_ONLY = {**llama.ONLY, "use_bidirectional_attention": (None, False)}
_FIRST = ConfigFields(
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
    # Torch reads hidden_act only, and takes its old value "gelu" as the tanh approximation.
    {**_ONLY, "model_type": ("gemma",), "hidden_activation": (None, "gelu_pytorch_tanh")},
    llama.IGNORED,
)
_LATER = {
    **_SHARED,
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
del _LATER["hidden_act"]
_LATER_ONLY = {**_ONLY, "hidden_act": ("gelu_pytorch_tanh",)}  # torch reads hidden_activation
_SECOND = ConfigFields(
    {**_LATER, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    {**_LATER_ONLY, "model_type": ("gemma2",)},
    llama.IGNORED,
)
_THIRD = ConfigFields(
    {
        **_LATER,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "final_logit_softcapping": None,
        "rope_local_base_freq": None,
        "sliding_window_pattern": 6,
    },
    {**_LATER_ONLY, "model_type": ("gemma3_text",), "attn_logit_softcapping": (None,)},
    llama.IGNORED | {"_sliding_window_pattern"},  # layer_types was computed from it
)


def decoder_from_hf(group: Mapping[str, Any], where: str) -> DecoderConfig:
    """Read a Gemma decoder's settings, by its ``model_type``; arguments and errors as Llama's."""
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
    """Build the settings shared by Gemma 2 and 3; the last of every ``period`` layers is global."""
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
        raise ConfigError(f"{where}rope_parameters: {sorted(unknown)} are not layer types")
    far = {**(rope.get(GLOBAL) or {}), **(text["rope_scaling"] or {})}
    near = dict(rope.get(LOCAL) or {})
    theta = far.pop("rope_theta", None) or text["rope_theta"] or 1_000_000.0
    local = near.pop("rope_theta", None) or text["rope_local_base_freq"] or 10_000.0
    if near.pop("rope_type", "default") != "default" or near:
        raise ConfigError(
            f"{where}rope_parameters: RoPE scaling of {LOCAL} layers is not supported here"
        )
    if "truncate" in far:
        raise ConfigError(f"{where}rope_parameters: truncate is read by no Gemma")
    scaled = scaling(far, text["max_position_embeddings"], where + "rope_parameters")
    rotary = Rotary(float(theta), scaled)
    config = _later(text, where, rotary, text["sliding_window_pattern"], qk_norm=True)
    # If all layers are global, no layer reads the local base.
    return dataclasses.replace(config, local_rope_theta=float(local)) if config.window else config
