"""Idefics3 (arXiv 2408.12637) and SmolVLM (2504.05299): Hugging Face config and tensor names.

SigLIP, pixel shuffle with a linear map, Llama's decoder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ModelConfig
from jaxvlm.hf.families import common, config_reader, connectors, siglip
from jaxvlm.hf.families.config_reader import ConfigFields, FeatureLayers
from jaxvlm.hf.families.name_map import NameMap
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import ChatStyle, Span, TileGrid

_FIELDS = ConfigFields(
    {
        "vision_config": None,
        "text_config": None,
        "scale_factor": 2,
        "tie_word_embeddings": False,
    },
    {"model_type": ("idefics3", "smolvlm")},
    config_reader.METADATA | {"_pad_token_id", "vocab_size"},
)

_MARK, _WHOLE = "<fake_token_around_image>", "<global-img>"


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Read an Idefics3 or SmolVLM model's settings from ``config.json``; the dtype is float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    where = "config.json: "
    top = config_reader.read(hf_config, _FIELDS, where)
    vision = {"model_type": "idefics3_vision", **(top["vision_config"] or {})}
    return ModelConfig(
        vision=siglip.vision_from_hf(vision, FeatureLayers(), where + "vision_config."),
        connector=connectors.shuffled_linear(top["scale_factor"]),
        decoder=common.decoder(top, "llama"),
    )


def weights(config: ModelConfig) -> NameMap:
    """Map all parameters to tensors, under the names in published checkpoints."""
    return common.weights(
        config,
        siglip.entries("model.vision_model.", config.vision),
        connectors.shuffled_linear_entries("model."),
        aliases=(),
        language=("model.text_model.", ""),
    )


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """Conversations write an image as the image token; its span has tokens of tiles' places."""
    return ChatStyle(marks=rf"{_MARK}|<row_\d+_col_\d+>|{_WHOLE}")


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = common.whole,
) -> Callable[[int, int], Span]:
    """Return spans of tiles by rows, each after its row and column, then the downscaled image."""
    image_id, count = config_reader.image_token_id(hf_config), num_visual_tokens(config)

    @functools.cache
    def of(rows: int, columns: int) -> Span:
        lines = [
            "".join(f"{_MARK}<row_{r + 1}_col_{c + 1}><image>" for c in range(columns)) + "\n"
            for r in range(rows)
        ]
        text = "".join(lines) + ("\n" if rows else "") + f"{_MARK}{_WHOLE}<image>{_MARK}"
        return Span.of_tiles(encode(text), image_id, count)

    return lambda width, height: of(*grid(width, height))
