"""A site's change of the shared parameters in 32, 16, 8 or 4 bits a value.

In 32 bits nothing is lost but the sign of a zero: the difference of two float32 numbers need not be
one, so the rest that rounding leaves is sent too, where there is any. In fewer bits the rounding
error is returned, for the site to add to its next change (error feedback).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxvlm.config import GRAD_REDUCE_BITS

BLOCK = 256
"""Values that share a scale."""
_INDEX, _REST, _SCALE = ":index", ":rest", ":scale"
SUFFIXES = (_INDEX, _REST, _SCALE)
"""Ends of the names of a parameter's further arrays; no path contains a colon."""


def encode(
    new: Mapping[str, np.ndarray],
    base: Mapping[str, np.ndarray],
    dtype: str,
    error: Mapping[str, np.ndarray] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Encode the change of parameters.

    Args:
        new: f32[...] by path.
        base: what they were, of the same shapes.
        dtype: float32 | bfloat16 | int8 | int4.
        error: rounding errors of the changes before, f32 by path; ``None``: none is added.

    Returns:
        Arrays to send by name, and the rounding errors of this change, {} in float32.
    """
    parts: dict[str, np.ndarray] = {}
    left: dict[str, np.ndarray] = {}
    for path, value in new.items():
        change = np.asarray(value - base[path])  # of numbers without dims, NumPy makes scalars
        if dtype == "float32":
            parts |= _exact(path, value, base[path], change)
            continue
        if error is not None:
            change = np.asarray(change + error[path])
        coded = _rounded(path, change, GRAD_REDUCE_BITS[dtype])
        parts |= coded
        left[path] = np.asarray(change - decode(path, coded, change.shape, dtype)[0])
    return parts, left


def decode(
    path: str, parts: Mapping[str, np.ndarray], shape: tuple[int, ...], dtype: str
) -> tuple[np.ndarray, np.ndarray | None]:
    """Decode one parameter's change.

    Args:
        path: of the parameter.
        parts: what :func:`encode` made, of this parameter at least.
        shape: of the parameter.
        dtype: in which it was encoded.

    Returns:
        f32[shape], the change; and f32[shape], the rest of it that float32 could not hold, or
        ``None``. What the parameter was, plus the first, plus the second in float64 and in this
        order, is what it became.

    Raises:
        KeyError, ValueError: parts are missing, or do not fit the shape or the dtype.
    """
    main, bits = parts[path], GRAD_REDUCE_BITS[dtype]
    if bits < 16:
        blocks = -(-int(np.prod(shape, dtype=np.int64)) // BLOCK)
        _check(main, np.int8, (blocks, BLOCK * bits // 8))
        _check(parts[path + _SCALE], np.float32, (blocks, 1))
        return _dequantized(main, parts[path + _SCALE], shape), None
    _check(main, np.float32 if bits == 32 else ml_dtypes.bfloat16, shape)
    change = main.astype(np.float32)
    if bits < 32 or path + _INDEX not in parts:
        return change, None
    index, values = parts[path + _INDEX], parts[path + _REST]
    if index.dtype not in (np.uint32, np.uint64):
        raise ValueError(f"indices of {index.dtype}")
    _check(values, np.float32, index.shape)
    rest = np.zeros(change.size, np.float32)
    if len(index) and int(index.max()) >= rest.size:
        raise ValueError(f"{path}: an index is out of range")
    rest[index] = values
    return change, rest.reshape(shape)


def names_of(path: str, dtype: str) -> tuple[str, ...]:
    """Names of the arrays that a parameter's change may have, the first one always."""
    if dtype == "float32":
        return path, path + _INDEX, path + _REST
    return (path,) if dtype == "bfloat16" else (path, path + _SCALE)


def _check(x: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> None:
    if x.dtype != dtype or x.shape != shape:
        raise ValueError(f"{x.dtype}{list(x.shape)}, not {np.dtype(dtype)}{list(shape)}")


def _exact(
    path: str, new: np.ndarray, base: np.ndarray, change: np.ndarray
) -> dict[str, np.ndarray]:
    """The change, and where float32 rounded it, what it lost (Knuth's TwoSum)."""
    back = change - new
    rest = (new - (change - back)) - (base + back)
    at = np.flatnonzero(rest)
    if not len(at):
        return {path: change}
    index = at.astype(np.uint32 if change.size <= 2**32 else np.uint64)
    return {path: change, path + _INDEX: index, path + _REST: rest.reshape(-1)[at]}


def _rounded(path: str, change: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    if bits == 16:
        return {path: change.astype(ml_dtypes.bfloat16)}
    most = 2 ** (bits - 1) - 1
    flat = np.pad(change.reshape(-1), (0, -change.size % BLOCK)).reshape(-1, BLOCK)
    scale = np.max(np.abs(flat), axis=1, keepdims=True) / np.float32(most)
    with np.errstate(invalid="ignore"):  # of NaN, whose scale is NaN too, which is refused by name
        values = np.rint(flat / np.where(scale > 0, scale, 1)).astype(np.int8)
    if bits == 4:
        values = (values[:, ::2] & 0xF) | (values[:, 1::2] << 4)
    return {path: values, path + _SCALE: scale}


def _dequantized(values: np.ndarray, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if values.shape[1:] == (BLOCK // 2,):
        pairs = np.stack([(values << 4).astype(np.int8) >> 4, values >> 4], axis=2)
        values = pairs.reshape(len(values), BLOCK)
    flat = (values.astype(np.float32) * scale).reshape(-1)
    return flat[: int(np.prod(shape, dtype=np.int64))].reshape(shape)
