"""Gemma 3 with pictures (arXiv 2503.19786) in Hugging Face's words.

SigLIP, a mean over squares of patches, Gemma 3. A picture's tokens see each other both ways.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.models.families import connectors, parts, siglip
from jaxvlm.models.families.fields import METADATA, Features, Fields, image_token_id, read
from jaxvlm.models.families.names import NameMap
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import ChatStyle, Span, TileGrid

_FIELDS = Fields(
    {
        "vision_config": None,
        "text_config": None,
        "mm_tokens_per_image": 256,
        "tie_word_embeddings": True,
    },
    {"model_type": ("gemma3",)},
    METADATA | {"boi_token_index", "eoi_token_index"},
)


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The model that a Gemma 3 ``config.json`` describes, in float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: a field that is unknown here, or a value that this family can't do.
    """
    where = "config.json: "
    top = read(hf_config, _FIELDS, where)
    vision = siglip.vision_from_hf(top["vision_config"] or {}, Features(), where + "vision_config.")
    tied = bool(top["tie_word_embeddings"])
    if (cap := (top["text_config"] or {}).get("final_logit_softcapping")) is not None:
        raise ConfigError(  # the decoder alone reads it, the whole model in torch does not
            f"{where}text_config.final_logit_softcapping={cap!r} is not supported, only None"
        )
    return ModelConfig(
        vision=vision,
        connector=connectors.pooled_linear(vision, top["mm_tokens_per_image"]),
        decoder=parts.decoder(top, "gemma3_text", tied, visual_mask="prefix"),
    )


def weights(config: ModelConfig) -> NameMap:
    """Every tensor, in the names of the published checkpoints."""
    vision = siglip.entries("vision_tower.vision_model.", config.vision)
    return parts.weights(config, vision, connectors.pooled_linear_entries(""))


_BEGIN = "<start_of_image>"
_SEEN = f"\n\n{_BEGIN}<image_soft_token><end_of_image>\n\n"


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """The template writes a begin; features stand between it and an end, in a paragraph."""
    return ChatStyle(_BEGIN, _SEEN)


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = parts.whole,
) -> Callable[[int, int], Span]:
    """``mm_tokens_per_image`` tokens; the crops of pan and scan follow, with words about them."""
    image_id, count = image_token_id(hf_config), num_visual_tokens(config)

    @functools.cache
    def of(crops: int) -> Span:
        if not crops:
            return Span.of(image_id, count)
        rest = f" and here are some crops to help you see better {' '.join([_SEEN] * crops)}"
        # The first begin and the last end are the chat style's.
        text = f"{_SEEN}{rest}".removeprefix(f"\n\n{_BEGIN}").removesuffix("<end_of_image>\n\n")
        found = Span.of_tiles(encode(text), image_id, count)
        return found._replace(lead="Here is the original image ")

    def find(width: int, height: int) -> Span:
        rows, columns = grid(width, height)
        return of(rows * columns)

    return find
