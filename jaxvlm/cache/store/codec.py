"""Codecs of visual tokens: lossless, or quantized to eight or four bits with a known error bound.

Encoded tokens describe themselves: a header of 16 bytes, followed by

- ``exact``: the length of each byte plane, then the planes: the first bytes of all numbers, their
  second bytes, and so on. Planes of exponents compress, planes of mantissas don't; a plane that
  zstandard does not shrink is stored uncompressed, which its length tells.
- the quantized codecs: the scales, then the values, as :func:`quantize` returns them.

Quantized numbers are decoded by one multiplication that is exact in float32 (scales are bfloat16)
and one rounding to the tokens' dtype, without denormals in between, so that every device decodes
the same bits.
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
_LEVEL = 1  # of zstandard: higher levels take longer and compress exponents worse
_LEAST = 2.0**-100
"""Smallest scale: keeps decoded numbers out of the range that some devices flush to zero."""


class _Form(NamedTuple):
    """Range of a quantized codec."""

    most: float
    """Largest value; a block's absmax is scaled to it."""
    step: float
    """Half the largest distance of neighboring values."""


_FORMS = {"int8": _Form(127.0, 0.5), "fp8": _Form(448.0, 16.0), "int4": _Form(7.0, 0.5)}
_NUMBERS = {"exact": 0, "int8": 1, "fp8": 2, "int4": 3}  # in the header
_DTYPES = {0: np.dtype(np.float32), 1: np.dtype(ml_dtypes.bfloat16)}
CODECS = tuple(_NUMBERS)


class Header(NamedTuple):
    """Header of encoded tokens."""

    codec: str
    dtype: np.dtype
    """float32 or bfloat16."""
    shape: tuple[int, int]
    """(T, D)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded tokens."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_name(codec: str) -> None:
    """Raise ValueError for an unknown codec."""
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}; known: {', '.join(CODECS)}")


def check(tokens: Float[np.ndarray, "..."], codec: str) -> None:
    """Raise ValueError, with the reason, for tokens that the codec can't encode."""
    check_name(codec)
    if tokens.ndim != 2 or not tokens.size or tokens.dtype not in _DTYPES.values():
        given = f"{tokens.dtype}{list(tokens.shape)}"
        raise ValueError(
            f"visual tokens must be float32 or bfloat16 [T, D] with T and D above 0, not {given}"
        )
    if codec == "int4" and tokens.shape[1] % 2:
        raise ValueError(f"int4 takes an even width, not {tokens.shape[1]}")


def encode(tokens: Float[np.ndarray, "T D"], codec: str) -> bytes:
    """Encode tokens as bytes.

    Args:
        tokens: float32 or bfloat16; with a quantized codec, finite.
        codec: one of CODECS.

    Raises:
        ValueError: the codec can't encode these tokens; the message says why.
    """
    check(tokens, codec)
    tokens = np.ascontiguousarray(tokens)
    dtype = next(number for number, kind in _DTYPES.items() if kind == tokens.dtype)
    header = _HEADER.pack(MAGIC, VERSION, _NUMBERS[codec], dtype, *tokens.shape)
    if codec == "exact":
        return b"".join([header, *_planes(tokens)])
    if not is_finite(tokens):
        raise ValueError(f"{codec} takes finite numbers only; the tokens hold NaNs or infinities")
    values, scales = quantize(tokens, codec)
    return header + scales.tobytes() + values.tobytes()


def decode(data: bytes) -> Float[np.ndarray, "T D"]:
    """Decode the tokens that :func:`encode` encoded; a quantized codec's within its error bound.

    Raises:
        ValueError: the bytes are damaged or of another format; the message says why.
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
    """Read the header. Raises ValueError for bytes of another format or of a newer jaxvlm."""
    if len(data) < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError("not visual tokens")
    _, version, number, dtype, length, width = _HEADER.unpack_from(data)
    codec = next((name for name, n in _NUMBERS.items() if n == number), None)
    if version != VERSION or codec is None or dtype not in _DTYPES or not length * width:
        raise ValueError(f"visual tokens in an unknown format (version {version})")
    return Header(codec, _DTYPES[dtype], (length, width))


def quantize(x: Any, codec: str) -> tuple[Any, Any]:
    """Quantize numbers, with one scale per BLOCK channels of a token.

    Args:
        x: NumPy or JAX array, float32 or bfloat16 [..., D], finite; D is even with int4.
        codec: ``int8``, ``fp8`` or ``int4``.

    Returns:
        Values: i8[..., D], float8_e4m3fn[..., D], or u8[..., D / 2] with channel i in the low half
        of byte i and channel i + D / 2 in the high half. Scales: bf16[..., ⌈D / BLOCK⌉].
    """
    xp, most = x.__array_namespace__(), _FORMS[codec].most
    lead, width = x.shape[:-1], x.shape[-1]
    padding = [(0, 0)] * len(lead) + [(0, -width % BLOCK)]
    blocks = xp.pad(x.astype(np.float32), padding).reshape(*lead, -1, BLOCK)
    # Round scales to the nearest eight bits and clip values, at a cost of less than half a step.
    # A cast to bfloat16 and back would do the same, but XLA may drop it.
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
    """Return the numbers [..., D] that the values and scales of :func:`quantize` represent.

    Args:
        values: NumPy or JAX array, i8, float8_e4m3fn or u8 (int4).
        scales: bf16[..., ⌈D / BLOCK⌉].
        dtype: of the numbers that were quantized.
    """
    xp = values.__array_namespace__()
    if values.dtype == np.uint8:
        values = xp.concatenate([(values << 4).astype(np.int8), values.astype(np.int8)], -1) >> 4
    wide = xp.repeat(scales.astype(np.float32), BLOCK, axis=-1)[..., : values.shape[-1]]
    return (values.astype(np.float32) * wide).astype(dtype)


def error_bound(codec: str, absmax: Any, dtype: Any = np.float32) -> Any:
    """Return the largest possible difference between a decoded number and the original.

    Args:
        codec: one of CODECS.
        absmax: largest absolute value in the number's block of BLOCK channels.
        dtype: of the tokens; bfloat16 adds half an ulp of the decoded number.
    """
    absmax = np.asarray(absmax, np.float64)
    if codec == "exact":
        return np.zeros_like(absmax)
    most, step = _FORMS[codec]
    if np.dtype(dtype) == ml_dtypes.bfloat16:
        step += most * 2.0**-8
    # A scale is a bfloat16, so up to 2**-8 of itself above the exact quotient.
    return step * np.maximum(absmax / most * (1 + 2.0**-8), _LEAST)


def is_finite(tokens: Float[np.ndarray, "..."]) -> bool:
    """Whether all numbers are finite; ml_dtypes' own ``isfinite`` takes ten times as long."""
    bits = np.ascontiguousarray(tokens).view(f"u{tokens.dtype.itemsize}")
    infinity = np.asarray(np.inf, tokens.dtype).view(bits.dtype)
    return bool(np.max(bits & (np.iinfo(bits.dtype).max >> 1)) < infinity)


def _largest_scale(dtype: Any, most: float) -> float:
    """Return the largest bfloat16 whose product with ``most`` is finite in the tokens' dtype."""
    fraction, exponent = math.frexp(float(ml_dtypes.finfo(dtype).max) / most)
    return math.ldexp(math.floor(fraction * 256), exponent - 8)


def _pack(values: Any) -> Any:
    """Pack i8[..., D] from -7 to 7 into u8[..., D / 2]. The two halves of the channels share bytes,
    not neighbors, so that unpacking moves no number to another lane of a device.
    """
    half = values.shape[-1] // 2
    return ((values[..., :half] & 15) | (values[..., half:] << 4)).astype(np.uint8)


def _planes(tokens: np.ndarray) -> list[bytes]:
    """Split tokens into byte planes, compressed where that makes them smaller; lengths first."""
    size = tokens.dtype.itemsize
    press = zstandard.ZstdCompressor(level=_LEVEL)
    planes = []
    for plane in tokens.view(np.uint8).reshape(-1, size).T:
        plain = plane.tobytes()
        pressed = press.compress(plain)
        planes.append(pressed if len(pressed) < len(plain) else plain)
    return [struct.pack(f"<{size}I", *map(len, planes)), *planes]


def _from_planes(body: memoryview, header: Header) -> np.ndarray:
    """Invert :func:`_planes`. Raises ValueError for damaged bytes."""
    count, size = math.prod(header.shape), header.dtype.itemsize
    lengths = struct.unpack_from(f"<{size}I", body) if len(body) >= 4 * size else ()
    begin = 4 * size
    if not lengths or begin + sum(lengths) != len(body) or max(lengths) > count:
        raise ValueError(f"{len(body)} bytes are not exact tokens of shape {header.shape}")
    planes = np.empty((count, size), np.uint8)
    for i, length in enumerate(lengths):
        plane = body[begin : begin + length]
        planes[:, i] = np.frombuffer(plane if length == count else _expand(plane, count), np.uint8)
        begin += length
    return planes.reshape(-1).view(header.dtype).reshape(header.shape)


def _expand(plane: memoryview, count: int) -> bytes:
    try:
        if zstandard.frame_content_size(plane) != count:  # before allocating memory for it
            raise ValueError(f"a byte plane does not decompress to {count} bytes")
        return zstandard.ZstdDecompressor().decompress(plane)
    except zstandard.ZstdError as error:
        raise ValueError(f"a byte plane can't be decompressed: {error}") from None
