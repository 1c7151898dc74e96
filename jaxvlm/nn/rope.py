"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.config import RopeScaling


class Rope(NamedTuple):
    """Cosines and sines of each token's rotation, computed once and used by every layer."""

    cos: jax.Array
    """f32[B, T, H/2]."""
    sin: jax.Array
    """f32[B, T, H/2]."""


_UNSCALED = RopeScaling()


def rope(
    positions: jax.Array,
    head_dim: int,
    theta: float,
    scaling: RopeScaling = _UNSCALED,
    sections: tuple[int, ...] = (),
    interleaved: bool = False,
) -> Rope:
    """Compute the rotation of each token.

    Args:
        positions: i32[B, R, T]; R = 1, or the number of sections.
        head_dim: H, even.
        theta: base of the wavelengths.
        scaling: RoPE scaling of the wavelengths, for longer contexts.
        sections: how many of the H/2 wavelengths use each row of positions; () is one row.
        interleaved: wavelengths use the rows alternately (0 1 2 0 1 2 …) up to the length of a
            section, and the remaining ones use row 0; else sections are consecutive.

    Raises:
        ValueError: the number of rows of positions does not match the sections.

    Source: RoFormer, arXiv 2104.09864, eq. 15; sections: Qwen2-VL, arXiv 2409.12191, and
        Qwen3-VL, arXiv 2511.21631.
    """
    rows = positions.shape[1]
    if rows not in (1, max(1, len(sections))):
        raise ValueError(
            f"positions have {rows} rows; this decoder takes 1"
            + (f" or {len(sections)}" if sections else "")
        )
    if rows > 1:
        row = section_rows(head_dim // 2, sections, interleaved)
        place = jnp.swapaxes(positions[:, row], 1, 2)  # [B, T, H/2]
    else:
        place = positions[:, 0, :, None]
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angle = place.astype(jnp.float32) * SCALINGS[scaling.kind](theta, exponent, scaling, positions)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling.magnitude != 1.0:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return Rope(cos, sin)


def section_rows(count: int, sections: tuple[int, ...], interleaved: bool) -> np.ndarray:
    """Return i64[count], the row of positions that each wavelength uses; see :func:`rope`."""
    if not interleaved:
        return np.repeat(np.arange(len(sections)), sections)
    row = np.zeros(count, np.int64)
    for i in range(1, len(sections)):
        row[i : len(sections) * sections[i] : len(sections)] = i
    return row


def _default(theta: float, exponent: jax.Array, _: RopeScaling, __: jax.Array) -> jax.Array:
    return theta**-exponent


def _linear(theta: float, exponent: jax.Array, to: RopeScaling, _: jax.Array) -> jax.Array:
    return theta**-exponent / to.factor


def _dynamic(theta: float, exponent: jax.Array, to: RopeScaling, positions: jax.Array) -> jax.Array:
    """Increase the base once the longest sequence is longer than the training context."""
    head_dim = 2 * exponent.shape[0]
    longest = jnp.maximum(jnp.max(positions) + 1, to.original_length).astype(jnp.float32)
    growth = to.factor * longest / to.original_length - (to.factor - 1)
    return (theta * growth ** (head_dim / (head_dim - 2))) ** -exponent


def _llama3(theta: float, exponent: jax.Array, to: RopeScaling, _: jax.Array) -> jax.Array:
    """Stretch long wavelengths, keep short ones, and interpolate between the two.

    Source: Llama 3.1's reference code, ``apply_scaling``.
    """
    frequency = theta**-exponent
    turns = to.original_length * frequency / (2 * math.pi)
    unscaled = (turns - to.low_factor) / (to.high_factor - to.low_factor)
    unscaled = jnp.clip(unscaled, 0.0, 1.0)
    return frequency * (unscaled + (1 - unscaled) / to.factor)


def _yarn(theta: float, exponent: jax.Array, to: RopeScaling, _: jax.Array) -> jax.Array:
    """Interpolate as llama3 does, between dims that rotate ``beta_fast`` and ``beta_slow`` times.

    Source: YaRN, arXiv 2309.00071, section 3.2.
    """
    head_dim = 2 * exponent.shape[0]

    def dim_of(turns: float) -> float:
        wavelength = to.original_length / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dim_of(to.beta_fast), dim_of(to.beta_slow)
    if to.whole_dims:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # no division by zero where the borders meet
    stretched = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1).astype(np.float32)
    return theta**-exponent * (stretched / to.factor + (1 - stretched))


SCALINGS: dict[str, Callable[[float, jax.Array, RopeScaling, jax.Array], jax.Array]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Kind -> function (base, exponents f32[H/2], scaling, positions i32[B, R, T]) -> frequencies
f32[H/2]."""


def rotate(x: jax.Array, rotation: Rope) -> jax.Array:
    """Rotate queries or keys, in Hugging Face's ``rotate_half`` layout of the head dim.

    Args:
        x: [B, T, N, H].
        rotation: for the same B, T and H.

    Returns:
        [B, T, N, H] in ``x``'s dtype; computed in float32.
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
