"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL (dense or with experts) in Hugging Face's words.

Pictures of any size as packed patches; three rows of positions.
Sources: arXiv 2409.12191, 2502.13923, 2511.21631.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import ConfigError, DecoderConfig, ModelConfig
from jaxvlm.models.families import llama, parts, qwen_vision
from jaxvlm.models.families.fields import METADATA, Fields, image_token_id, read
from jaxvlm.models.families.names import NameMap, over_trunk, tower_depths
from jaxvlm.types import ChatStyle, Span, TileGrid

_READS = {"vision_config": None, "text_config": None, "tie_word_embeddings": False}
# What the chat template writes around pictures and for videos.
_IDS = frozenset(
    (
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "vision_token_id",
    )
)
_TOWERS = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
}
"""``model_type`` -> the generation of the vision tower."""
_FIELDS = Fields(_READS, {"model_type": tuple(_TOWERS)}, METADATA | _IDS)
_OLD_ALIASES = (
    # transformers 4.52 and later, in memory.
    (r"^model\.visual\.", "visual."),
    (r"^model\.language_model\.", "model."),
)
_MODULES = ((r"^model\.", "model.language_model."), (r"^visual\.", "model.visual."))


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The model that a ``config.json`` describes, in float32.

    Args:
        hf_config: the file's content. Those of Qwen2-VL and Qwen2.5-VL may say the decoder's
            fields beside ``vision_config``, or there and in ``text_config``.

    Raises:
        ConfigError: a field that is unknown here, or a value that this family can't do.
    """
    where, kind = "config.json: ", hf_config["model_type"]
    beside = _beside(hf_config) if kind.startswith("qwen2") else {}
    top = read({n: v for n, v in hf_config.items() if n not in beside}, _FIELDS, where)
    text = top["text_config"] or {"model_type": f"{kind}_text", **beside}
    tied = bool(top["tie_word_embeddings"])
    if kind.startswith("qwen2"):
        tied = tied or bool(text.get("tie_word_embeddings"))

    def decoder(text: Mapping[str, Any]) -> DecoderConfig:
        known = {n: v for n, v in text.items() if n not in _IDS}
        return parts.decoder({"text_config": known}, f"{kind}_text", tied_embeddings=tied)

    found = decoder(text)
    for name, value in beside.items():
        if decoder({**text, name: value}) != found:
            raise ConfigError(f"{where}{name}={value!r} contradicts text_config")
    vision, connector = qwen_vision.towers_from_hf(
        top["vision_config"] or {}, _TOWERS[kind], found.width, where + "vision_config."
    )
    return ModelConfig(vision=vision, connector=connector, decoder=found)


def _beside(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's fields that stand beside ``vision_config``."""
    top = (_FIELDS.ignored | _READS.keys() | {"model_type"}) - {"max_position_embeddings"}
    return {n: value for n, value in hf_config.items() if n not in top}


def weights(config: ModelConfig) -> NameMap:
    """Every tensor, in the names and the layout of the published checkpoints."""
    tower, levels, trunk = _tower(config), config.connector.levels, config.vision.trunk
    new = tower == "qwen3_vl"
    language, model = ("model.language_model.", "model.") if new else ("model.", "")
    entries = (
        *llama.entries(config.decoder, language, "", joined_experts=True),
        *over_trunk(qwen_vision.entries(tower, model + "visual.", config.vision, levels), trunk),
    )
    sizes = llama.dims(config.decoder) | qwen_vision.dims(config.vision, config.decoder.width)
    depths = tower_depths(config.vision.depth, trunk) | llama.depths(config.decoder)
    depths["connector"] = levels
    copies = llama.copies(config.decoder, language, "")
    aliases, modules = ((), ()) if new else (_OLD_ALIASES, _MODULES)
    return NameMap(entries, sizes, depths, aliases, parts.BUFFERS, copies, modules)


def _tower(config: ModelConfig) -> str:
    """The generation, by what tells its tower from the others."""
    if config.vision.gated:
        return "qwen2_5_vl"
    return "qwen3_vl" if config.vision.position == "learned" else "qwen2_vl"


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """The template writes what stands around a picture's token itself."""
    return ChatStyle()


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid,
) -> Callable[[int, int], Span]:
    """A token for every ``block`` x ``block`` patches, row by row.

    Positions are (time, row, column); what follows goes on behind the longer side.

    Args:
        config: of :func:`config_from_hf`.
        hf_config: as there.
        encode: not used.
        grid: (width, height) of a picture -> (rows, columns) of its tokens.
    """
    image_id = image_token_id(hf_config)

    def find(width: int, height: int) -> Span:
        return grid_span(image_id, (1, *grid(width, height)))

    return find


def grid_span(token_id: int, grid: tuple[int, int, int], pace: float = 1.0) -> Span:
    """The tokens of a picture, or of a video's frames one after another.

    Args:
        token_id: what stands where a feature goes.
        grid: (frames, rows, columns) in tokens.
        pace: positions from a frame to the next; they are cut to whole ones.

    Source: Qwen2-VL, arXiv 2409.12191, section 2.1; Qwen2.5-VL, 2502.13923, section 2.1.2.
    """
    at = np.indices(grid, np.int32).reshape(3, -1)
    at[0] = at[0].astype(np.float32) * np.float32(pace)  # as torch rounds
    whole = Span.of(token_id, at.shape[1])
    # Torch's positions go on behind the longer side, however long a video lasts.
    return whole._replace(positions=at, advance=max(grid[1:]))
