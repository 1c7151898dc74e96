"""The order in which the cells of a (h, w) grid lie in a row: a tag, and the ways between tags.

Permutations are static: they are made by numpy, once a grid. What they are applied to may be a
JAX array. The orders of blocks are those of :class:`jaxvlm.data.patches.Patching` and of
:func:`jaxvlm.models.grid.places`, which count in them without a table; a test holds the three
together.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from jaxvlm.types import Array


class Order(NamedTuple):
    """An order of the cells of a grid, as a tag."""

    block: int
    """m: blocks of m x m cells, block by block and cell by cell row-major; 0: Morton's order."""

    @property
    def code(self) -> int:
        """The tag in 16 bits."""
        return self.block

    def __str__(self) -> str:
        return _NAMES.get(self.block, f"tiled({self.block})")


_NAMES = {0: "morton", 1: "row_major", 2: "merge2x2"}
MORTON = Order(0)
"""Z-order: cells by the bits of (row, column) taken in turns; of those that the grid has."""
ROW_MAJOR = Order(1)
"""Row by row."""
MERGE2X2 = Order(2)
"""Qwen2-VL's: the four patches that its merger joins follow each other."""


def tiled(block: int) -> Order:
    """Blocks of ``block`` x ``block`` cells, both row-major; 1 is ROW_MAJOR, 2 is MERGE2X2.

    Raises:
        ValueError: ``block`` has no place in 16 bits.
    """
    if not 1 <= block < 2**16:
        raise ValueError(f"tiled({block}): blocks have 1 to {2**16 - 1} cells a side")
    return Order(block)


def parse(name: str) -> Order:
    """The inverse of ``str(order)``.

    Raises:
        ValueError: a name that is none.
    """
    for block, known in _NAMES.items():
        if name == known:
            return Order(block)
    if found := re.fullmatch(r"tiled\((\d+)\)", name):
        return tiled(int(found[1]))
    raise ValueError(f"{name!r} is no order; known: {', '.join(_NAMES.values())}, tiled(m)")


def permutation(order: Order, height: int, width: int) -> Int32[np.ndarray, " cells"]:
    """Which cell lies at each place.

    Args:
        order: of the places.
        height: cells.
        width: cells.

    Returns:
        i32[height * width]: row-major numbers of cells.

    Raises:
        ValueError: sides that the order's blocks do not divide.
    """
    cells = np.arange(height * width, dtype=np.int32)
    if order == MORTON:
        # The order of the square of a power of two around the grid, without what is outside.
        return cells[np.argsort(morton_code(*np.divmod(cells.astype(np.int64), width)))]
    m = order.block
    if height % m or width % m:
        raise ValueError(
            f"{order} takes sides that are multiples of {m}, not {height} x {width}; pad the grid "
            "or take morton, which takes any"
        )
    return cells.reshape(height // m, m, width // m, m).transpose(0, 2, 1, 3).reshape(-1)


def inverse(order: Order, height: int, width: int) -> Int32[np.ndarray, " cells"]:
    """i32[height * width]: the place of each cell; arguments as of :func:`permutation`."""
    places = np.empty(height * width, np.int32)
    places[permutation(order, height, width)] = np.arange(height * width, dtype=np.int32)
    return places


def convert(tokens: Array, source: Order, target: Order, height: int, width: int) -> Any:
    """The tokens of a grid in another order: one gather, none where it is the same.

    Args:
        tokens: [..., height * width, D].
        source: how they lie.
        target: how they are to lie.
        height: of the grid.
        width: of the grid.

    Returns:
        [..., height * width, D].

    Raises:
        ValueError: another number of tokens, or sides that one of the orders does not take.
    """
    _check_count(tokens, height, width)
    index = inverse(source, height, width)[permutation(target, height, width)]
    return tokens if source == target else tokens[..., index, :]


def pool(tokens: Array, height: int, width: int, levels: int) -> Any:
    """Means of aligned 2^levels x 2^levels blocks of tokens in Morton order; a reshape.

    The codes of such a block's cells are 4^levels numbers in a row, so its cells follow each other
    wherever none is missing. They do for all blocks exactly where 2^levels divides both sides;
    these need not be equal, nor powers of two.

    Args:
        tokens: [..., height * width, D], in Morton order.
        height: of the grid.
        width: of the grid.
        levels: 0 leaves the tokens as they are.

    Returns:
        [..., height * width / 4^levels, D]: the coarser grid's tokens, in its Morton order.

    Raises:
        ValueError: another number of tokens, or a side that 2^levels does not divide.
    """
    _check_count(tokens, height, width)
    side = 2**levels
    if height % side or width % side:
        raise ValueError(
            f"{levels} levels pool blocks of {side} x {side}, which do not fill {height} x {width}"
        )
    *lead, count, width_of_token = tokens.shape
    return tokens.reshape(*lead, count // side**2, side**2, width_of_token).mean(-2)


def morton_code(
    row: Int64[np.ndarray, " cells"], column: Int64[np.ndarray, " cells"]
) -> Int64[np.ndarray, " cells"]:
    """i64: the bits of ``column`` at even places, those of ``row`` at odd ones.

    Source: G. M. Morton, A Computer Oriented Geodetic Data Base, IBM, 1966.
    """
    return _spread(column) | _spread(row) << 1


def _spread(x: np.ndarray) -> np.ndarray:
    """Bit i of x moves to place 2 i, for numbers below 2^31: halves are moved apart, five times."""
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
        raise ValueError(f"{tokens.shape[-2]} tokens are no grid of {height} x {width}")
