"""InternVL 2.5 and 3 (arXiv 2412.05271, 2504.10479): Hugging Face config and tensor names.

InternViT, pixel shuffle with an MLP, Qwen2's or Llama's decoder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ModelConfig
from jaxvlm.hf.families import common, config_reader, connectors, internvit
from jaxvlm.hf.families.config_reader import ConfigFields, FeatureLayers
from jaxvlm.hf.families.name_map import NameMap
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import ChatStyle, Span, TileGrid

_FIELDS = ConfigFields(
    {
        "vision_config": None,
        "text_config": None,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    },
    {"model_type": ("internvl",), "vision_feature_select_strategy": ("default",)},
)


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Read an InternVL model's settings from ``config.json``; the dtype is float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    where = "config.json: "
    top = config_reader.read(hf_config, _FIELDS, where)
    take = FeatureLayers(top["vision_feature_layer"])
    act = config_reader.activation(top["projector_hidden_act"], where + "projector_hidden_act")
    return ModelConfig(
        vision=internvit.vision_from_hf(top["vision_config"] or {}, take, where + "vision_config."),
        connector=connectors.shuffled_mlp(top["downsample_ratio"], act),
        decoder=common.decoder(top, "qwen2"),
    )


def weights(config: ModelConfig) -> NameMap:
    """Map all parameters to tensors, under the names in published ``-hf`` checkpoints."""
    vision = internvit.entries("vision_tower.", config.vision)
    return common.weights(
        config, vision, connectors.mlp_entries("", config.connector), common.ALIASES
    )


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """The model reads image tokens between a start and an end token."""
    return ChatStyle("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>")


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = common.whole,
) -> Callable[[int, int], Span]:
    """Return spans of consecutive tiles, with the downscaled image last."""
    image_id, count = config_reader.image_token_id(hf_config), num_visual_tokens(config)

    @functools.cache
    def of(tiles: int) -> Span:
        return Span.of_tiles([image_id] * tiles, image_id, count)

    def of_size(width: int, height: int) -> Span:
        rows, columns = grid(width, height)
        return of(rows * columns + 1)

    return of_size
