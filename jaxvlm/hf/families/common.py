"""Shared by families of models with a vision encoder, a connector and a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import DecoderConfig, ModelConfig
from jaxvlm.hf.families import clip, connectors, llama, text_decoders
from jaxvlm.hf.families.config_reader import image_token_id
from jaxvlm.hf.families.name_map import Entry, NameMap, encoder_depths, over_frozen_blocks
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import ChatStyle, Span, TileGrid

ALIASES = (
    # Names of transformers 4.52 and later, in memory and in some files.
    (r"^model\.(?=vision_tower|multi_modal_projector|language_model|image_newline)", ""),
    (r"^language_model\.(?!model|lm_head)", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)
"""Regex substitutions, applied in order, from other spellings of a tensor's name."""
CLIP_ALIASES = (*ALIASES, (r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model."))
MODULES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head", "lm_head"),
    (r"^vision_tower\.(vision_model\.)?", "model.vision_tower."),
    (r"^multi_modal_projector\.", "model.multi_modal_projector."),
)
"""Regex substitutions, applied in order, to the names of transformers' modules in memory."""
BUFFERS = ("embeddings.position_ids", "rotary_emb.inv_freq")


def decoder(
    top: Mapping[str, Any], model_type: str, text_ties: bool = False, **variants: Any
) -> DecoderConfig:
    """Read a decoder's settings from ``text_config``.

    Args:
        top: fields of ``config.json``. Its ``tie_word_embeddings`` decides whether the output
            projection is the token embedding, as in transformers.
        model_type: default ``model_type``, for a ``text_config`` without one.
        text_ties: whether transformers takes the flag of ``text_config`` too: this family's older
            files have it there.
        **variants: further fields of :class:`DecoderConfig`.
    """
    where = "config.json: text_config."
    text = text_decoders.decoder_from_hf(top["text_config"] or {}, where, model_type)
    tied = bool(top["tie_word_embeddings"]) or (text_ties and text.tied_embeddings)
    return dataclasses.replace(text, tied_embeddings=tied, **variants)


def weights(
    config: ModelConfig,
    vision: Sequence[Entry],
    connector: Sequence[Entry],
    aliases: Sequence[tuple[str, str]] = CLIP_ALIASES,
    language: tuple[str, str] = ("language_model.model.", "language_model."),
) -> NameMap:
    """Map all parameters of a model to tensors.

    Args:
        config: settings of the model.
        vision: entries of the vision encoder.
        connector: entries of the connector.
        aliases: regex substitutions from other spellings of tensors' names.
        language: prefixes of the decoder's ``embed_tokens``, and of ``lm_head``.
    """
    frozen_blocks = config.vision.frozen_blocks
    entries = (
        *llama.entries(config.decoder, *language),
        *connector,
        *over_frozen_blocks(vision, frozen_blocks),
    )
    sizes = {
        **llama.dims(config.decoder),
        **clip.dims(config.vision),
        **connectors.dims(config.vision, config.connector, config.decoder.width),
    }
    depths = encoder_depths(config.vision.depth, frozen_blocks) | llama.depths(config.decoder)
    copies = llama.copies(config.decoder, *language)
    layouts = llama.layouts(config.decoder, language[0])
    return NameMap(entries, sizes, depths, aliases, BUFFERS, copies, MODULES, layouts=layouts)


def whole(_width: int, _height: int) -> tuple[int, int]:
    """Return the tile grid of an image that is not cut: (0, 0)."""
    return 0, 0


def image_token_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """Conversations write an image as the image token; other tokens are in its span."""
    return ChatStyle()


def one_span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = whole,
) -> Callable[[int, int], Span]:
    """Return the span of families whose images are one square: visual tokens, and no others."""
    span = Span.of(image_token_id(hf_config), num_visual_tokens(config))
    return lambda _width, _height: span
