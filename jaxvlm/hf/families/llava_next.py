"""LLaVA-NeXT, LLaVA-NeXT-Video and LLaVA-OneVision (arXiv 2408.03326): config and tensor names.

CLIP or SigLIP, an MLP with one hidden layer, any decoder; images are cut into tiles, see
``anyres.py``. Videos have tokens of their own: see ``video_families.py``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.hf.families import anyres, common, llava
from jaxvlm.hf.families.config_reader import METADATA, ConfigFields, image_token_id, read
from jaxvlm.types import Span, TileGrid

_NEXT = ConfigFields(
    {**llava.READS, "image_grid_pinpoints": None},
    {
        "model_type": ("llava_next",),
        "vision_feature_select_strategy": ("default", "full"),
        "use_image_newline_parameter": (True,),
    },
    METADATA | {"vocab_size"},
)
_ONEVISION = ConfigFields(
    {
        **_NEXT.reads,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
    },
    {**_NEXT.only, "model_type": ("llava_onevision",)},
    METADATA | {"video_token_id", "video_token_index"},
)
_VIDEO = ConfigFields(
    {**_NEXT.reads, "spatial_pool_stride": 2},
    {**_NEXT.only, "model_type": ("llava_next_video",), "spatial_pool_mode": ("average",)},
    METADATA | {"vocab_size", "video_token_id", "video_token_index", "video_seq_length"},
)
_FIELDS = {"llava_next": _NEXT, "llava_next_video": _VIDEO, "llava_onevision": _ONEVISION}
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
"""OneVision's default ``vision_config``: SigLIP-So400m/14 at 384 pixels."""


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Read a model's settings from ``config.json``; the dtype is float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    kind = str(hf_config.get("model_type"))
    onevision = kind == "llava_onevision"
    top = read(hf_config, _FIELDS.get(kind, _NEXT), "config.json: ")
    config = llava.model(
        top,
        _SIGLIP if onevision else llava.NO_VISION,
        "qwen2" if onevision else "llama",
        newline=True,
        text_ties=kind != "llava_next",
    )
    if config.vision.keep_class_token:
        raise ConfigError(
            "config.json: vision_feature_select_strategy='full' keeps a class token in every "
            "tile, which has no place in their grid; only 'default' is supported"
        )
    if kind == "llava_next_video":
        config = _with_video_tokens(config, top["spatial_pool_stride"])
    _max_tiles(hf_config)
    for height, width in top["image_grid_pinpoints"] or ():
        if height % config.vision.image_size or width % config.vision.image_size:
            raise ConfigError(
                f"config.json: image_grid_pinpoints has {[height, width]}, which tiles of "
                f"{config.vision.image_size} pixels don't fill"
            )
    return config


weights = llava.weights
chat_style = common.image_token_style


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = common.whole,
) -> Callable[[int, int], Span]:
    """Return spans of the downscaled image, then rows of tiles' features, each with a newline."""
    side = config.vision.image_size // config.vision.patch_size
    image_id, most = image_token_id(hf_config), _max_tiles(hf_config)
    pooled = (side // config.connector.video_pool) ** 2 if config.connector.video_pool else 0

    def of_size(width: int, height: int) -> Span:
        rows, columns = grid(width, height)
        if not rows:
            return anyres.whole(image_id, side, pooled)
        part = anyres.unpadded(width, height, rows * side, columns * side)
        return anyres.span(image_id, side, (rows, columns), *part, most, pooled)

    return of_size


def _with_video_tokens(config: ModelConfig, stride: int) -> ModelConfig:
    """Add tokens of ``stride`` x ``stride`` patches; raises ConfigError."""
    side = config.vision.image_size // config.vision.patch_size
    if stride < 1 or side % stride:
        raise ConfigError(
            f"config.json: spatial_pool_stride={stride} does not divide the {side} x {side} "
            "patches of a frame"
        )
    connector = dataclasses.replace(config.connector, video_pool=stride)
    return dataclasses.replace(config, connector=connector)


def _max_tiles(hf_config: Mapping[str, Any]) -> int:
    """Return the maximum of features, in tiles; 0 is no maximum."""
    if hf_config.get("model_type") != "llava_onevision":
        return 0
    value = hf_config.get("vision_aspect_ratio", "anyres_max_9")
    match = re.fullmatch(r"anyres_max_([1-9]\d*)", str(value))
    if not match:
        raise ConfigError(
            f"config.json: vision_aspect_ratio={value!r} is not supported here, only anyres_max_N"
        )
    return int(match[1])
