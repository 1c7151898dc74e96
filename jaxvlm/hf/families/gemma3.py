"""Gemma 3 with images (arXiv 2503.19786): Hugging Face config and tensor names.

SigLIP, mean pooling over squares of patches, Gemma 3's decoder. Attention among an image's tokens
is bidirectional.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.hf.families import common, config_reader, connectors, siglip
from jaxvlm.hf.families.config_reader import ConfigFields, FeatureLayers
from jaxvlm.hf.families.name_map import NameMap
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import ChatStyle, Span, TileGrid

_FIELDS = ConfigFields(
    {
        "vision_config": None,
        "text_config": None,
        "mm_tokens_per_image": 256,
        "tie_word_embeddings": True,
    },
    {"model_type": ("gemma3",)},
    config_reader.METADATA | {"boi_token_index", "eoi_token_index"},
)


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Read a Gemma 3 model's settings from ``config.json``; the dtype is float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    where = "config.json: "
    top = config_reader.read(hf_config, _FIELDS, where)
    tower = top["vision_config"] or {}
    vision = siglip.vision_from_hf(tower, FeatureLayers(), where + "vision_config.")
    if (cap := (top["text_config"] or {}).get("final_logit_softcapping")) is not None:
        raise ConfigError(  # torch's decoder reads it, but its image-text model does not
            f"{where}text_config.final_logit_softcapping={cap!r} is not supported, only None"
        )
    return ModelConfig(
        vision=vision,
        connector=connectors.pooled_linear(vision, top["mm_tokens_per_image"]),
        decoder=common.decoder(top, "gemma3_text", visual_mask="prefix"),
    )


def weights(config: ModelConfig) -> NameMap:
    """Map all parameters to tensors, under the names in published checkpoints."""
    vision = siglip.entries("vision_tower.vision_model.", config.vision)
    return common.weights(config, vision, connectors.pooled_linear_entries(""))


_BEGIN = "<start_of_image>"
_SEEN = f"\n\n{_BEGIN}<image_soft_token><end_of_image>\n\n"


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """The template writes a start token; the model reads image tokens between start and end."""
    return ChatStyle(_BEGIN, _SEEN)


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = common.whole,
) -> Callable[[int, int], Span]:
    """Return spans of ``mm_tokens_per_image`` tokens, then pan-and-scan crops between texts."""
    image_id, count = config_reader.image_token_id(hf_config), num_visual_tokens(config)

    @functools.cache
    def of(crops: int) -> Span:
        if not crops:
            return Span.of(image_id, count)
        rest = f" and here are some crops to help you see better {' '.join([_SEEN] * crops)}"
        # The first start token and the last end token come from the chat style.
        text = f"{_SEEN}{rest}".removeprefix(f"\n\n{_BEGIN}").removesuffix("<end_of_image>\n\n")
        tiled = Span.of_tiles(encode(text), image_id, count)
        return tiled._replace(lead="Here is the original image ")

    def of_size(width: int, height: int) -> Span:
        rows, columns = grid(width, height)
        return of(rows * columns)

    return of_size
