"""Loads the images of prompts, and collates them into a batch."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from jaxvlm.data.conversations.collate import Places, collate_inputs
from jaxvlm.data.conversations.packing import bucket
from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.image_inputs import ImageInput, ImageInputs
from jaxvlm.data.images import image_files
from jaxvlm.inference.visual_tokens import VisualTokens
from jaxvlm.types import Span

ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray
"""An image: a file, a PIL image, or u8[H, W, 3]."""

_ONE = (str, os.PathLike, Image.Image, np.ndarray)


class LoadedImage(NamedTuple):
    """An image of a prompt."""

    tiles: list[ImageInput]
    span: Span
    """Of its tokens."""


def listed(images: ImageLike | Sequence[ImageLike]) -> list[ImageLike]:
    """Return one image, or several, as a list."""
    return [images] if isinstance(images, _ONE) else list(images)


def name_of(image: ImageLike) -> str | int:
    """What an image is known by: its file, or which object it is."""
    return str(image) if isinstance(image, (str, os.PathLike)) else id(image)


def load_images(
    images: Sequence[Sequence[ImageLike]],
    image_format: image_files.ImageFormat,
    max_pixels: int,
    cache: VisualTokens | None = None,
) -> list[list[LoadedImage]]:
    """Load each prompt's images; an image of several prompts is loaded once.

    Args:
        images: of each prompt.
        image_format: how the model takes images.
        max_pixels: maximum number of pixels of an image file.
        cache: has visual tokens of images, whose files are then not decoded.

    Raises:
        DataError: an image can't be read.
    """
    found: dict[str | int, LoadedImage] = {}
    for image in (image for of_prompt in images for image in of_prompt):
        if name_of(image) not in found:
            found[name_of(image)] = _load(image, image_format, max_pixels, cache)
    return [[found[name_of(image)] for image in of_prompt] for of_prompt in images]


def _load(
    image: ImageLike,
    image_format: image_files.ImageFormat,
    max_pixels: int,
    cache: VisualTokens | None,
) -> LoadedImage:
    is_file = isinstance(image, (str, os.PathLike))
    if isinstance(image, (str, os.PathLike)) and not os.fspath(image):
        raise DataError("an image's file name is empty")
    images: image_files.ImageCache = image_files.ImageCache(image_format.prepare, max_pixels, 0)
    try:
        if isinstance(image, (str, os.PathLike)):
            span = image_format.of_file(str(image))
        else:
            span = image_format.of_size(*_upright(image).size)
            images = _OpenImage(image, image_format.prepare)
        inputs = ImageInputs([str(image) if is_file else ""], [span], images, image_format.patching)
        inputs.lookup = cache.lookup if cache else None
        return LoadedImage(inputs.get(0, use_cached=cache is not None), span)
    except ImageError as error:
        raise DataError(f"{image if is_file else 'an image'}: {error}") from None


class _OpenImage(image_files.ImageCache):
    """Stands for the file of an image that is in memory."""

    def __init__(self, image: Image.Image | np.ndarray, prepare: image_files.Preparation):
        super().__init__(prepare, 0, 0)
        pixels = prepare.convert(_upright(image))
        # Other bytes than a file's are hashed, so the person keeps the two kinds of keys apart.
        digest = hashlib.blake2b(pixels.tobytes(), digest_size=16, person=b"pixels")
        digest.update(repr(pixels.shape).encode())
        self._decoded = image_files.Decoded(pixels, digest.digest())

    def get(self, path: str) -> image_files.Decoded:
        return self._decoded

    def digest(self, path: str) -> bytes:
        return self._decoded.digest


def load_pixels(image: ImageLike, prepare: image_files.Preparation, max_pixels: int) -> np.ndarray:
    """Load and preprocess an image.

    Args:
        image: a file, a PIL image, or u8[H, W, 3].
        prepare: preprocessing of the model.
        max_pixels: maximum number of pixels of an image file.

    Returns:
        u8[H, W, 3], or u8[tiles, H, W, 3] where ``prepare`` splits images into tiles.

    Raises:
        DataError: the image can't be read or converted.
    """
    is_file = isinstance(image, (str, os.PathLike))
    try:
        if isinstance(image, (str, os.PathLike)):
            return image_files.load(str(image), prepare, max_pixels)
        return prepare.convert(_upright(image))
    except ImageError as error:
        raise DataError(f"{image if is_file else 'an image'}: {error}") from None


def _upright(image: Image.Image | np.ndarray) -> Image.Image:
    try:
        opened = Image.fromarray(image) if isinstance(image, np.ndarray) else image
        upright = ImageOps.exif_transpose(opened)
    except (AttributeError, TypeError, ValueError) as error:
        what = "not an image: give a file, a PIL image or u8[H, W, 3]"
        raise ImageError(f"{what} ({error})") from None
    if 0 in upright.size:
        raise ImageError("it has no pixels")
    return upright


def collate_tiles(
    tiles: Sequence[Sequence[ImageInput]],
    image_format: image_files.ImageFormat,
    shape: tuple[int, int],
    cache: VisualTokens | None = None,
) -> dict[str, np.ndarray]:
    """Collate the tiles of each prompt into the batch's fields.

    Args:
        tiles: of each prompt.
        image_format: how the model takes images.
        shape: (B, I).
        cache: of the tiles that come as tokens.
    """
    row = np.repeat(np.arange(len(tiles)), [len(t) for t in tiles])
    slot = np.concatenate([np.arange(len(t)) for t in tiles])
    flat = [tile for of_prompt in tiles for tile in of_prompt]
    patching, most = image_format.patching, 0
    if patching is not None:
        counts = [sum(_patches(x, image_format) for x in found) for found in tiles]
        most = bucket(max(counts), patching.padded_count(1))
    cached = (cache.shape, cache.tokens) if cache else None
    places = Places(row, slot)
    return collate_inputs(flat, places, shape, image_format.size, patching, most, cached)


def _patches(tile: ImageInput, image_format: image_files.ImageFormat) -> int:
    """The number of patches of an image of any size."""
    assert image_format.patching is not None
    grid = tile.grid if tile.pixels is None else image_format.patching.grid(tile.pixels)
    assert grid is not None
    return math.prod(grid)
