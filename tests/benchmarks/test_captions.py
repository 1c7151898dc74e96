"""Captions that are held out are of nothing that training has."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from benchmarks.captions import Captioned, groups, key, split


def image(seed):
    """8 x 8 blocks of any colour."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    return np.kron(pixels, np.ones((8, 8, 1), np.uint8))


def png(pixels):
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def test_a_caption_is_of_whom_it_shows_the_same():
    assert key("man running") == key("Woman running facing right") == "running"
    assert (
        key("family: man, woman, boy") == key("family") and key("woman: white hair") == "white hair"
    )
    assert key("adult") == key("man") == "person"


def test_what_is_alike_is_on_one_side():
    darker = (image(0) * 0.8).astype(np.uint8)
    seen = [image(0), darker, image(1), image(2), *(image(n) for n in range(9, 89))]
    names = ["a hat", "a cap", "man singing", "woman singing", *(f"thing {n}" for n in range(80))]
    found = [Captioned(str(i), name, png(x)) for i, (name, x) in enumerate(zip(names, seen))]
    of = groups(found)
    assert of[0] == of[1] and of[2] == of[3] and len(set(of)) == len(of) - 2
    parts = split(found)
    assert parts[0] == parts[1] and parts[2] == parts[3]
    assert 3 < parts.count("test") < 30
    # What else there is changes nobody's side.
    assert split(found[::2])[2:] == parts[4::2]
