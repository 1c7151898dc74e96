"""Preprocess images as a Hugging Face checkpoint requires, with transformers' own code.

The image processor runs up to integer pixels; rescaling and normalization happen in the model.
So a batch holds one byte per value, and the normalized values are the same. If the processor
returns patches, they are joined to an image again: augmentation and caching work on images of
pixels, whatever the model's patch layout.
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

from jaxvlm.config import json_text
from jaxvlm.config.merge import write_json
from jaxvlm.data.errors import DataError
from jaxvlm.data.images import tiling
from jaxvlm.data.images.image_files import RGB, Pixels, Preparation, rgb
from jaxvlm.data.images.patches import Patching
from jaxvlm.types import TileGrid

FILE = "preprocessor_config.json"
# Images are converted to RGB before transformers' processor, as it does if its file asks for it;
# but 16-bit values are scaled, where Pillow clips them.
_RAW = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


class Processor(NamedTuple):
    """Image preprocessing of a checkpoint."""

    prepare: Preparation
    size: int
    """Height and width of a tile in pixels; 0 if images keep their shape."""
    grid: TileGrid | None
    """Tile grid of an image by its size; ``None`` if images are not cut into tiles."""
    mean: tuple[float, float, float]
    """Mean of pixels in 0..1, red green blue, for normalization."""
    std: tuple[float, float, float]
    """Standard deviation of pixels in 0..1, red green blue, for normalization."""
    patching: Patching | None = None
    """How images of any size are cut into patches; ``None`` if all have the same size."""
    bounds: tuple[int, int] = (0, 0)
    """Minimum and maximum pixels of a preprocessed image; (0, 0) if images have no such bounds."""
    max_patches: int = 0
    """Maximum number of patches of an image if the processor has such a limit; 0 if not."""


def load(folder: str | os.PathLike[str], bounds: tuple[int, int] = (0, 0)) -> Processor:
    """Load the image processor of a checkpoint's folder.

    Args:
        folder: holds ``preprocessor_config.json``, or ``processor_config.json`` with an
            ``image_processor`` in it.
        bounds: minimum and maximum pixels that an image of any size is resized to; 0 takes the
            file's value.

    Raises:
        DataError: the file is missing or damaged, transformers knows no such processor, or it
            uses an option that jaxvlm does not support.
    """
    path = pathlib.Path(folder) / FILE
    combined = path.with_name("processor_config.json")  # transformers 5 writes all parts into one
    path = path if path.is_file() or not combined.is_file() else combined
    if not path.is_file():
        raise DataError(f"{path} is missing; images can't be prepared without it")
    try:
        return _load(folder, path, bounds)
    except DataError:
        raise
    except Exception as error:  # transformers' code raises all kinds where a value is wrong
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{path}: {text[:300]}") from None


def _load(folder: str | os.PathLike[str], path: pathlib.Path, bounds: tuple[int, int]) -> Processor:
    settings = json_text.read(path)
    settings = settings.get("image_processor", settings)
    _check_sides(settings, path)
    processor = _load_processor(folder)
    for name in ("do_rescale", "do_normalize"):
        if not getattr(processor, name, False):
            raise DataError(f"{path}: {name}=False is not supported; set it to true")
    if abs(255 * float(processor.rescale_factor) - 1) > 1e-6:
        raise DataError(
            f"{path}: rescale_factor={processor.rescale_factor} is not supported, only 1/255"
        )

    name, inputs = type(processor).__name__, processor.model_input_names
    text, patching, used = json.dumps(settings, sort_keys=True), None, (0, 0)
    grid = tiling.grid(processor)
    if "image_grid_thw" in inputs:
        frames = processor.temporal_patch_size
        patching = Patching(processor.patch_size, processor.merge_size, frames, "cthw")
        used = _bounds(processor, bounds, path)
        grid = tiling.blocks(patching.side, used)
        convert = _block_converter(processor, patching._replace(frames=1), used)
    elif "spatial_shapes" in inputs:
        patching = Patching(processor.patch_size, 1, 1, "hwc")
        convert = _patch_row_converter(processor, patching)
    else:
        convert = _tile_converter(processor, grid)
    if any(bounds) and not any(used):
        raise DataError(
            f"{path}: {name} does not support data.image_pixels_range={bounds}; leave it out"
        )
    if patching and not processor.do_resize:
        raise DataError(f"{path}: do_resize=False is not supported; set it to true")

    probe = convert(Image.fromarray(np.arange(3600, dtype=np.uint16).view("u1").reshape(40, 60, 3)))
    fits = patching or probe.shape[-2] == probe.shape[-3]
    if probe.dtype != np.uint8 or not fits:
        raise DataError(f"{path}: {name} gives {probe.dtype}{list(probe.shape)}")
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return Processor(
        Preparation(convert, f"{name}|{digest}|{RGB}" + (f"|{used}" if any(bounds) else "")),
        0 if patching else probe.shape[-2],
        grid,
        _rgb(processor.image_mean),
        _rgb(processor.image_std),
        patching,
        used,
        int(getattr(processor, "max_num_patches", 0)),
    )


_MAX_SIDE = 2**14
_SIZES = ("size", "crop_size", "patch_size", "merge_size", "temporal_patch_size")


def _check_sides(settings: dict[str, Any], path: pathlib.Path) -> None:
    """Refuse sizes that no image is resized to: an image of them would fill the memory."""
    for name in _SIZES:
        given = settings.get(name)
        sides = given if isinstance(given, dict) else {"": given}
        for key, side in sides.items():
            if side is None:
                continue
            most = _MAX_SIDE**2 if key.endswith("_edge") or "pixels" in key else _MAX_SIDE
            if type(side) is not int or not 0 < side <= most:
                raise DataError(
                    f"{path}: {'.'.join(filter(None, (name, key)))}={side!r} has to be a whole "
                    f"number from 1 to {most}"
                )


def write_bounds(folder: pathlib.Path, bounds: tuple[int, int]) -> None:
    """Write ``data.image_pixels_range`` into the processor file of a folder.

    Args:
        folder: folder with a processor of images of any size.
        bounds: minimum and maximum pixels; 0 leaves the file's value.
    """
    path, combined = folder / FILE, folder / "processor_config.json"
    for file in (path, combined):
        if file.is_file():
            content = json_text.read(file)
            settings = content.get("image_processor", content)
            size = settings.get("size") or {}
            for own, key, old in zip(
                bounds, ("shortest_edge", "longest_edge"), ("min_pixels", "max_pixels"), strict=True
            ):
                old_value = settings.pop(old, None)  # the older name would take precedence
                size[key] = own or old_value or size.get(key)
            settings["size"] = size
            write_json(file, content)


def _tile_converter(processor: Any, grid: TileGrid | None) -> Callable[[Image.Image], Pixels]:
    """Convert with a processor that returns [tiles, 3, H, W], all of the same size."""
    overrides = tiling.processor_overrides(processor)

    def convert(image: Image.Image) -> Pixels:
        pixels = np.asarray(processor(rgb(image), **_RAW, **overrides)["pixel_values"])
        # Some processors return a leading dim of images, others don't.
        pixels = pixels.reshape(-1, *pixels.shape[-3:])
        rows, columns = grid(*image.size) if grid else (0, 0)
        if len(pixels) != rows * columns + 1:
            raise ValueError(f"{len(pixels)} tiles instead of {rows} x {columns} and one")
        return np.ascontiguousarray(np.moveaxis(pixels, 1, -1))

    return convert


def _block_converter(
    processor: Any, patching: Patching, bounds: tuple[int, int]
) -> Callable[[Image.Image], Pixels]:
    """Convert with a processor that returns [P, patch_dim] and a grid, as Qwen2-VL's."""
    size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}

    def convert(image: Image.Image) -> Pixels:
        given = {"size": size, "temporal_patch_size": patching.frames}
        output = processor(rgb(image), **_RAW, **given)
        _, rows, columns = output["image_grid_thw"][0].tolist()
        return _to_bytes(patching.join(output["pixel_values"], rows, columns))

    return convert


def _patch_row_converter(processor: Any, patching: Patching) -> Callable[[Image.Image], Pixels]:
    """Convert with a processor that returns padded [1, P, patch_dim] and a shape, as SigLIP 2's."""

    def convert(image: Image.Image) -> Pixels:
        output = processor(rgb(image), **_RAW)
        rows, columns = np.asarray(output["spatial_shapes"])[0].tolist()
        patches = output["pixel_values"][0][: rows * columns]
        return _to_bytes(patching.join(patches, rows, columns))

    return convert


def _to_bytes(pixels: np.ndarray) -> np.ndarray:
    """Cast to bytes if that is exact; otherwise return the values as they are, to be refused."""
    exact = pixels.astype(np.uint8)
    return exact if np.array_equal(exact, pixels) else pixels


def _bounds(processor: Any, bounds: tuple[int, int], path: pathlib.Path) -> tuple[int, int]:
    """(minimum, maximum) pixels from the recipe, or else from the file."""
    try:
        of_file = processor.size["shortest_edge"], processor.size["longest_edge"]
    except KeyError:
        of_file = (None, None)
    least, most = (own or theirs for own, theirs in zip(bounds, of_file, strict=True))
    if not least or not most:
        raise DataError(
            f"{path}: size has no shortest_edge and longest_edge in pixels; set"
            " data.image_pixels_range"
        )
    if least > most:
        raise DataError(
            f"data.image_pixels_range={bounds}: the minimum of {least} pixels is over the maximum"
            f" of {most}; swap or change them"
        )
    return int(least), int(most)


def _rgb(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _load_processor(folder: str | os.PathLike[str]) -> Any:
    # Slow to import; without torch it prints a long advisory.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(
        str(folder), backend="pil", local_files_only=True, trust_remote_code=False
    )
