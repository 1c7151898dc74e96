"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL (dense or MoE): Hugging Face config and tensor names.

Images of any size as packed patches; M-RoPE with three rows of positions.
Sources: arXiv 2409.12191, 2502.13923, 2511.21631.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import ConfigError, DecoderConfig, ModelConfig
from jaxvlm.hf.families import common, llama, qwen_vision
from jaxvlm.hf.families.config_reader import METADATA, ConfigFields, image_token_id, read
from jaxvlm.hf.families.name_map import NameMap, encoder_depths, over_frozen_blocks
from jaxvlm.types import Span, TileGrid

_READS = {"vision_config": None, "text_config": None, "tie_word_embeddings": False}
# Tokens that the chat template writes around images and for videos.
_IDS = frozenset([
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "vision_token_id",
])  # fmt: skip
_TOWERS = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
}
"""``model_type`` -> the generation of the vision encoder."""
_FIELDS = ConfigFields(_READS, {"model_type": tuple(_TOWERS)}, METADATA | _IDS)
_OLD_ALIASES = (
    # Names of transformers 4.52 and later, in memory.
    (r"^model\.visual\.", "visual."),
    (r"^model\.language_model\.", "model."),
)
_MODULES = ((r"^model\.", "model.language_model."), (r"^visual\.", "model.visual."))


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Read a model's settings from ``config.json``; the dtype is float32.

    Args:
        hf_config: the file's content. Qwen2-VL and Qwen2.5-VL may have the decoder's fields at the
            top, next to ``vision_config``, or both there and in ``text_config``.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    where, kind = "config.json: ", hf_config["model_type"]
    text_fields = _top_text_fields(hf_config) if kind.startswith("qwen2") else {}
    top = read({n: v for n, v in hf_config.items() if n not in text_fields}, _FIELDS, where)
    text = top["text_config"] or {"model_type": f"{kind}_text", **text_fields}

    def decoder(text: Mapping[str, Any]) -> DecoderConfig:
        known = {n: v for n, v in text.items() if n not in _IDS}
        shared = {**top, "text_config": known}
        return common.decoder(shared, f"{kind}_text", text_ties=kind.startswith("qwen2"))

    language = decoder(text)
    for name, value in text_fields.items():
        if decoder({**text, name: value}) != language:
            raise ConfigError(f"{where}{name}={value!r} contradicts text_config")
    vision, connector = qwen_vision.towers_from_hf(
        top["vision_config"] or {}, _TOWERS[kind], language.width, where + "vision_config."
    )
    return ModelConfig(vision=vision, connector=connector, decoder=language)


def _top_text_fields(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's fields at the top of ``config.json``."""
    top = (_FIELDS.ignored | _READS.keys() | {"model_type"}) - {"max_position_embeddings"}
    return {n: value for n, value in hf_config.items() if n not in top}


def weights(config: ModelConfig) -> NameMap:
    """Map all parameters to tensors, under the names and in the layout of published checkpoints."""
    tower, levels = _tower(config), config.connector.deepstack_levels
    frozen_blocks = config.vision.frozen_blocks
    new = tower == "qwen3_vl"
    language, model = ("model.language_model.", "model.") if new else ("model.", "")
    vision = qwen_vision.entries(tower, model + "visual.", config.vision, levels)
    entries = (
        *llama.entries(config.decoder, language, "", joined_experts=True),
        *over_frozen_blocks(vision, frozen_blocks),
    )
    sizes = llama.dims(config.decoder) | qwen_vision.dims(config.vision, config.decoder.width)
    depths = encoder_depths(config.vision.depth, frozen_blocks) | llama.depths(config.decoder)
    depths["connector"] = levels
    copies = llama.copies(config.decoder, language, "")
    aliases, modules = ((), ()) if new else (_OLD_ALIASES, _MODULES)
    layouts = llama.layouts(config.decoder, language)
    return NameMap(
        entries, sizes, depths, aliases, common.BUFFERS, copies, modules, layouts=layouts
    )


def _tower(config: ModelConfig) -> str:
    """Return the generation, from settings that only its vision encoder has."""
    if config.vision.gated:
        return "qwen2_5_vl"
    return "qwen3_vl" if config.vision.position == "learned" else "qwen2_vl"


chat_style = common.image_token_style
"""The template adds the tokens around an image token."""


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid,
) -> Callable[[int, int], Span]:
    """Return spans of one token per ``merge_block`` x ``merge_block`` patches, in row-major order.

    Positions are (time, row, column); those of later tokens continue after the longer side.

    Args:
        config: result of :func:`config_from_hf`.
        hf_config: content of ``config.json``.
        encode: not used.
        grid: (width, height) of an image -> (rows, columns) of its tokens.
    """
    image_id = image_token_id(hf_config)

    def of_size(width: int, height: int) -> Span:
        return grid_span(image_id, (1, *grid(width, height)))

    return of_size


def grid_span(token_id: int, grid: tuple[int, int, int], pace: float = 1.0) -> Span:
    """Return the span of an image, or of a video's consecutive frames.

    Args:
        token_id: token id at the positions of features.
        grid: (frames, rows, columns) in tokens.
        pace: difference of temporal positions between frames; positions are truncated to integers.

    Source: Qwen2-VL, arXiv 2409.12191, section 2.1; Qwen2.5-VL, 2502.13923, section 2.1.2.
    """
    at = np.indices(grid, np.int32).reshape(3, -1)
    at[0] = at[0].astype(np.float32) * np.float32(pace)  # as torch rounds
    span = Span.of(token_id, at.shape[1])
    # As in torch: positions continue after the longer side, whatever the length of a video.
    return span._replace(positions=at, advance=max(grid[1:]))
