"""Bytes of an array in TPU memory, which is tiled: incomplete tiles are padded.

Read from buffer assignments of libtpu 0.0.42 (v5e, v5p, v6e): of the last two dims in memory, the
very last is padded to 128 numbers and the one before it to 8 (32 for one-byte dtypes; 1, 2 or 4 if
it has no more). The compiler chooses these two dims for each array so that its size is smallest:
``f32[24,256,16,64]`` has the layout ``{1,3,2,0:T(8,128)}``, without padding. A kernel's operands
and results keep their written layout: heads of 64 numbers as the last dim take twice their bytes.
"""

from __future__ import annotations

import functools
import itertools
import math

_LANES = 128
_FLAT = 1024
"""Numbers in a tile of a one-dimensional array."""


@functools.lru_cache(maxsize=65536)
def size(shape: tuple[float | int, ...], itemsize: int, as_written: bool = False) -> float:
    """Bytes of an array, with padding.

    Args:
        shape: shape on a device; a dim may be a fraction.
        itemsize: bytes of a number.
        as_written: the last dim is the minor-most in memory too.
    """
    numbers = float(math.prod(shape))
    if not numbers:
        return 0.0
    if len(shape) < 2:
        return float(itemsize * _up(numbers, min(_FLAT, max(_LANES, _power(numbers)))))
    last = len(shape) - 1
    rows = 32 if itemsize == 1 else 8
    pairs = [(last - 1, last)] if as_written else itertools.permutations(range(len(shape)), 2)
    return itemsize * min(
        numbers / shape[i] / shape[j] * _up(shape[i], min(rows, _power(shape[i]))) * _up(shape[j])
        for i, j in pairs
    )


def keeps_layout(shape: tuple[int, ...], dim: int, shards: int) -> bool:
    """Whether an array has its own layout after it is all-gathered along a dim.

    If that dim is its minor-most one, shards whose part of it is not whole tiles have another
    layout, in which they are all-gathered.

    Args:
        shape: of the whole array.
        dim: that is sharded.
        shards: their number.
    """
    if len(shape) < 2:
        return False
    return dim != minor_most(shape) or shape[dim] // shards % _LANES == 0


def minor_most(shape: tuple[int, ...]) -> int:
    """The minor-most dim of a float32 array in memory.

    Args:
        shape: of at least two dims; the last one, unless less is padded with another one.
    """
    last = len(shape) - 1
    pairs = [(last - 1, last), *itertools.permutations(range(len(shape)), 2)]

    def padded(pair: tuple[int, int]) -> float:
        rows, columns = shape[pair[0]], shape[pair[1]]
        return _up(rows, min(8, _power(rows))) * _up(columns) / (rows * columns)

    return min(pairs, key=padded)[1]


def _up(n: float | int, unit: int = _LANES) -> int:
    return math.ceil(n / unit) * unit


def _power(n: float | int) -> int:
    """The next power of two."""
    return 1 << max(0, math.ceil(n) - 1).bit_length()
