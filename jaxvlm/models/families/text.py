"""The text towers by Hugging Face's ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxvlm.config import ConfigError, DecoderConfig
from jaxvlm.models.families import gemma, llama, mistral, qwen2, qwen3

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
"""``model_type`` -> what reads its fields. Their tensors are ``llama.entries``."""


def decoder_from_hf(
    group: Mapping[str, Any], where: str, model_type: str = "llama"
) -> DecoderConfig:
    """The decoder that a ``text_config``, or the ``config.json`` of a text model, describes.

    Args:
        group: the fields.
        where: what error messages put before a field's name.
        model_type: what a group without one is.

    Raises:
        ConfigError: a model type or a field that is unknown, or a value that its family can't do.
    """
    kind = group.get("model_type", model_type)
    if kind not in DECODERS:
        raise ConfigError(f"{where}model_type={kind!r}; known: {', '.join(DECODERS)}")
    return DECODERS[kind](group, where)
