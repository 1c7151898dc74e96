"""Qwen2's decoder (arXiv 2407.10671), and those of Qwen2-VL and Qwen2.5-VL: Hugging Face config.

Llama's decoder with biases of queries, keys and values; sliding windows, if any, in the upper
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, DecoderConfig
from jaxvlm.hf.families import llama
from jaxvlm.hf.families.config_reader import ConfigFields, read
from jaxvlm.hf.families.positions import GLOBAL, LOCAL, Rotary, read_rotary, read_windows

READS = {
    **llama.READS,
    "vocab_size": 151_936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_VL_READS = {
    **READS,
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
}
_TEXT = ConfigFields(READS, {**llama.ONLY, "model_type": ("qwen2",)}, llama.IGNORED)
_VL_TYPES = ("qwen2_vl_text", "qwen2_5_vl_text")
_VL_TEXT = ConfigFields(_VL_READS, {**llama.ONLY, "model_type": _VL_TYPES}, llama.IGNORED)


def decoder_from_hf(group: Mapping[str, Any], where: str) -> DecoderConfig:
    """Read a Qwen2 decoder's settings; arguments and errors as Llama's."""
    sectioned = group.get("model_type") in _VL_TYPES
    text = read(group, _VL_TEXT if sectioned else _TEXT, where)
    if not sectioned:
        rotary = read_rotary(text, where, 10_000.0)
        return llama.decoder(text, where, rotary, qkv_bias=True, **windows(text, where))
    if text["head_dim"] not in (None, text["hidden_size"] // text["num_attention_heads"]):
        # Torch's attention derives the head dim from the width, its RoPE reads this field.
        raise ConfigError(f"{where}head_dim={text['head_dim']} is not hidden_size / heads")
    rotary = sections(text, where, 1_000_000.0, (16, 24, 24), ("mrope_section",))
    return llama.decoder(text, where, rotary, qkv_bias=True)


def windows(text: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read ``window`` and ``window_pattern`` of :class:`DecoderConfig`."""
    window = text["sliding_window"] if text["use_sliding_window"] else None
    depth, first = text["num_hidden_layers"], text["max_window_layers"]
    local = [window is not None and i >= first for i in range(depth)]
    kinds = text["layer_types"] or [LOCAL if yes else GLOBAL for yes in local]
    return read_windows(window, kinds, depth, where)


def sections(
    text: Mapping[str, Any],
    where: str,
    theta: float,
    default: tuple[int, ...],
    keys: tuple[str, ...],
) -> Rotary:
    """Read RoPE settings with M-RoPE sections, which exclude sliding windows.

    Args:
        text: the fields.
        where: prefix of field names in error messages.
        theta: the family's default base.
        default: the family's default sections.
        keys: further fields of its RoPE parameters.

    Raises:
        ConfigError: a sliding window, or as :func:`read_rotary`.
    """
    if text.get("use_sliding_window") or LOCAL in (text.get("layer_types") or ()):
        raise ConfigError(
            f"{where}use_sliding_window: sliding windows are not supported with M-RoPE sections"
        )
    rotary = read_rotary(text, where, theta, keys)
    return rotary._replace(sections=rotary.sections or default)
