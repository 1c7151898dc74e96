"""What families made of a tower, a connector and a decoder have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import DecoderConfig, ModelConfig
from jaxvlm.models.families import clip, connectors, llama, text
from jaxvlm.models.families.fields import image_token_id
from jaxvlm.models.families.names import Entry, NameMap, over_trunk, tower_depths
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import Span

ALIASES = (
    # transformers 4.52 and later, in memory and in some files.
    (r"^model\.(?=vision_tower|multi_modal_projector|language_model|image_newline)", ""),
    (r"^language_model\.(?!model|lm_head)", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)
"""Other spellings of a name (pattern, replacement), applied in turn."""
CLIP_ALIASES = (*ALIASES, (r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model."))
MODULES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head", "lm_head"),
    (r"^vision_tower\.(vision_model\.)?", "model.vision_tower."),
    (r"^multi_modal_projector\.", "model.multi_modal_projector."),
)
"""Of a ``NameMap``."""
BUFFERS = ("embeddings.position_ids", "rotary_emb.inv_freq")


def decoder(
    top: Mapping[str, Any], model_type: str, tied: bool | None = None, **variants: Any
) -> DecoderConfig:
    """The decoder of a ``text_config``.

    Args:
        top: fields of ``config.json``.
        model_type: what a ``text_config`` without one is.
        tied: whether ``config.json`` ties the output matrix; ``None`` leaves it to the decoder's.
        **variants: further fields of :class:`DecoderConfig`.
    """
    where = "config.json: text_config."
    found = text.decoder_from_hf(top["text_config"] or {}, where, model_type)
    if tied is not None:
        variants["tied_embeddings"] = tied or found.tied_embeddings
    return dataclasses.replace(found, **variants)


def weights(
    config: ModelConfig,
    vision: Sequence[Entry],
    connector: Sequence[Entry],
    aliases: Sequence[tuple[str, str]] = CLIP_ALIASES,
    language: tuple[str, str] = ("language_model.model.", "language_model."),
) -> NameMap:
    """Every tensor of a model.

    Args:
        config: of the model.
        vision: the tower's.
        connector: the connector's.
        aliases: other spellings.
        language: what stands before the decoder's ``embed_tokens``, and before ``lm_head``.
    """
    trunk = config.vision.trunk
    entries = (
        *llama.entries(config.decoder, *language),
        *connector,
        *over_trunk(vision, trunk),
    )
    sizes = {
        **llama.dims(config.decoder),
        **clip.dims(config.vision),
        **connectors.dims(config.vision, config.connector, config.decoder.width),
    }
    depths = tower_depths(config.vision.depth, trunk) | llama.depths(config.decoder)
    copies = llama.copies(config.decoder, *language)
    return NameMap(entries, sizes, depths, aliases, BUFFERS, copies, MODULES)


def whole(_width: int, _height: int) -> tuple[int, int]:
    """No picture is cut."""
    return 0, 0


def one_span(config: ModelConfig, hf_config: Mapping[str, Any]) -> Callable[[int, int], Span]:
    """Every picture is one square, its visual tokens and nothing else."""
    one = Span.of(image_token_id(hf_config), num_visual_tokens(config))
    return lambda _width, _height: one
