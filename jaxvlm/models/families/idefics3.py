"""Idefics3 (arXiv 2408.12637) and SmolVLM (2504.05299) in Hugging Face's words.

SigLIP, a pixel shuffle with one matrix, Llama.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ModelConfig
from jaxvlm.models.families import connectors, parts, siglip
from jaxvlm.models.families.fields import METADATA, Features, Fields, image_token_id, read
from jaxvlm.models.families.names import NameMap
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import ChatStyle, Span, TileGrid

_FIELDS = Fields(
    {
        "vision_config": None,
        "text_config": None,
        "scale_factor": 2,
        "tie_word_embeddings": False,
    },
    {"model_type": ("idefics3", "smolvlm")},
    METADATA | {"_pad_token_id", "vocab_size"},
)

_MARK = "<fake_token_around_image>"


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The model that an Idefics3 or SmolVLM ``config.json`` describes, in float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: a field that is unknown here, or a value that this family can't do.
    """
    where = "config.json: "
    top = read(hf_config, _FIELDS, where)
    vision = {"model_type": "idefics3_vision", **(top["vision_config"] or {})}
    return ModelConfig(
        vision=siglip.vision_from_hf(vision, Features(), where + "vision_config."),
        connector=connectors.shuffled_linear(top["scale_factor"]),
        decoder=parts.decoder(top, "llama", bool(top["tie_word_embeddings"])),
    )


def weights(config: ModelConfig) -> NameMap:
    """Every tensor, in the names of the published checkpoints."""
    return parts.weights(
        config,
        siglip.entries("model.vision_model.", config.vision),
        connectors.shuffled_linear_entries("model."),
        aliases=(),
        language=("model.text_model.", ""),
    )


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """A picture's token stands alone; marks and places are in its span."""
    return ChatStyle()


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = parts.whole,
) -> Callable[[int, int], Span]:
    """Each tile behind its place in the grid, row by row; then the whole view."""
    image_id, count = image_token_id(hf_config), num_visual_tokens(config)

    @functools.cache
    def of(rows: int, columns: int) -> Span:
        lines = [
            "".join(f"{_MARK}<row_{r + 1}_col_{c + 1}><image>" for c in range(columns)) + "\n"
            for r in range(rows)
        ]
        text = "".join(lines) + ("\n" if rows else "") + f"{_MARK}<global-img><image>{_MARK}"
        return Span.of_tiles(encode(text), image_id, count)

    return lambda width, height: of(*grid(width, height))
