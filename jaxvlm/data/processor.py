"""Pictures prepared the way a Hugging Face checkpoint wants them, by transformers' own code.

The processor does what it does up to whole-number pixels; scaling and normalising are the
model's. So a batch holds a byte a value, and what is normalised is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jaxvlm.data import tiling
from jaxvlm.data.errors import DataError
from jaxvlm.data.images import Preparation, rgb
from jaxvlm.types import TileGrid

FILE = "preprocessor_config.json"


class Processor(NamedTuple):
    """How a checkpoint wants its pictures."""

    prepare: Preparation
    size: int
    """Pixels a side of a tile."""
    grid: TileGrid | None
    """The tiles of a picture; ``None`` where none is cut."""
    mean: tuple[float, float, float]
    """Of pixels in 0..1, red green blue."""
    std: tuple[float, float, float]


def load(folder: str | os.PathLike[str]) -> Processor:
    """The processor of a checkpoint's folder.

    Args:
        folder: holds ``preprocessor_config.json``.

    Raises:
        DataError: the file is missing or damaged, transformers knows no such processor, or it
            does what jaxvlm would not.
    """
    path = pathlib.Path(folder) / FILE
    if not path.is_file():
        raise DataError(f"{path} is missing; pictures can't be prepared without it")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        made = _make(folder)
    except (ValueError, OSError, ImportError, TypeError) as error:
        raise DataError(f"{path}: {' '.join(str(error).split())}") from None
    for name in ("do_rescale", "do_normalize"):
        if not getattr(made, name, False):
            raise DataError(f"{path}: {name}=False is not supported")
    if abs(255 * float(made.rescale_factor) - 1) > 1e-6:
        raise DataError(
            f"{path}: rescale_factor={made.rescale_factor} is not supported, only 1/255"
        )

    given = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    given |= tiling.asked(made)
    cut = tiling.grid(made)

    def convert(image: Image.Image) -> np.ndarray:
        # As theirs does where its file asks for it, but 16 bits are scaled, where Pillow clips.
        pixels = np.asarray(made(rgb(image), **given)["pixel_values"])
        pixels = pixels.reshape(-1, *pixels.shape[-3:])  # some say whose tiles they are, some don't
        rows, columns = cut(*image.size) if cut else (0, 0)
        if len(pixels) != rows * columns + 1:
            raise ValueError(f"{len(pixels)} tiles where {rows} x {columns} and one are due")
        return np.ascontiguousarray(np.moveaxis(pixels, 1, -1))

    probe = convert(Image.new("RGB", (40, 30)))
    if probe.dtype != np.uint8 or probe.shape[1] != probe.shape[2]:
        raise DataError(f"{path}: {type(made).__name__} gives {probe.dtype}{list(probe.shape)}")
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8)
    return Processor(
        Preparation(convert, f"{type(made).__name__}|{digest.hexdigest()}"),
        probe.shape[1],
        cut,
        _rgb(made.image_mean),
        _rgb(made.image_std),
    )


def _rgb(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _make(folder: str | os.PathLike[str]) -> Any:
    # Slow to import; and without torch it says at length that there is none.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)
