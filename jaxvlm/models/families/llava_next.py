"""LLaVA-NeXT and LLaVA-OneVision (arXiv 2408.03326) in Hugging Face's words.

CLIP or SigLIP, a two-layer MLP, any text tower; pictures are cut in tiles (``anyres.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.models.families import anyres, llava, parts
from jaxvlm.models.families.fields import METADATA, Fields, image_token_id, read
from jaxvlm.types import ChatStyle, Span, TileGrid

_NEXT = Fields(
    {**llava.READS, "image_grid_pinpoints": None},
    {
        "model_type": ("llava_next",),
        "vision_feature_select_strategy": ("default", "full"),
        "use_image_newline_parameter": (True,),
    },
    METADATA | {"vocab_size"},
)
_ONEVISION = Fields(
    {
        **_NEXT.reads,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
    },
    {**_NEXT.only, "model_type": ("llava_onevision",)},
    # Records with videos are refused where data is read.
    METADATA | {"video_token_id", "video_token_index"},
)
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "vision_use_head": False,
}
"""SigLIP-So400m/14 at 384 pixels: what OneVision's file without ``vision_config`` means."""


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The model that a LLaVA-NeXT or LLaVA-OneVision ``config.json`` describes, in float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: a field that is unknown here, or a value that this family can't do.
    """
    one = hf_config.get("model_type") == "llava_onevision"
    top = read(hf_config, _ONEVISION if one else _NEXT, "config.json: ")
    text = top["text_config"] or {}
    tied = bool(top["tie_word_embeddings"] or (one and text.get("tie_word_embeddings")))
    made = llava.model(
        {**top, "tie_word_embeddings": tied},
        _SIGLIP if one else llava.NO_VISION,
        "qwen2" if one else "llama",
        newline=True,
    )
    if made.vision.keep_class_token:
        raise ConfigError(
            "config.json: vision_feature_select_strategy='full' keeps a class token in every "
            "tile, which has no place in their grid; only 'default'"
        )
    _most(hf_config)
    for height, width in top["image_grid_pinpoints"] or ():
        if height % made.vision.image_size or width % made.vision.image_size:
            raise ConfigError(
                f"config.json: image_grid_pinpoints has {[height, width]}, which tiles of "
                f"{made.vision.image_size} pixels don't fill"
            )
    return made


weights = llava.weights


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """A picture's token stands alone."""
    return ChatStyle()


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = parts.whole,
) -> Callable[[int, int], Span]:
    """The whole picture, then its tiles' rows without padding, a newline behind each."""
    side = config.vision.image_size // config.vision.patch_size
    image_id, most = image_token_id(hf_config), _most(hf_config)

    def find(width: int, height: int) -> Span:
        rows, columns = grid(width, height)
        if not rows:
            return anyres.whole(image_id, side)
        part = anyres.unpadded(width, height, rows * side, columns * side)
        return anyres.span(image_id, side, (rows, columns), *part, most)

    return find


def _most(hf_config: Mapping[str, Any]) -> int:
    """Tiles' worth of features, at most; 0 is no bound."""
    if hf_config.get("model_type") != "llava_onevision":
        return 0
    said = hf_config.get("vision_aspect_ratio", "anyres_max_9")
    found = re.fullmatch(r"anyres_max_([1-9]\d*)", str(said))
    if not found:
        raise ConfigError(
            f"config.json: vision_aspect_ratio={said!r} is not supported here, only anyres_max_N"
        )
    return int(found[1])
