"""Rows, columns and images of packed patches, by integer arithmetic on patch indices.

A packed sequence of patches holds images of any size one after another, and a video's frames one
after another. All shapes are static; ``grid`` alone says which patch belongs to which image.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.nn.rope import Rope


class Places(NamedTuple):
    """Frame, image, row and column of each patch. Padding comes after the last image."""

    segment: jax.Array
    """i32[B, P]: a distinct number for each frame of each image, from 1; 0 is padding."""
    image: jax.Array
    """i32[B, P]: number of the image, from 1; 0 is padding."""
    row: jax.Array
    """i32[B, P]: row of the patch in its frame."""
    column: jax.Array
    """i32[B, P]: column of the patch in its frame."""
    height: jax.Array
    """i32[B, P]: height of the frame in patches; at least 1."""
    width: jax.Array
    """i32[B, P]: width of the frame in patches; at least 1."""


def places(grid: jax.Array, num_patches: int, block: int = 1) -> Places:
    """Compute frame, image, row and column of each patch.

    Args:
        grid: i32[B, I, 3] (t, h, w) in patches; zeros in unused slots.
        num_patches: P.
        block: a frame's patches are in blocks of ``block`` x ``block``, blocks in row-major order
            and patches in row-major order within each; 1 is row-major. It divides h and w.
    """
    count = jnp.prod(grid, axis=-1)
    end = jnp.cumsum(count, axis=-1)
    index = jnp.arange(num_patches, dtype=jnp.int32)
    before = index[None, :, None] >= end[:, None, :]  # the image ends before this patch
    image = jnp.minimum(jnp.sum(before, axis=-1), grid.shape[1] - 1)

    def of_patch(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, image, axis=1)

    height, width = (jnp.maximum(of_patch(grid[..., i]), 1) for i in (1, 2))
    inside = index - of_patch(end - count)
    within = inside % (height * width)
    block_of, rest = within // block**2, within % block**2
    blocks_wide = jnp.maximum(width // block, 1)
    row = block_of // blocks_wide * block + rest // block
    column = block_of % blocks_wide * block + rest % block
    # The index of a frame's first patch identifies the frame.
    real = index < end[:, -1:]
    segment = jnp.where(real, index - within + 1, 0)
    return Places(segment, jnp.where(real, image + 1, 0), row, column, height, width)


def token_index(grid: jax.Array, start: jax.Array, num_tokens: int, block: int) -> jax.Array:
    """Compute the index in the decoder's sequence of each visual token of packed images.

    Args:
        grid: i32[B, I, 3] (t, h, w) in patches.
        start: i32[B, I]: sequence index of an image's first token.
        num_tokens: Q, visual tokens per sequence, padding included; each is a merge of ``block`` x
            ``block`` patches.
        block: see :func:`places`.

    Returns:
        i32[B, Q], all distinct; padding has indices past every sequence.
    """
    image = places(grid, num_tokens * block**2).image[:, :: block**2]
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    count = jnp.prod(grid, axis=-1) // block**2
    # An image's tokens are consecutive in both sequences, so one offset per image maps them.
    offset = start - (jnp.cumsum(count, axis=-1) - count)
    distance = jnp.take_along_axis(offset, jnp.maximum(image - 1, 0), axis=1)
    return jnp.where(image > 0, index + distance, _PAST + index)


_PAST = 2**30  # longer than any sequence


def windows(at: Places, side: int) -> jax.Array:
    """Number the attention windows: squares of ``side`` patches of a frame, cut at its borders.

    Args:
        at: result of :func:`places`.
        side: side of a window in patches.

    Returns:
        i32[B, P], a segment id per window; 0 is padding.
    """
    wide = -(-at.width // side)
    inside = at.row // side * wide + at.column // side
    # A frame has at least as many patches as windows, so no number is used twice.
    return jnp.where(at.segment > 0, at.segment + inside, 0)


def window_order(at: Places, side: int) -> jax.Array:
    """i32[B, P]: an order of the patches by frames, by windows in them, with padding last.

    Args:
        at: result of :func:`places`.
        side: as for :func:`windows`.
    """
    near = windows(at, side)
    return jnp.argsort(jnp.where(near > 0, near, jnp.iinfo(near.dtype).max), axis=1, stable=True)


def rope2d(at: Places, head_dim: int, theta: float) -> Rope:
    """Compute 2-D RoPE: half of the wavelengths use a patch's row, half its column.

    Args:
        at: result of :func:`places`.
        head_dim: H, a multiple of 4.
        theta: base of the wavelengths.

    Source: Qwen2-VL, arXiv 2409.12191, section 2.1.
    """
    exponent = jnp.arange(0, head_dim // 2, 2, dtype=jnp.float32) / (head_dim // 2)
    place = jnp.stack([at.row, at.column], axis=-1).astype(jnp.float32)
    angle = (place[..., None] * theta**-exponent).reshape(*at.row.shape, head_dim // 2)
    return Rope(jnp.cos(angle), jnp.sin(angle))


def resample(table: jax.Array, at: Places, how: str) -> jax.Array:
    """Interpolate a square table of position embeddings to each image's grid.

    One matmul with interpolation weights over the whole table: its gradient has no scatter-add, and
    it costs less than a hundredth of a ViT of 24 layers.

    Args:
        table: [S * S, D], in row-major order.
        at: result of :func:`places`.
        how: ``corners`` (bilinear with aligned corners) or ``antialias`` (bilinear between centres,
            averaged over the area of a patch where the image's grid is smaller than the table).

    Returns:
        f32[B, P, D].
    """
    side = int(table.shape[0] ** 0.5)
    axis = AXES[how]
    rows, columns = axis(at.row, at.height, side), axis(at.column, at.width, side)
    weight = (rows[..., :, None] * columns[..., None, :]).reshape(*rows.shape[:2], side * side)
    return weight @ table.astype(jnp.float32)


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
"""Name -> interpolation weights f32[B, P, S] from (index i32[B, P], size i32[B, P], S), along one
direction."""
