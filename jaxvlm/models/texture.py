"""Texture of a patch: thirteen hand-made channels computed from pixels, with no parameters.

Each channel is standardized over its own image and reads no other image, so that it can be cached
with the image's tokens, whatever else is in the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

NAMES = (
    *("red", "green", "blue"),
    *("lab_a", "lab_b"),  # green to red, blue to yellow: CIELAB (D65), without its lightness
    *("sobel_x", "sobel_y", "sobel_magnitude"),  # of lightness, averaged over the patch
    *("y", "x", "eccentricity"),  # of the patch's centre; its distance from the image's centre
    "contrast",  # standard deviation of lightness within the patch
    "surround",  # CIELAB distance from the mean of the 3 x 3 patches around it
)
CHANNELS = len(NAMES)
_EPS = 1e-6
_TO_XYZ = np.asarray(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
     [0.0193339, 0.1191920, 0.9503041]], np.float32
)  # fmt: skip
_WHITE = np.asarray([0.95047, 1.0, 1.08883], np.float32)


def texture(pixels: jax.Array, patch: int) -> jax.Array:
    """Compute the thirteen channels of each patch; see :data:`NAMES`.

    Args:
        pixels: values in 0..255, [B, H, W, 3]; an incomplete patch at the right or bottom is left
            out.
        patch: side of a patch in pixels.

    Returns:
        f32[B, P, 13], patches in row-major order; mean 0 and variance 1 (or 0) over each image.
    """
    rgb = pixels.astype(jnp.float32) / 255.0
    colour = lab(rgb) / 100.0
    light = colour[..., :1]
    x, y = _sobel(light[..., 0])
    edges = jnp.stack([x, y, jnp.hypot(x, y)], axis=-1)
    of_pixel = _cells(jnp.concatenate([rgb, colour[..., 1:], edges], axis=-1), patch)
    mean = jnp.mean(of_pixel, axis=3)
    lights = _cells(light, patch)[..., 0]
    contrast = jnp.std(lights, axis=3)
    centre = jnp.broadcast_to(_centres(*mean.shape[1:3]), (*mean.shape[:3], 3))
    surround = _surround(jnp.mean(_cells(colour, patch), axis=3))
    channels = jnp.concatenate([mean, centre, contrast[..., None], surround[..., None]], axis=-1)
    channels = channels.reshape(len(pixels), -1, CHANNELS)
    channels = channels - jnp.mean(channels, axis=1, keepdims=True)
    return channels * jax.lax.rsqrt(jnp.mean(jnp.square(channels), axis=1, keepdims=True) + _EPS)


def lab(rgb: jax.Array) -> jax.Array:
    """Convert sRGB in 0..1 to CIELAB under D65; f32[..., 3], lightness in 0..100.

    Source: IEC 61966-2-1 (sRGB); ISO/CIE 11664-4 (CIELAB).
    """
    linear = jnp.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = jnp.einsum("...c,dc->...d", linear, _TO_XYZ / _WHITE[:, None])
    low = (6 / 29) ** 3
    f = jnp.where(xyz > low, jnp.cbrt(jnp.maximum(xyz, low)), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
    x, y, z = f[..., 0], f[..., 1], f[..., 2]
    return jnp.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


def _sobel(light: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the Sobel gradients of [B, H, W] to the right and down, with edge padding."""
    p = jnp.pad(light, ((0, 0), (1, 1), (1, 1)), mode="edge")
    across = p[:, :, 2:] - p[:, :, :-2]
    along = p[:, 2:] - p[:, :-2]
    x = across[:, :-2] + 2 * across[:, 1:-1] + across[:, 2:]
    y = along[..., :-2] + 2 * along[..., 1:-1] + along[..., 2:]
    return x / 8, y / 8


def _cells(x: jax.Array, patch: int) -> jax.Array:
    """Cut [B, H, W, C] into patches [B, rows, columns, patch * patch, C]."""
    B, H, W, C = x.shape
    rows, columns = H // patch, W // patch
    x = x[:, : rows * patch, : columns * patch].reshape(B, rows, patch, columns, patch, C)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows, columns, patch * patch, C)


def _surround(colour: jax.Array) -> jax.Array:
    """Return the distance of each patch from its neighbourhood's mean, [B, rows, columns]."""
    rows, columns = colour.shape[1:3]
    p = jnp.pad(colour, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    near = sum(p[:, i : i + rows, j : j + columns] for i in range(3) for j in range(3))
    return jnp.sqrt(jnp.sum(jnp.square(colour - near / 9), axis=-1))


def _centres(rows: int, columns: int) -> np.ndarray:
    """Return f32[rows, columns, 3]: y and x of patch centres in -1..1, and the distance from 0."""
    y, x = np.meshgrid(*(2 * (np.arange(n) + 0.5) / n - 1 for n in (rows, columns)), indexing="ij")
    return np.stack([y, x, np.hypot(y, x)], axis=-1).astype(np.float32)
