"""Mistral's decoder (arXiv 2310.06825), Llama's with a sliding window: Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import DecoderConfig
from jaxvlm.hf.families import llama
from jaxvlm.hf.families.config_reader import ConfigFields, read
from jaxvlm.hf.families.positions import LOCAL, read_rotary, read_windows

_FIELDS = ConfigFields(
    {
        **llama.READS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    {**llama.ONLY, "model_type": ("mistral",)},
    llama.IGNORED,
)


def decoder_from_hf(group: Mapping[str, Any], where: str) -> DecoderConfig:
    """Read a Mistral decoder's settings; arguments and errors as Llama's."""
    text = read(group, _FIELDS, where)
    window, depth = text["sliding_window"], text["num_hidden_layers"]
    windows = {} if window is None else read_windows(window, [LOCAL] * depth, depth, where)
    return llama.decoder(text, where, read_rotary(text, where, 10_000.0), **windows)
