"""Qwen2's decoder (arXiv 2407.10671) in Hugging Face's words, Qwen2-VL's text tower included.

Llama's, with biases on queries, keys and values; windows, where in use, in the upper layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, DecoderConfig
from jaxvlm.models.families import llama
from jaxvlm.models.families.fields import Fields, read
from jaxvlm.models.families.positions import GLOBAL, LOCAL, Rotary, read_rotary, read_windows

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
_TEXT = Fields(READS, {**llama.ONLY, "model_type": ("qwen2",)}, llama.IGNORED)
_VL_TYPES = ("qwen2_vl_text", "qwen2_5_vl_text")
_VL_TEXT = Fields(_VL_READS, {**llama.ONLY, "model_type": _VL_TYPES}, llama.IGNORED)


def decoder_from_hf(group: Mapping[str, Any], where: str) -> DecoderConfig:
    """The decoder of a Qwen2 ``config.json``; arguments and errors as Llama's."""
    sectioned = group.get("model_type") in _VL_TYPES
    text = read(group, _VL_TEXT if sectioned else _TEXT, where)
    if not sectioned:
        rotary = read_rotary(text, where, 10_000.0)
        return llama.decoder(text, where, rotary, qkv_bias=True, **windows(text, where))
    if text["head_dim"] not in (None, text["hidden_size"] // text["num_attention_heads"]):
        # Torch's attention goes by the width, its rotary positions by this.
        raise ConfigError(f"{where}head_dim={text['head_dim']} is not hidden_size / heads")
    rotary = sections(text, where, 1_000_000.0, (16, 24, 24), ("mrope_section",))
    return llama.decoder(text, where, rotary, qkv_bias=True)


def windows(text: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``window`` and ``window_pattern`` of :class:`DecoderConfig`."""
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
    """Rotary positions in sections, which know no sliding windows.

    Args:
        text: the fields.
        where: what error messages put before a field's name.
        theta: the family's default base.
        default: its default sections.
        keys: what its rope parameters hold besides.

    Raises:
        ConfigError: a window, or what :func:`read_rotary` refuses.
    """
    if text.get("use_sliding_window") or LOCAL in (text.get("layer_types") or ()):
        raise ConfigError(
            f"{where}use_sliding_window: windows are not supported where positions have sections"
        )
    rotary = read_rotary(text, where, theta, keys)
    return rotary._replace(sections=rotary.sections or default)
