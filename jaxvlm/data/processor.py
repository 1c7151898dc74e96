"""Pictures prepared the way a Hugging Face checkpoint wants them, by transformers' own code.

The processor does what it does up to whole-number pixels; scaling and normalising are the
model's. So a batch holds a byte a value, and what is normalised is the same. Where it gives
patches, they are put together again to the picture that they were cut of: a mirrored or cached
picture is one of pixels, whatever the model makes of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jaxvlm.data import tiling
from jaxvlm.data.errors import DataError
from jaxvlm.data.images import Pixels, Preparation, rgb
from jaxvlm.data.patches import Patching
from jaxvlm.types import TileGrid

FILE = "preprocessor_config.json"
# Pictures are RGB before theirs sees them, as it makes them where its file asks for it; but 16 bits
# are scaled, where Pillow clips.
_RAW = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


class Processor(NamedTuple):
    """How a checkpoint wants its pictures."""

    prepare: Preparation
    size: int
    """Pixels a side of a tile; 0 where pictures keep their shape."""
    grid: TileGrid | None
    """How a picture of a size is cut; ``None`` where none is."""
    mean: tuple[float, float, float]
    """Of pixels in 0..1, red green blue."""
    std: tuple[float, float, float]
    patching: Patching | None = None
    """How a picture of any size is cut; ``None`` where all have one size."""
    bounds: tuple[int, int] = (0, 0)
    """Least and most pixels of a prepared picture; (0, 0) where nothing asks for them."""
    most_patches: int = 0
    """Of a picture, at most, where the processor bounds them so; 0 where it doesn't."""


def load(folder: str | os.PathLike[str], bounds: tuple[int, int] = (0, 0)) -> Processor:
    """The processor of a checkpoint's folder.

    Args:
        folder: holds ``preprocessor_config.json``, or ``processor_config.json`` with an
            ``image_processor`` in it.
        bounds: least and most pixels that a picture of any size is given; 0 is what the file
            says.

    Raises:
        DataError: the file is missing or damaged, transformers knows no such processor, or it
            does what jaxvlm would not.
    """
    path = pathlib.Path(folder) / FILE
    whole = path.with_name("processor_config.json")  # transformers 5 writes all parts into one
    path = path if path.is_file() or not whole.is_file() else whole
    if not path.is_file():
        raise DataError(f"{path} is missing; pictures can't be prepared without it")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings = settings.get("image_processor", settings)
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

    name, kind = type(made).__name__, made.model_input_names
    text, patching, used = json.dumps(settings, sort_keys=True), None, (0, 0)
    grid = tiling.grid(made)
    if "image_grid_thw" in kind:
        frames = made.temporal_patch_size
        patching = Patching(made.patch_size, made.merge_size, frames, "cthw")
        used = _bounds(made, bounds, path)
        grid = tiling.blocks(patching.side, used)
        convert = _of_blocks(made, patching._replace(frames=1), used)
    elif "spatial_shapes" in kind:
        patching = Patching(made.patch_size, 1, 1, "hwc")
        convert = _of_rows(made, patching)
    else:
        convert = _of_tiles(made, grid)
    if any(bounds) and not any(used):
        raise DataError(f"{path}: {name} takes no data.picture_pixels={bounds}; leave it out")
    if patching and not made.do_resize:
        raise DataError(f"{path}: do_resize=False is not supported")

    probe = convert(Image.fromarray(np.arange(3600, dtype=np.uint16).view("u1").reshape(40, 60, 3)))
    fits = patching or probe.shape[-2] == probe.shape[-3]
    if probe.dtype != np.uint8 or not fits:
        raise DataError(f"{path}: {name} gives {probe.dtype}{list(probe.shape)}")
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return Processor(
        Preparation(convert, f"{name}|{digest}" + (f"|{used}" if any(bounds) else "")),
        0 if patching else probe.shape[-2],
        grid,
        _rgb(made.image_mean),
        _rgb(made.image_std),
        patching,
        used,
        int(getattr(made, "max_num_patches", 0)),
    )


def write_bounds(folder: pathlib.Path, wanted: tuple[int, int]) -> None:
    """Let a folder's processor scale pictures as ``data.picture_pixels`` says.

    Args:
        folder: with a processor of pictures of any size.
        wanted: least and most pixels; 0: as the file says.
    """
    path, whole = folder / FILE, folder / "processor_config.json"
    for file in (path, whole):
        if file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            settings = content.get("image_processor", content)
            size = settings.get("size") or {}
            for mine, key, old in zip(
                wanted, ("shortest_edge", "longest_edge"), ("min_pixels", "max_pixels"), strict=True
            ):
                says = settings.pop(old, None)  # the older name, which would win
                size[key] = mine or says or size.get(key)
            settings["size"] = size
            file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _of_tiles(made: Any, grid: TileGrid | None) -> Callable[[Image.Image], Pixels]:
    """Processors that give [tiles, 3, H, W], all of one size."""
    asked = tiling.asked(made)

    def convert(image: Image.Image) -> Pixels:
        pixels = np.asarray(made(rgb(image), **_RAW, **asked)["pixel_values"])
        pixels = pixels.reshape(-1, *pixels.shape[-3:])  # some say whose tiles they are, some don't
        rows, columns = grid(*image.size) if grid else (0, 0)
        if len(pixels) != rows * columns + 1:
            raise ValueError(f"{len(pixels)} tiles where {rows} x {columns} and one are due")
        return np.ascontiguousarray(np.moveaxis(pixels, 1, -1))

    return convert


def _of_blocks(
    made: Any, patching: Patching, bounds: tuple[int, int]
) -> Callable[[Image.Image], Pixels]:
    """Processors that give [P, patch_dim] and a grid, as Qwen2-VL's."""
    size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}

    def convert(image: Image.Image) -> Pixels:
        given = {"size": size, "temporal_patch_size": patching.frames}
        found = made(rgb(image), **_RAW, **given)
        _, rows, columns = found["image_grid_thw"][0].tolist()
        return _whole(patching.join(found["pixel_values"], rows, columns))

    return convert


def _of_rows(made: Any, patching: Patching) -> Callable[[Image.Image], Pixels]:
    """Processors that give [1, P, patch_dim], padded, and a shape, as SigLIP 2's."""

    def convert(image: Image.Image) -> Pixels:
        found = made(rgb(image), **_RAW)
        rows, columns = np.asarray(found["spatial_shapes"])[0].tolist()
        patches = found["pixel_values"][0][: rows * columns]
        return _whole(patching.join(patches, rows, columns))

    return convert


def _whole(pixels: np.ndarray) -> np.ndarray:
    """Values that are whole numbers as bytes; others as they are, to be refused."""
    exact = pixels.astype(np.uint8)
    return exact if np.array_equal(exact, pixels) else pixels


def _bounds(made: Any, wanted: tuple[int, int], path: pathlib.Path) -> tuple[int, int]:
    """(least, most) pixels, as the recipe says or else the file."""
    try:
        says = made.size["shortest_edge"], made.size["longest_edge"]
    except KeyError:
        says = (None, None)
    least, most = (mine or theirs for mine, theirs in zip(wanted, says, strict=True))
    if not least or not most:
        raise DataError(f"{path}: size says no shortest_edge and longest_edge, in pixels")
    if least > most:
        raise DataError(f"data.picture_pixels={wanted}: pictures of {least} to {most} pixels")
    return int(least), int(most)


def _rgb(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _make(folder: str | os.PathLike[str]) -> Any:
    # Slow to import; and without torch it says at length that there is none.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)
