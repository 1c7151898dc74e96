"""Images that look like another one, and images of one colour, for `jaxvlm data check`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, UInt64
from PIL import Image

from jaxvlm.data.errors import DataError
from jaxvlm.data.images import image_files

BITS = 64
"""Bits of an image's perceptual hash."""
MAX_DISTANCE = 16
"""The largest distance that is asked for: images without anything in common differ in 32 bits."""


class Look(NamedTuple):
    """What images look like."""

    one_colour: Bool[np.ndarray, " images"]
    """Whether all pixels are equal."""
    hash: UInt64[np.ndarray, " images"]
    """Perceptual hash: the signs of the lowest frequencies of the grey image."""


class Alike(NamedTuple):
    """An image and the earlier one that it looks like most."""

    image: int
    first: int
    distance: int
    """Bits in which their hashes differ."""


def look_at(paths: Sequence[str], max_pixels: int) -> Look:
    """Decode images, and say what they look like.

    Args:
        paths: images that can be decoded.
        max_pixels: maximum of width times height.

    Raises:
        DataError: ImageHash is not installed.
    """
    hash_of = _imported()
    plain: list[bool] = []
    hashes: list[int] = []

    def note(image: Image.Image) -> np.ndarray:
        coloured = image_files.rgb(image)
        extrema: Any = coloured.getextrema()
        plain.append(all(low == high for low, high in extrema))
        hashes.append(hash_of(coloured))
        return np.zeros((1, 1, 3), np.uint8)

    for path in paths:
        image_files.load(path, image_files.Preparation(note, "look"), max_pixels)
    return Look(np.asarray(plain, bool), np.asarray(hashes, np.uint64))


def _imported() -> Callable[[Image.Image], int]:
    try:
        import imagehash
    except ImportError:
        raise DataError(
            "--look_alikes needs ImageHash: pip install 'jaxvlm[check]', or leave it out"
        ) from None

    def number(image: Image.Image) -> int:
        return int(str(imagehash.phash(image)), 16)

    return number


def alike(hashes: UInt64[np.ndarray, " n"], distance: int) -> list[Alike]:
    """Find for each image the earlier one whose hash is nearest, if it is near enough.

    Hashes that differ in at most d of 64 bits are equal in one of d + 1 parts of their bits, so
    only those that share a part are compared.

    Args:
        hashes: of images in their order.
        distance: bits in which two hashes may differ, at most ``MAX_DISTANCE``.
    """
    edges = np.linspace(0, BITS, distance + 2).round().astype(int)
    best = np.full(len(hashes), distance + 1)
    first = np.full(len(hashes), -1)
    for low, high in itertools.pairwise(edges.tolist()):
        part = (hashes >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
        order = np.argsort(part, kind="stable")
        ends = np.flatnonzero(np.diff(part[order])) + 1
        for group in np.split(order, ends):
            for k in range(1, len(group)):
                before, own = group[:k], group[k]
                bits = np.bitwise_count(hashes[before] ^ hashes[own])
                nearest = int(np.argmin(bits))  # of equal ones the first
                found = int(bits[nearest]), int(before[nearest])
                if found[0] <= distance and found < (best[own], first[own] % len(hashes)):
                    best[own], first[own] = found
    near = np.flatnonzero(first >= 0).tolist()
    return [Alike(i, int(first[i]), int(best[i])) for i in near]
