"""Fifty images of odd sizes, modes and file formats, written to a folder."""

from __future__ import annotations

import io
import pathlib

import numpy as np
from PIL import Image

SIZES = [(37, 23), (24, 24), (1, 19), (50, 3), (20, 61), (97, 96), (25, 24), (23, 1), (120, 9)]


def _noise(size, channels):
    rng = np.random.default_rng([*size, channels])
    shape = (size[1], size[0], channels) if channels > 1 else (size[1], size[0])
    return rng.integers(0, 256, shape, np.uint8)


def _palette(size, transparent):
    image = Image.fromarray(_noise(size, 3)).quantize(9)
    if transparent:
        image.info["transparency"] = 4
    return image


def _grey16(size):
    return Image.fromarray(_noise(size, 1).astype(np.uint16) * 257)


KINDS = {
    "rgb.png": lambda size: Image.fromarray(_noise(size, 3)),
    "rgb.jpg": lambda size: Image.fromarray(_noise(size, 3)),
    "grey.png": lambda size: Image.fromarray(_noise(size, 1)),
    "grey.jpg": lambda size: Image.fromarray(_noise(size, 1)),
    "grey_alpha.png": lambda size: Image.fromarray(_noise(size, 2)),
    "alpha.png": lambda size: Image.fromarray(_noise(size, 4)),
    "alpha.webp": lambda size: Image.fromarray(_noise(size, 4)),
    "palette.png": lambda size: _palette(size, False),
    "palette_hole.png": lambda size: _palette(size, True),
    "palette.gif": lambda size: _palette(size, True),
    "bits.png": lambda size: Image.fromarray(_noise(size, 1) > 127),
    "grey16.png": _grey16,
    "cmyk.jpg": lambda size: Image.fromarray(_noise(size, 4), mode="CMYK"),
    "cmyk.tiff": lambda size: Image.fromarray(_noise(size, 4), mode="CMYK"),
    "rgb.bmp": lambda size: Image.fromarray(_noise(size, 3)),
    "turned.jpg": lambda size: Image.fromarray(_noise(size, 3)),
    "turned.png": lambda size: Image.fromarray(_noise(size, 4)),
}


def write(folder: pathlib.Path) -> list[str]:
    """Paths, each kind with some sizes; ``turned`` ones with all eight orientations."""
    paths = []
    for i in range(50):
        name = list(KINDS)[i % len(KINDS)]
        image = KINDS[name](SIZES[(i + i // len(KINDS)) % len(SIZES)])
        given = {}
        if name.startswith("turned"):
            exif = Image.Exif()
            exif[0x0112] = 2 + i % 7
            given["exif"] = exif
        if "transparency" in image.info:
            given["transparency"] = image.info["transparency"]
        data = io.BytesIO()
        suffix = name.rsplit(".", 1)[1]
        image.save(data, {"jpg": "jpeg"}.get(suffix, suffix), **given)
        path = folder / f"{i}_{name}"
        path.write_bytes(data.getvalue())
        paths.append(str(path))
    return paths
