"""Decoders by Hugging Face's ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxvlm.config import DecoderConfig, check_choice
from jaxvlm.hf.families import gemma, llama, mistral, qwen2, qwen3

DECODERS: dict[str, Callable[[Mapping[str, Any], str], DecoderConfig]] = {
    "llama": llama.decoder_from_hf,
    "mistral": mistral.decoder_from_hf,
    "qwen2": qwen2.decoder_from_hf,
    "qwen2_vl_text": qwen2.decoder_from_hf,
    "qwen2_5_vl_text": qwen2.decoder_from_hf,
    "qwen3": qwen3.decoder_from_hf,
    "qwen3_vl_text": qwen3.decoder_from_hf,
    "qwen3_moe": qwen3.decoder_from_hf,
    "qwen3_vl_moe_text": qwen3.decoder_from_hf,
    "gemma": gemma.decoder_from_hf,
    "gemma2": gemma.decoder_from_hf,
    "gemma3_text": gemma.decoder_from_hf,
}
"""``model_type`` -> function that reads its fields. All have the tensors of ``llama.entries``."""


def decoder_from_hf(
    group: Mapping[str, Any], where: str, model_type: str = "llama"
) -> DecoderConfig:
    """Read a decoder's settings from ``text_config``, or from a text model's ``config.json``.

    Args:
        group: the fields.
        where: prefix of field names in error messages.
        model_type: default ``model_type``, for a group without one.

    Raises:
        ConfigError: an unknown model type or field, or an unsupported value.
    """
    kind = group.get("model_type", model_type)
    check_choice(f"{where}model_type", kind, DECODERS)
    return DECODERS[kind](group, where)
