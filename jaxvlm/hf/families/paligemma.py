"""PaliGemma (arXiv 2407.07726) and PaliGemma 2 (2412.03555): Hugging Face config and names.

SigLIP, a linear map, Gemma's decoder. Attention among image and prompt tokens is bidirectional.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.hf.families import common, connectors, siglip
from jaxvlm.hf.families.config_reader import METADATA, ConfigFields, FeatureLayers, read
from jaxvlm.hf.families.name_map import NameMap
from jaxvlm.types import ChatStyle

_FIELDS = ConfigFields(
    {"vision_config": None, "text_config": None, "tie_word_embeddings": True},
    {"model_type": ("paligemma",), "tie_word_embeddings": (True,)},
    # Old files repeat the decoder's sizes at the top.
    METADATA | {"vocab_size", "hidden_size", "num_image_tokens"},
)

_NOTES = ("use_bidirectional_attention", "num_image_tokens")
"""Fields of ``text_config`` about images, which describe what this family always does."""

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}"
    "{%- if message['content'] is string -%}{{- bos_token + message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] if part['type'] == 'image' -%}<image>{%- endfor -%}"
    "{{- bos_token -}}"
    "{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}"
    "{%- endfor -%}{%- endif -%}{{- '\\n' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- message['content'] + eos_token -}}"
    "{%- else -%}{{- raise_exception('PaliGemma has no role ' + message['role']) -}}{%- endif -%}"
    "{%- endfor -%}"
)
"""Chat template that writes what the family's processor does; its folders have none."""


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Read a PaliGemma model's settings from ``config.json``; the dtype is float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    where = "config.json: "
    top = read(hf_config, _FIELDS, where)
    text = {k: v for k, v in (top["text_config"] or {}).items() if k not in _NOTES}
    decoder = common.decoder({**top, "text_config": text}, "gemma", visual_mask="prompt")
    vision = top["vision_config"] or {}
    width = hf_config.get("projection_dim", vision.get("projection_dim", decoder.width))
    if width != decoder.width:
        raise ConfigError(f"{where}projection_dim={width} is not the decoder's {decoder.width}")
    return ModelConfig(
        vision=siglip.vision_from_hf(vision, FeatureLayers(), where + "vision_config."),
        connector=connectors.linear(),
        decoder=decoder,
    )


def weights(config: ModelConfig) -> NameMap:
    """Map all parameters to tensors, under the names in published checkpoints."""
    vision = siglip.entries("vision_tower.vision_model.", config.vision)
    return common.weights(config, vision, connectors.linear_entries(""))


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """Conversations write an image as the image token; folders have no chat template."""
    return ChatStyle(template=TEMPLATE)


span = common.one_span
