"""Compute how transformers' image processors cut an image into tiles, from its size alone.

Token spans are computed before any image is decoded; decoded tiles must then agree with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxvlm.data.images import resize
from jaxvlm.types import TileGrid

_LONGEST = 4096
"""Maximum length in pixels of an image's longer side in Idefics3's processors."""


def processor_overrides(processor: Any) -> dict[str, Any]:
    """Arguments that transformers' multimodal processor passes to its image processor.

    They override the image processor's own file.

    Args:
        processor: image processor of transformers.
    """
    name = _class_name(processor)
    if name == "GotOcr2ImageProcessor":  # InternVL's; its files say crop_to_patches=false
        return {"crop_to_patches": True}
    if name == "Gemma3ImageProcessor":  # its files leave them out
        # Pan and scan is applied if the file enables it.
        return {name: getattr(processor, name) or value for name, value in _PAN_AND_SCAN.items()}
    return {}


_PAN_AND_SCAN: dict[str, Any] = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def grid(processor: Any) -> TileGrid | None:
    """Return the tile grid of a processor's images; ``None`` if it does not cut images.

    Args:
        processor: image processor of transformers.
    """
    make_grid = _GRIDS.get(_class_name(processor))
    return None if make_grid is None else make_grid(processor)


def blocks(side: int, bounds: tuple[int, int]) -> TileGrid:
    """Return the grid of patch blocks of images of any size, as in Qwen2-VL's processor.

    Args:
        side: height and width of a block in pixels.
        bounds: minimum and maximum number of pixels of an image.
    """

    def tile_grid(width: int, height: int) -> tuple[int, int]:
        wide, high = resize.fit(width, height, side, *bounds)
        return high // side, wide // side

    return tile_grid


def _class_name(processor: Any) -> str:
    return type(processor).__name__.removesuffix("Pil").removesuffix("Fast")


def _idefics3(processor: Any) -> TileGrid | None:
    if not processor.do_image_splitting:
        return None
    longest, tile = processor.size["longest_edge"], processor.max_image_size["longest_edge"]

    def tile_grid(width: int, height: int) -> tuple[int, int]:
        if processor.do_resize:
            width, height = _long_side(width, height, longest)
            width, height = max(1, width + width % 2), max(1, height + height % 2)
            if max(width, height) > _LONGEST:
                width, height = _long_side(width, height, _LONGEST)
        # In floating point as in transformers: round the longer side up to complete tiles, then
        # the other one.
        longer = -(-max(width, height) // tile) * tile
        width, height = _long_side(max(1, width), max(1, height), longer)
        rows, columns = -(-height // tile), -(-width // tile)
        return (0, 0) if rows <= 1 and columns <= 1 else (rows, columns)

    return tile_grid


def _long_side(width: int, height: int, length: int) -> tuple[int, int]:
    """Scale (width, height) so that the longer one is ``length``."""
    ratio = width / height
    return (length, int(length / ratio)) if width >= height else (int(length * ratio), length)


def _internvl(processor: Any) -> TileGrid | None:
    least, most, tile = processor.min_patches, processor.max_patches, processor.size
    if most <= 1:
        return None
    canvas = sys.modules[type(processor).__module__].get_optimal_tiled_canvas

    def tile_grid(width: int, height: int) -> tuple[int, int]:
        columns, rows = canvas((height, width), (tile["height"], tile["width"]), least, most)
        return (0, 0) if rows * columns == 1 else (rows, columns)

    return tile_grid


def _gemma3(processor: Any) -> TileGrid | None:
    overrides = processor_overrides(processor)
    if not overrides.pop("do_pan_and_scan"):
        return None

    def tile_grid(width: int, height: int) -> tuple[int, int]:
        blank = np.broadcast_to(np.uint8(0), (3, height, width))  # takes no memory
        crops = len(processor.pan_and_scan(blank, **overrides))
        return (int(crops > 0), crops) if width >= height else (crops, int(crops > 0))

    return tile_grid


def _anyres(processor: Any) -> TileGrid:
    from transformers.image_processing_utils import select_best_resolution

    tile = processor.crop_size or processor.size
    side = tile["height"] if "height" in tile else tile["shortest_edge"]

    def tile_grid(width: int, height: int) -> tuple[int, int]:
        high, wide = select_best_resolution((height, width), processor.image_grid_pinpoints)
        return high // side, wide // side

    return tile_grid


_GRIDS: dict[str, Callable[[Any], TileGrid | None]] = {
    "Idefics3ImageProcessor": _idefics3,
    "SmolVLMImageProcessor": _idefics3,
    "GotOcr2ImageProcessor": _internvl,
    "Gemma3ImageProcessor": _gemma3,
    "LlavaNextImageProcessor": _anyres,
    "LlavaOnevisionImageProcessor": _anyres,
}
