"""PaliGemma (arXiv 2407.07726) and PaliGemma 2 (2412.03555) in Hugging Face's words.

SigLIP, one linear map, Gemma. Picture and prompt see each other both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.models.families import connectors, parts, siglip
from jaxvlm.models.families.fields import METADATA, Features, Fields, read
from jaxvlm.models.families.names import NameMap
from jaxvlm.types import ChatStyle, Span, TileGrid

_FIELDS = Fields(
    {"vision_config": None, "text_config": None, "tie_word_embeddings": True},
    {"model_type": ("paligemma",), "tie_word_embeddings": (True,)},
    # Old files repeat the decoder's sizes here.
    METADATA | {"vocab_size", "hidden_size", "num_image_tokens"},
)

_NOTES = ("use_bidirectional_attention", "num_image_tokens")
"""What files say in ``text_config`` of pictures; it is what this family does anyway."""

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
"""Its folders have no chat template; this is what its processor writes."""


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The model that a PaliGemma ``config.json`` describes, in float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: a field that is unknown here, or a value that this family can't do.
    """
    where = "config.json: "
    top = read(hf_config, _FIELDS, where)
    text = {k: v for k, v in (top["text_config"] or {}).items() if k not in _NOTES}
    decoder = parts.decoder({"text_config": text}, "gemma", visual_mask="prompt")
    vision = top["vision_config"] or {}
    width = hf_config.get("projection_dim", vision.get("projection_dim", decoder.width))
    if width != decoder.width:
        raise ConfigError(f"{where}projection_dim={width} is not the decoder's {decoder.width}")
    return ModelConfig(
        vision=siglip.vision_from_hf(vision, Features(), where + "vision_config."),
        connector=connectors.linear(),
        decoder=decoder,
    )


def weights(config: ModelConfig) -> NameMap:
    """Every tensor, in the names of the published checkpoints."""
    vision = siglip.entries("vision_tower.vision_model.", config.vision)
    return parts.weights(config, vision, connectors.linear_entries(""))


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """A picture's token stands alone; folders have no chat template."""
    return ChatStyle(template=TEMPLATE)


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = parts.whole,
) -> Callable[[int, int], Span]:
    """A token a patch."""
    return parts.one_span(config, hf_config)
