"""LLaVA's any-resolution images: a downscaled image, then tiles whose features form one grid.

The image is scaled to a canvas of rows x columns of tiles, with padding on two sides. Rows and
columns of features that are padding are left out, and a learned newline token ends each row
(LLaVA-NeXT; the maximum of features is LLaVA-OneVision's, arXiv 2408.03326). All of it is index
arithmetic: a span says which features its tokens hold.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from jaxvlm.types import NEWLINE, Sources, Span


def unpadded(
    width: int, height: int, rows: int, columns: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the part of a canvas that is not padding.

    Args:
        width: width of the image.
        height: height of the image.
        rows: rows of features in the canvas.
        columns: columns of features in the canvas.

    Returns:
        (first row, last row + 1) and (first column, last column + 1).
    """
    if width / height > columns / rows:
        inner = int(round(height * (columns / width), 7))
        pad = (rows - inner) // 2
        return (pad, rows - pad), (0, columns)
    inner = int(round(width * (rows / height), 7))
    pad = (columns - inner) // 2
    return (0, rows), (pad, columns - pad)


def whole(image_id: int, side: int, pooled: int = 0) -> Span:
    """Return the span of an image of one tile, with a newline at its end."""
    return span(image_id, side, (0, 0), (0, 0), (0, 0), pooled=pooled)


@functools.lru_cache(maxsize=1024)
def span(
    image_id: int,
    side: int,
    tiles: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    most: int = 0,
    pooled: int = 0,
) -> Span:
    """Return the span of an image: features of the downscaled image, then of its tiles by rows.

    Args:
        image_id: token id at the positions of features.
        side: patches along a side of a tile.
        tiles: (rows, columns) of tiles; (0, 0) is the downscaled image only, with one newline.
        rows: (first, last + 1) row of features that is not padding.
        columns: (first, last + 1) column of features that is not padding.
        most: approximate maximum of features, in tiles; more are interpolated to fewer. 0: none.
        pooled: features of a tile after those of its patches, which images have no use for.
    """
    whole, per_tile = np.arange(side * side)[:, None], side * side + pooled
    if tiles == (0, 0):
        return _with_sources(image_id, per_tile, 1, np.concatenate([whole, [[NEWLINE]]]))
    y, x = np.mgrid[rows[0] : rows[1], columns[0] : columns[1]]
    tile = 1 + y // side * tiles[1] + x // side
    grid = tile * per_tile + y % side * side + x % side
    ratio = math.sqrt(grid.size / (most * side**2)) if most else 0.0
    if ratio > 1.1:
        size = int(grid.shape[0] // ratio), int(grid.shape[1] // ratio)
        index, weight = bilinear(grid, size)
    else:
        index, weight = grid[..., None], None
    count = 1 + math.prod(tiles)
    end = np.full((len(index), 1, index.shape[2]), NEWLINE)
    index = np.concatenate([index, end], axis=1).reshape(-1, index.shape[2])
    if weight is None:
        return _with_sources(image_id, per_tile, count, np.concatenate([whole, index]))
    weight = np.pad(weight, ((0, 0), (0, 1), (0, 0))).reshape(index.shape)
    first = np.pad(np.ones_like(whole, np.float32), ((0, 0), (0, 3)))
    index = np.concatenate([np.repeat(whole, 4, axis=1), index])
    return _with_sources(image_id, per_tile, count, index, np.concatenate([first, weight]))


def _with_sources(
    image_id: int, per_tile: int, tiles: int, feature: np.ndarray, weight: np.ndarray | None = None
) -> Span:
    """Return a span in which every token is a feature or a newline."""
    share = None if weight is None else weight.astype(np.float32)
    sources = Sources(feature.astype(np.int32), share, tiles, per_tile)
    return Span.of(image_id, len(feature))._replace(sources=sources)


def bilinear(grid: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Compute ``F.interpolate(mode="bilinear", align_corners=False)`` of a grid of features.

    Args:
        grid: i64[H, W], indices of features.
        size: (H', W').

    Returns:
        i64[H', W', 4] and f64[H', W', 4]: indices and weights of the features in each sum.
    """
    (y0, y1, down), (x0, x1, right) = (_axis(n, m) for n, m in zip(grid.shape, size, strict=True))
    corners = [grid[np.ix_(y, x)] for y in (y0, y1) for x in (x0, x1)]
    shares = [np.outer(v, h) for v in (1 - down, down) for h in (1 - right, right)]
    return np.stack(corners, axis=-1), np.stack(shares, axis=-1)


def _axis(length: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return both neighbours of each new index, and the weight of the second."""
    at = np.maximum((np.arange(new) + 0.5) * (length / new) - 0.5, 0.0)
    first = at.astype(np.int64)
    return first, np.minimum(first + 1, length - 1), at - first
