"""InternVL 2.5 and 3 (arXiv 2412.05271, 2504.10479) in Hugging Face's words.

InternViT, a pixel shuffle with an MLP, Qwen2 or Llama.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ModelConfig
from jaxvlm.models.families import connectors, internvit, parts
from jaxvlm.models.families.fields import Features, Fields, activation, image_token_id, read
from jaxvlm.models.families.names import NameMap
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import ChatStyle, Span, TileGrid

_FIELDS = Fields(
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
    """The model that an InternVL ``config.json`` describes, in float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: a field that is unknown here, or a value that this family can't do.
    """
    where = "config.json: "
    top = read(hf_config, _FIELDS, where)
    take = Features(top["vision_feature_layer"])
    act = activation(top["projector_hidden_act"], where + "projector_hidden_act")
    return ModelConfig(
        vision=internvit.vision_from_hf(top["vision_config"] or {}, take, where + "vision_config."),
        connector=connectors.shuffled_mlp(top["downsample_ratio"], act),
        decoder=parts.decoder(top, "qwen2", bool(top["tie_word_embeddings"])),
    )


def weights(config: ModelConfig) -> NameMap:
    """Every tensor, in the names of the published ``-hf`` checkpoints."""
    vision = internvit.entries("vision_tower.", config.vision)
    return parts.weights(
        config, vision, connectors.mlp_entries("", config.connector), parts.ALIASES
    )


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """Features stand between a begin and an end."""
    return ChatStyle("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>")


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = parts.whole,
) -> Callable[[int, int], Span]:
    """Tiles one after another, the whole view last, between a begin and an end."""
    image_id, count = image_token_id(hf_config), num_visual_tokens(config)

    @functools.cache
    def of(tiles: int) -> Span:
        return Span.of_tiles([image_id] * tiles, image_id, count)

    def find(width: int, height: int) -> Span:
        rows, columns = grid(width, height)
        return of(rows * columns + 1)

    return find
