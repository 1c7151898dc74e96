"""Where the packed patches of a row lie: integer arithmetic on patch indices.

A row holds pictures of any size one after another, a video's frames one after another within
it. Every shape is static; which patch belongs to which picture follows from ``grid`` alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.nn.rope import Rope


class Places(NamedTuple):
    """The place of each patch. Padding behind the last picture has segment 0."""

    segment: jax.Array
    """i32[B, P]: a number of its own for each frame of each picture, from 1."""
    picture: jax.Array
    """i32[B, P]: a number for each picture, from 1; 0 is padding."""
    row: jax.Array
    """i32[B, P]: of the patch in its frame."""
    column: jax.Array
    """i32[B, P]."""
    height: jax.Array
    """i32[B, P]: patches that the frame is high; at least 1."""
    width: jax.Array
    """i32[B, P]."""


def places(grid: jax.Array, num_patches: int, block: int = 1) -> Places:
    """The place of each patch.

    Args:
        grid: i32[B, I, 3] (t, h, w) in patches; zeros where there is no picture.
        num_patches: P.
        block: a frame's patches come in blocks of ``block`` x ``block``, blocks row by row,
            each row by row; 1 is plain rows. It divides h and w.
    """
    count = jnp.prod(grid, axis=-1)
    end = jnp.cumsum(count, axis=-1)
    index = jnp.arange(num_patches, dtype=jnp.int32)
    before = index[None, :, None] >= end[:, None, :]  # the picture ends before this patch
    picture = jnp.minimum(jnp.sum(before, axis=-1), grid.shape[1] - 1)

    def of_patch(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, picture, axis=1)

    height, width = (jnp.maximum(of_patch(grid[..., i]), 1) for i in (1, 2))
    inside = index - of_patch(end - count)
    within = inside % (height * width)
    block_of, rest = within // block**2, within % block**2
    blocks_wide = jnp.maximum(width // block, 1)
    row = block_of // blocks_wide * block + rest // block
    column = block_of % blocks_wide * block + rest % block
    # The index of a frame's first patch tells it from all others.
    real = index < end[:, -1:]
    segment = jnp.where(real, index - within + 1, 0)
    return Places(segment, jnp.where(real, picture + 1, 0), row, column, height, width)


def token_index(grid: jax.Array, start: jax.Array, num_tokens: int, block: int) -> jax.Array:
    """Where in a decoder's row the visual tokens of packed pictures go.

    Args:
        grid: i32[B, I, 3] (t, h, w) in patches.
        start: i32[B, I]: place of a picture's first token.
        num_tokens: Q: tokens of a row, padding and all; one of ``block`` x ``block`` patches.
        block: see :func:`places`.

    Returns:
        i32[B, Q]: each its own; those of padding lie past every row.
    """
    picture = places(grid, num_tokens * block**2).picture[:, :: block**2]
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    count = jnp.prod(grid, axis=-1) // block**2
    # A picture's tokens follow each other in both: they differ by one distance.
    distance = jnp.take_along_axis(
        start - (jnp.cumsum(count, axis=-1) - count), jnp.maximum(picture - 1, 0), axis=1
    )
    return jnp.where(picture > 0, index + distance, _PAST + index)


_PAST = 2**30  # no row is as long


def windows(at: Places, side: int) -> jax.Array:
    """i32[B, P]: segments that part each frame into squares of ``side`` patches, cut at its end.

    Args:
        at: of :func:`places`.
        side: patches.
    """
    wide = -(-at.width // side)
    inside = at.row // side * wide + at.column // side
    # A frame has at least as many patches as windows, so no number is used twice.
    return jnp.where(at.segment > 0, at.segment + inside, 0)


def rope2d(at: Places, head_dim: int, theta: float) -> Rope:
    """Half of the wavelengths turn with a patch's row, half with its column.

    Args:
        at: of :func:`places`.
        head_dim: H, a multiple of 4.
        theta: base of the wavelengths.

    Source: Qwen2-VL, arXiv 2409.12191, section 2.1.
    """
    exponent = jnp.arange(0, head_dim // 2, 2, dtype=jnp.float32) / (head_dim // 2)
    place = jnp.stack([at.row, at.column], axis=-1).astype(jnp.float32)
    angle = (place[..., None] * theta**-exponent).reshape(*at.row.shape, head_dim // 2)
    return Rope(jnp.cos(angle), jnp.sin(angle))


def resample(table: jax.Array, at: Places, how: str) -> jax.Array:
    """A square table of positions, stretched over each picture's grid.

    One matmul with the weights of all the table's places: its gradient has no scatter-add, and
    it costs a ViT of 24 layers less than a hundredth.

    Args:
        table: [S * S, D], row by row.
        at: of :func:`places`.
        how: ``corners`` (bilinear; the corners of table and picture meet) or ``antialias``
            (bilinear between centres, over all that a patch covers where the picture is smaller).

    Returns:
        [B, P, D] of ``table``'s dtype.
    """
    side = int(table.shape[0] ** 0.5)
    axis = AXES[how]
    rows, columns = axis(at.row, at.height, side), axis(at.column, at.width, side)
    weight = (rows[..., :, None] * columns[..., None, :]).reshape(*rows.shape[:2], side * side)
    return weight.astype(table.dtype) @ table


def _corners(index: jax.Array, size: jax.Array, side: int) -> jax.Array:
    """f32[B, P, S]: torch's ``F.interpolate(mode="bilinear", align_corners=True)``."""
    at = index.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1)
    return _hat(at[..., None] - jnp.arange(side))


def _antialias(index: jax.Array, size: jax.Array, side: int) -> jax.Array:
    """f32[B, P, S]: torch's ``F.interpolate(mode="bilinear", antialias=True)``."""
    scale = side / size.astype(jnp.float32)
    centre = scale * (index + 0.5)
    reach = jnp.maximum(scale, 1.0)[..., None]
    weight = _hat((jnp.arange(side) + 0.5 - centre[..., None]) / reach)
    return weight / jnp.sum(weight, axis=-1, keepdims=True)


def _hat(x: jax.Array) -> jax.Array:
    return jnp.maximum(0.0, 1.0 - jnp.abs(x))


AXES = {"corners": _corners, "antialias": _antialias}
"""Name -> weights of (index i32[B, P], size i32[B, P], S) along one axis."""
