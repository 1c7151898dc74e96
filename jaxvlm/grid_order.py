"""Orders of the cells of a (h, w) grid in a sequence, and the permutations between orders.

Permutations are static: numpy computes them once per grid. The arrays that they are applied to may
be JAX arrays. Block orders are those of :class:`jaxvlm.data.images.patches.Patching` and of
:func:`jaxvlm.models.grid.places`, which count in them without a table; a test checks that the three
agree.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from jaxvlm.types import Array


class Order(NamedTuple):
    """Order of the cells of a grid, as a number."""

    block: int
    """m: blocks of m x m cells, blocks in row-major order and cells in row-major order within
    each; 0: Morton order."""

    @property
    def code(self) -> int:
        """The order as a 16-bit number."""
        return self.block

    def __str__(self) -> str:
        return _NAMES.get(self.block, f"tiled({self.block})")


_NAMES = {0: "morton", 1: "row_major", 2: "merge2x2"}
MORTON = Order(0)
"""Z-order: cells sorted by the interleaved bits of (row, column)."""
ROW_MAJOR = Order(1)
"""Row by row."""
MERGE2X2 = Order(2)
"""Qwen2-VL's order: the four patches that its merger joins are consecutive."""


def tiled(block: int) -> Order:
    """Return the order of blocks of ``block`` x ``block`` cells; 1 is ROW_MAJOR, 2 is MERGE2X2.

    Raises:
        ValueError: ``block`` does not fit in 16 bits.
    """
    if not 1 <= block < 2**16:
        raise ValueError(f"tiled({block}): blocks have 1 to {2**16 - 1} cells per side")
    return Order(block)


def parse(name: str) -> Order:
    """Parse the name of an order; the inverse of ``str(order)``.

    Raises:
        ValueError: the name of no order.
    """
    for block, known in _NAMES.items():
        if name == known:
            return Order(block)
    if match := re.fullmatch(r"tiled\((\d+)\)", name):
        return tiled(int(match[1]))
    raise ValueError(f"{name!r} is no order; known: {', '.join(_NAMES.values())}, tiled(m)")


def permutation(order: Order, height: int, width: int) -> Int32[np.ndarray, " cells"]:
    """Return the cells of a grid in an order.

    Args:
        order: the order.
        height: rows of the grid.
        width: columns of the grid.

    Returns:
        i32[height * width]: row-major cell numbers.

    Raises:
        ValueError: the order's blocks do not divide the grid's sides.
    """
    cells = np.arange(height * width, dtype=np.int32)
    if order == MORTON:
        # Morton order of an enclosing power-of-two square, without the cells outside the grid.
        return cells[np.argsort(morton_code(*np.divmod(cells.astype(np.int64), width)))]
    m = order.block
    if height % m or width % m:
        raise ValueError(
            f"{order} takes grids whose sides are multiples of {m}, not {height} x {width}; pad "
            "the grid or use morton, which takes any sides"
        )
    return cells.reshape(height // m, m, width // m, m).transpose(0, 2, 1, 3).reshape(-1)


def inverse(order: Order, height: int, width: int) -> Int32[np.ndarray, " cells"]:
    """Return the index of each cell in an order, i32[height * width]; inverts `permutation`."""
    places = np.empty(height * width, np.int32)
    places[permutation(order, height, width)] = np.arange(height * width, dtype=np.int32)
    return places


def convert(tokens: Array, source: Order, target: Order, height: int, width: int) -> Any:
    """Convert the tokens of a grid from one order to another, with at most one gather.

    Args:
        tokens: [..., height * width, D].
        source: order of ``tokens``.
        target: order of the result.
        height: rows of the grid.
        width: columns of the grid.

    Returns:
        [..., height * width, D].

    Raises:
        ValueError: the number of tokens is not height * width, or an order does not take the sides.
    """
    _check_count(tokens, height, width)
    index = inverse(source, height, width)[permutation(target, height, width)]
    return tokens if source == target else tokens[..., index, :]


def pool(tokens: Array, height: int, width: int, levels: int) -> Any:
    """Average aligned 2^levels x 2^levels blocks of tokens in Morton order, by a reshape.

    The Morton codes of such a block are 4^levels consecutive numbers, so its cells are consecutive
    unless the grid lacks some of them. All blocks are complete exactly if 2^levels divides both
    sides, which need not be equal or powers of two.

    Args:
        tokens: [..., height * width, D], in Morton order.
        height: rows of the grid.
        width: columns of the grid.
        levels: 0 returns the tokens unchanged.

    Returns:
        [..., height * width / 4^levels, D]: the coarser grid's tokens, in its Morton order.

    Raises:
        ValueError: the number of tokens is not height * width, or 2^levels does not divide a side.
    """
    _check_count(tokens, height, width)
    side = 2**levels
    if height % side or width % side:
        raise ValueError(
            f"pooling by {levels} levels averages blocks of {side} x {side}, which do not fill a "
            f"grid of {height} x {width}"
        )
    *lead, count, width_of_token = tokens.shape
    return tokens.reshape(*lead, count // side**2, side**2, width_of_token).mean(-2)


def morton_code(
    row: Int64[np.ndarray, " cells"], column: Int64[np.ndarray, " cells"]
) -> Int64[np.ndarray, " cells"]:
    """Interleave bits to Morton codes, i64: ``column`` at even bits, ``row`` at odd ones.

    Source: G. M. Morton, A Computer Oriented Geodetic Data Base, IBM, 1966.
    """
    return _spread(column) | _spread(row) << 1


def _spread(x: np.ndarray) -> np.ndarray:
    """Move bit i to bit 2 i, for numbers below 2^31, in five steps."""
    for shift, mask in _MASKS:
        x = (x | x << shift) & mask
    return x


_MASKS = (
    (16, 0x0000FFFF0000FFFF),
    (8, 0x00FF00FF00FF00FF),
    (4, 0x0F0F0F0F0F0F0F0F),
    (2, 0x3333333333333333),
    (1, 0x5555555555555555),
)


def _check_count(tokens: Array, height: int, width: int) -> None:
    if tokens.shape[-2] != height * width:
        raise ValueError(f"{tokens.shape[-2]} tokens do not fill a grid of {height} x {width}")
