"""Pictures prepared the way a Hugging Face checkpoint wants them, by transformers' own code.

The processor does what it does up to whole-number pixels; scaling and normalising are the
model's. So a batch holds a byte a value, and what is normalised is the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jaxvlm.data.errors import DataError
from jaxvlm.data.images import Preparation

FILE = "preprocessor_config.json"


class Processor(NamedTuple):
    """How a checkpoint wants its pictures."""

    prepare: Preparation
    size: int
    """Pixels a side; 0 where pictures keep their shape."""
    mean: tuple[float, float, float]
    """Of pixels in 0..1, red green blue."""
    std: tuple[float, float, float]
    patches: int = 0
    """Of a picture that keeps its shape, at most."""


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

    patches = int(getattr(made, "max_num_patches", 0))  # SigLIP 2's

    def convert(image: Image.Image) -> np.ndarray:
        given = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
        out = made(image, **given)
        pixels = np.asarray(out["pixel_values"][0])
        if patches:
            return _joined(pixels, *map(int, out["spatial_shapes"][0]))
        return np.ascontiguousarray(np.moveaxis(pixels, 0, -1))

    probe = convert(Image.new("RGB", (40, 30)))
    square = probe.ndim == 3 and (probe.shape[0] == probe.shape[1] or patches)
    if probe.dtype != np.uint8 or not square:
        raise DataError(f"{path}: {type(made).__name__} gives {probe.dtype}{list(probe.shape)}")
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8)
    return Processor(
        Preparation(convert, f"{type(made).__name__}|{digest.hexdigest()}"),
        0 if patches else probe.shape[0],
        _rgb(made.image_mean),
        _rgb(made.image_std),
        patches,
    )


def _joined(patches: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """[H, W, 3] of the patches of a picture, [P, side * side * 3] and perhaps padding."""
    side = math.isqrt(patches.shape[1] // 3)
    grid = patches[: rows * columns].reshape(rows, columns, side, side, 3)
    return np.ascontiguousarray(grid.swapaxes(1, 2).reshape(rows * side, columns * side, 3))


def _rgb(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _make(folder: str | os.PathLike[str]) -> Any:
    # Slow to import; and without torch it says at length that there is none.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)
