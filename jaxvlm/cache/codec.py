"""Visual tokens as bytes: to the bit, or in eight or four bits a number with a stated error.

The bytes say themselves what they are: a header of 16, then by codec

- ``exact``: the length of each byte-plane, then the planes: all numbers' first bytes, all their
  second ones. Planes of exponents compress, planes of mantissas don't: one that zstandard does not
  shrink stands as it is, and is known by its length.
- the others: the scales, then the values, as :func:`quantize` gives them.

Quantised numbers are decoded by one multiplication that is exact in float32 (scales are bfloat16)
and one rounding to the tokens' dtype, with no denormal on the way: every device decodes the same
bits.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import zstandard
from jaxtyping import Float

BLOCK = 128
"""Channels of a token that share a scale."""
MAGIC, VERSION = b"jvvt", 1

_HEADER = struct.Struct("<4sBBBxII")  # magic, version, codec, dtype, T, D
_LEVEL = 1  # of zstandard: higher ones take longer and compress exponents worse
_LEAST = 2.0**-100
"""Of scales: numbers that some devices would take for zero are not made, and not told from zero."""


class _Form(NamedTuple):
    """A quantised codec."""

    most: float
    """The largest value; a block's absmax becomes it."""
    step: float
    """Half the distance of neighbouring values where it is largest."""


_FORMS = {"int8": _Form(127.0, 0.5), "fp8": _Form(448.0, 16.0), "int4": _Form(7.0, 0.5)}
_NUMBERS = {"exact": 0, "int8": 1, "fp8": 2, "int4": 3}  # as bytes name them
_DTYPES = {0: np.dtype(np.float32), 1: np.dtype(ml_dtypes.bfloat16)}
CODECS = tuple(_NUMBERS)


class Header(NamedTuple):
    """What bytes say of themselves."""

    codec: str
    dtype: np.dtype
    """float32 or bfloat16."""
    shape: tuple[int, int]
    """(T, D)."""

    @property
    def nbytes(self) -> int:
        """Of the tokens in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_name(codec: str) -> None:
    """Raise ValueError where there is no such codec."""
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}; known: {', '.join(CODECS)}")


def check(tokens: Float[np.ndarray, "..."], codec: str) -> None:
    """Raise ValueError, which says why, where tokens are none that the codec takes."""
    check_name(codec)
    if tokens.ndim != 2 or not tokens.size or tokens.dtype not in _DTYPES.values():
        given = f"{tokens.dtype}{list(tokens.shape)}"
        raise ValueError(f"visual tokens are float32 or bfloat16 [T, D], none of them 0: {given}")
    if codec == "int4" and tokens.shape[1] % 2:
        raise ValueError(f"int4 takes an even width, not {tokens.shape[1]}")


def encode(tokens: Float[np.ndarray, "T D"], codec: str) -> bytes:
    """Tokens as bytes.

    Args:
        tokens: float32 or bfloat16; with a quantised codec, finite.
        codec: of CODECS.

    Raises:
        ValueError: tokens that the codec does not take; it says why.
    """
    check(tokens, codec)
    tokens = np.ascontiguousarray(tokens)
    dtype = next(number for number, kind in _DTYPES.items() if kind == tokens.dtype)
    header = _HEADER.pack(MAGIC, VERSION, _NUMBERS[codec], dtype, *tokens.shape)
    if codec == "exact":
        return b"".join([header, *_planes(tokens)])
    if not is_finite(tokens):
        raise ValueError(f"{codec} takes finite numbers only; there are NaNs or infinities")
    values, scales = quantize(tokens, codec)
    return header + scales.tobytes() + values.tobytes()


def decode(data: bytes) -> Float[np.ndarray, "T D"]:
    """The tokens that :func:`encode` was given, or with a quantised codec others near them.

    Raises:
        ValueError: bytes that are not whole, or not of this format; it says why.
    """
    codec, dtype, (length, width) = header = read_header(data)
    body = memoryview(data)[_HEADER.size :]
    if codec == "exact":
        return _from_planes(body, header)
    blocks, packed = -(-width // BLOCK), width // 2 if codec == "int4" else width
    cut = length * blocks * 2
    if len(body) != cut + length * packed:
        raise ValueError(f"{len(data)} bytes are not {codec} tokens of shape {header.shape}")
    kind = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn, "int4": np.uint8}[codec]
    scales = np.frombuffer(body[:cut], ml_dtypes.bfloat16).reshape(length, blocks)
    values = np.frombuffer(body[cut:], kind).reshape(length, packed)
    return dequantize(values, scales, dtype)


def read_header(data: bytes) -> Header:
    """What bytes are. Raises ValueError: they are not tokens, or a newer jaxvlm's."""
    if len(data) < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError("not visual tokens")
    _, version, number, dtype, length, width = _HEADER.unpack_from(data)
    codec = next((name for name, n in _NUMBERS.items() if n == number), None)
    if version != VERSION or codec is None or dtype not in _DTYPES or not length * width:
        raise ValueError(f"visual tokens in a format (version {version}) not known here")
    return Header(codec, _DTYPES[dtype], (length, width))


def quantize(x: Any, codec: str) -> tuple[Any, Any]:
    """Values and their scales, a scale a token and BLOCK channels. NumPy's arrays or JAX's.

    Args:
        x: float32 or bfloat16 [..., D], finite; D is even with int4.
        codec: ``int8``, ``fp8`` or ``int4``.

    Returns:
        Values: i8[..., D], float8_e4m3fn[..., D], or u8[..., D / 2] that hold channel i in the
        low half of byte i and channel i + D / 2 in the high one; scales: bf16[..., ⌈D / BLOCK⌉].
    """
    xp, most = x.__array_namespace__(), _FORMS[codec].most
    lead, width = x.shape[:-1], x.shape[-1]
    padding = [(0, 0)] * len(lead) + [(0, -width % BLOCK)]
    blocks = xp.pad(x.astype(np.float32), padding).reshape(*lead, -1, BLOCK)
    # To the nearest of eight bits, and values clipped: that costs less than half a step. A cast to
    # bfloat16 and back would do, had XLA no leave to drop it.
    fraction, exponent = xp.frexp(xp.max(xp.abs(blocks), axis=-1) / most)
    scales = xp.ldexp(xp.round(fraction * 256), exponent - 8)
    scales = xp.clip(scales, _LEAST, _largest_scale(x.dtype, most))
    scaled = (blocks / scales[..., None]).reshape(*lead, -1)[..., :width]
    scaled, scales = xp.clip(scaled, -most, most), scales.astype(ml_dtypes.bfloat16)
    if codec == "fp8":
        return scaled.astype(ml_dtypes.float8_e4m3fn), scales
    values = xp.round(scaled).astype(np.int8)
    return (_pack(values) if codec == "int4" else values), scales


def dequantize(values: Any, scales: Any, dtype: Any) -> Any:
    """The numbers [..., D] that :func:`quantize`'s values and scales stand for.

    Args:
        values: i8, float8_e4m3fn or u8 (int4) arrays of NumPy or JAX.
        scales: bf16[..., ⌈D / BLOCK⌉].
        dtype: of the numbers that were quantised.
    """
    xp = values.__array_namespace__()
    if values.dtype == np.uint8:
        values = xp.concatenate([(values << 4).astype(np.int8), values.astype(np.int8)], -1) >> 4
    wide = xp.repeat(scales.astype(np.float32), BLOCK, axis=-1)[..., : values.shape[-1]]
    return (values.astype(np.float32) * wide).astype(dtype)


def error_bound(codec: str, absmax: Any, dtype: Any = np.float32) -> Any:
    """How far a decoded number may be from the one that was encoded.

    Args:
        codec: of CODECS.
        absmax: largest absolute value in its block (its token's BLOCK channels).
        dtype: of the tokens; bfloat16 adds half an ulp of what is decoded.
    """
    absmax = np.asarray(absmax, np.float64)
    if codec == "exact":
        return np.zeros_like(absmax)
    most, step = _FORMS[codec]
    if np.dtype(dtype) == ml_dtypes.bfloat16:
        step += most * 2.0**-8
    # A scale is a bfloat16: up to 2**-8 of itself above what it should be.
    return step * np.maximum(absmax / most * (1 + 2.0**-8), _LEAST)


def is_finite(tokens: Float[np.ndarray, "..."]) -> bool:
    """Whether all numbers are; ml_dtypes' own ``isfinite`` takes ten times as long."""
    bits = np.ascontiguousarray(tokens).view(f"u{tokens.dtype.itemsize}")
    infinity = np.asarray(np.inf, tokens.dtype).view(bits.dtype)
    return bool(np.max(bits & (np.iinfo(bits.dtype).max >> 1)) < infinity)


def _largest_scale(dtype: Any, most: float) -> float:
    """The largest bfloat16 that times ``most`` is still a number in the tokens' dtype."""
    fraction, exponent = math.frexp(float(ml_dtypes.finfo(dtype).max) / most)
    return math.ldexp(math.floor(fraction * 256), exponent - 8)


def _pack(values: Any) -> Any:
    """i8[..., D] from -7 to 7 -> u8[..., D / 2]. Halves, not neighbours: no number changes lanes
    on a device that takes them apart.
    """
    half = values.shape[-1] // 2
    return ((values[..., :half] & 15) | (values[..., half:] << 4)).astype(np.uint8)


def _planes(tokens: np.ndarray) -> list[bytes]:
    size = tokens.dtype.itemsize
    press = zstandard.ZstdCompressor(level=_LEVEL)
    planes = []
    for plane in tokens.view(np.uint8).reshape(-1, size).T:
        plain = plane.tobytes()
        pressed = press.compress(plain)
        planes.append(pressed if len(pressed) < len(plain) else plain)
    return [struct.pack(f"<{size}I", *map(len, planes)), *planes]


def _from_planes(body: memoryview, header: Header) -> np.ndarray:
    count, size = math.prod(header.shape), header.dtype.itemsize
    lengths = struct.unpack_from(f"<{size}I", body) if len(body) >= 4 * size else ()
    begin = 4 * size
    if not lengths or begin + sum(lengths) != len(body) or max(lengths) > count:
        raise ValueError(f"{len(body)} bytes are not exact tokens of shape {header.shape}")
    made = np.empty((count, size), np.uint8)
    for i, length in enumerate(lengths):
        plane = body[begin : begin + length]
        made[:, i] = np.frombuffer(plane if length == count else _expand(plane, count), np.uint8)
        begin += length
    return made.reshape(-1).view(header.dtype).reshape(header.shape)


def _expand(plane: memoryview, count: int) -> bytes:
    try:
        if zstandard.frame_content_size(plane) != count:  # before any memory is taken for it
            raise ValueError("a byte-plane has another length than it should")
        return zstandard.ZstdDecompressor().decompress(plane)
    except zstandard.ZstdError as error:
        raise ValueError(f"a byte-plane can't be decompressed: {error}") from None
