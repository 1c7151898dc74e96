"""How transformers' image processors cut a picture in tiles, from its size alone.

Spans of tokens are known before any picture is decoded; what is decoded must then agree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxvlm.data import resize
from jaxvlm.types import TileGrid

_LONGEST = 4096
"""Pixels to which Idefics3's processors bound a picture's longer side."""


def asked(made: Any) -> dict[str, Any]:
    """What transformers' whole processor asks of its image processor, against the latter's file.

    Args:
        made: the image processor.
    """
    kind = _kind(made)
    if kind == "GotOcr2ImageProcessor":  # InternVL's; its files say crop_to_patches=false
        return {"crop_to_patches": True}
    if kind == "Gemma3ImageProcessor":  # its files leave them out
        # Where pan and scan is asked for in the file, it is done.
        return {name: getattr(made, name) or value for name, value in _PAN_AND_SCAN.items()}
    return {}


_PAN_AND_SCAN: dict[str, Any] = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def grid(made: Any) -> TileGrid | None:
    """The tiles of a processor's pictures; ``None`` where it cuts none.

    Args:
        made: the image processor.
    """
    find = _GRIDS.get(_kind(made))
    return None if find is None else find(made)


def blocks(side: int, bounds: tuple[int, int]) -> TileGrid:
    """The blocks of patches of a picture of any size, as Qwen2-VL's processor cuts it.

    Args:
        side: pixels of a block.
        bounds: least and most pixels of a picture.
    """

    def find(width: int, height: int) -> tuple[int, int]:
        wide, high = resize.fit(width, height, side, *bounds)
        return high // side, wide // side

    return find


def _kind(made: Any) -> str:
    return type(made).__name__.removesuffix("Pil").removesuffix("Fast")


def _idefics3(made: Any) -> TileGrid | None:
    if not made.do_image_splitting:
        return None
    longest, tile = made.size["longest_edge"], made.max_image_size["longest_edge"]

    def find(width: int, height: int) -> tuple[int, int]:
        if made.do_resize:
            width, height = _long_side(width, height, longest)
            width, height = max(1, width + width % 2), max(1, height + height % 2)
            if max(width, height) > _LONGEST:
                width, height = _long_side(width, height, _LONGEST)
        # As there, in floating point: the long side goes up to whole tiles, then the other one.
        longer = -(-max(width, height) // tile) * tile
        width, height = _long_side(max(1, width), max(1, height), longer)
        rows, columns = -(-height // tile), -(-width // tile)
        return (0, 0) if rows <= 1 and columns <= 1 else (rows, columns)

    return find


def _long_side(width: int, height: int, length: int) -> tuple[int, int]:
    """(width, height) with the longer one made ``length``."""
    ratio = width / height
    return (length, int(length / ratio)) if width >= height else (int(length * ratio), length)


def _internvl(made: Any) -> TileGrid | None:
    least, most, tile = made.min_patches, made.max_patches, made.size
    if most <= 1:
        return None
    canvas = sys.modules[type(made).__module__].get_optimal_tiled_canvas

    def find(width: int, height: int) -> tuple[int, int]:
        columns, rows = canvas((height, width), (tile["height"], tile["width"]), least, most)
        return (0, 0) if rows * columns == 1 else (rows, columns)

    return find


def _gemma3(made: Any) -> TileGrid | None:
    given = asked(made)
    if not given.pop("do_pan_and_scan"):
        return None

    def find(width: int, height: int) -> tuple[int, int]:
        blank = np.broadcast_to(np.uint8(0), (3, height, width))  # takes no memory
        crops = len(made.pan_and_scan(blank, **given))
        return (int(crops > 0), crops) if width >= height else (crops, int(crops > 0))

    return find


def _anyres(made: Any) -> TileGrid:
    from transformers.image_processing_utils import select_best_resolution

    tile = made.crop_size or made.size
    side = tile["height"] if "height" in tile else tile["shortest_edge"]

    def find(width: int, height: int) -> tuple[int, int]:
        high, wide = select_best_resolution((height, width), made.image_grid_pinpoints)
        return high // side, wide // side

    return find


_GRIDS: dict[str, Callable[[Any], TileGrid | None]] = {
    "Idefics3ImageProcessor": _idefics3,
    "SmolVLMImageProcessor": _idefics3,
    "GotOcr2ImageProcessor": _internvl,
    "Gemma3ImageProcessor": _gemma3,
    "LlavaNextImageProcessor": _anyres,
    "LlavaOnevisionImageProcessor": _anyres,
}
