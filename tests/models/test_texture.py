"""Texture of patches, against slow and independent implementations."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.models import texture as textures
from jaxvlm.models.texture import CHANNELS, NAMES, lab, texture

KNOWN = {  # sRGB -> CIELAB under D65, as published tables have it
    (255, 255, 255): (100.0, 0.0, 0.0),
    (0, 0, 0): (0.0, 0.0, 0.0),
    (255, 0, 0): (53.24, 80.09, 67.20),
    (0, 255, 0): (87.73, -86.18, 83.18),
    (0, 0, 255): (32.30, 79.19, -107.86),
    (128, 128, 128): (53.59, 0.0, 0.0),
    (10, 5, 20): (1.77, 3.70, -6.80),
}


def some_images(count=3, height=24, width=24, seed=0):
    """Smooth colours with noise and edges."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (count, height // 4, width // 4, 3))
    fine = rng.normal(size=(count, height, width, 3)) * rng.integers(0, 40, (count, 1, 1, 1))
    return np.clip(np.kron(coarse, np.ones((1, 4, 4, 1))) + fine, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("rgb", list(KNOWN)[:-1])
def test_lab_is_the_tables(rgb):
    made = lab(jnp.asarray(rgb, jnp.float32) / 255)
    np.testing.assert_allclose(made, KNOWN[rgb], atol=0.02)


def test_dark_colours_take_the_straight_piece():
    """Near black CIELAB is linear: lightness is 903.3 Y."""
    made = np.asarray(lab(jnp.asarray([2.0, 2.0, 2.0]) / 255))
    np.testing.assert_allclose(made[0], 24389 / 27 * (2 / 255 / 12.92), rtol=1e-3)


def slow(image, p):
    """[P, 13] before it is standardised, in loops."""
    height, width, _ = image.shape
    colour = np.asarray(lab(jnp.asarray(image, jnp.float32) / 255), np.float64) / 100
    light = colour[..., 0]

    def at(y, x):
        return light[min(max(y, 0), height - 1), min(max(x, 0), width - 1)]

    kernel = {(a, b): (2 - abs(a)) * b / 8 for a in (-1, 0, 1) for b in (-1, 0, 1)}
    gx, gy = np.zeros_like(light), np.zeros_like(light)
    for y in range(height):
        for x in range(width):
            gx[y, x] = sum(k * at(y + a, x + b) for (a, b), k in kernel.items())
            gy[y, x] = sum(k * at(y + b, x + a) for (a, b), k in kernel.items())
    rows, columns = height // p, width // p
    cell = {}
    for r in range(rows):
        for c in range(columns):
            cell[r, c] = np.s_[r * p : (r + 1) * p, c * p : (c + 1) * p]
    means = {where: colour[part].reshape(-1, 3).mean(0) for where, part in cell.items()}
    out = []
    for (r, c), part in cell.items():
        near = [
            means[min(max(r + a, 0), rows - 1), min(max(c + b, 0), columns - 1)]
            for a in (-1, 0, 1)
            for b in (-1, 0, 1)
        ]
        y, x = 2 * (r + 0.5) / rows - 1, 2 * (c + 0.5) / columns - 1
        edge = [gx[part].mean(), gy[part].mean(), np.sqrt(gx[part] ** 2 + gy[part] ** 2).mean()]
        out.append(
            [
                *(image[part].reshape(-1, 3).mean(0) / 255),
                *means[r, c][1:],
                *edge,
                *(y, x, math.hypot(y, x)),
                light[part].std(),
                np.linalg.norm(means[r, c] - np.mean(near, axis=0)),
            ]
        )
    return np.asarray(out)


@pytest.mark.parametrize("shape, patch", [((24, 24), 4), ((18, 27), 5)])
def test_channels_are_what_loops_make(shape, patch):
    images = some_images(2, 24, 28)[:, : shape[0], : shape[1]]
    made = np.asarray(texture(jnp.asarray(images), patch))
    assert made.shape == (2, (shape[0] // patch) * (shape[1] // patch), CHANNELS)
    assert CHANNELS == len(NAMES) == 13
    for image, got in zip(images, made):
        expected = slow(image, patch)
        expected = expected - expected.mean(0)
        expected /= np.sqrt((expected**2).mean(0) + textures._EPS)
        np.testing.assert_allclose(got, expected, atol=2e-3)


def test_an_image_has_its_own_texture_whoever_is_beside_it():
    images = some_images(4)
    together = np.asarray(texture(jnp.asarray(images), 4))
    other = np.concatenate([images[:1], some_images(3, seed=9)])
    beside_others = np.asarray(texture(jnp.asarray(other), 4))
    np.testing.assert_array_equal(together[0], beside_others[0])
    np.testing.assert_allclose(together.mean(1), 0, atol=1e-5)
    np.testing.assert_allclose((together**2).mean(1), 1, atol=2e-2)


def test_no_channel_is_a_copy_of_others():
    """Of none is more than nine tenths a linear function of the twelve others."""
    x = np.asarray(texture(jnp.asarray(some_images(64, seed=1)), 4), np.float64).reshape(-1, 13)
    for i, name in enumerate(NAMES):
        others = np.delete(x, i, axis=1)
        rest = x[:, i] - others @ np.linalg.lstsq(others, x[:, i], rcond=None)[0]
        assert (rest**2).mean() > 0.1 * (x[:, i] ** 2).mean() or name in NAMES[:5], name


def test_a_blank_image_has_no_texture_but_its_places():
    made = np.asarray(texture(jnp.full((1, 16, 16, 3), 77, jnp.uint8), 4))
    assert np.isfinite(made).all()
    places = [NAMES.index(name) for name in ("y", "x", "eccentricity")]
    assert np.abs(np.delete(made, places, axis=2)).max() < 1e-2
