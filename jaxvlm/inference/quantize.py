"""Quantization of embeddings to eight bits or one bit per dim.

Source: sentence-transformers' ``quantize_embeddings``; other libraries' indices read this format.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxvlm.config import ConfigError

KINDS = ("int8", "binary", "ubinary")
MIN_FOR_RANGES = 100
"""Ranges computed from fewer embeddings would change noticeably with more."""


def ranges_of(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Computes f32[2, E], the minimum and maximum of each dim, over parts of f32[n, E].

    Raises:
        ConfigError: the parts hold fewer than two embeddings, which have no range.
    """
    low: np.ndarray | None = None
    high, count = np.zeros(0), 0
    for part in parts:
        count += len(part)
        if len(part):
            least, most = part.min(axis=0), part.max(axis=0)
            if low is not None:
                least, most = np.minimum(low, least), np.maximum(high, most)
            low, high = least, most
    if low is None or count < 2:
        raise ConfigError(
            f"int8: the ranges of dims can't be computed from {count} "
            f"embedding{'s' * (count != 1)}; give those of a corpus with --ranges=FILE"
        )
    return np.stack([low, high]).astype(np.float32)


def quantize(x: np.ndarray, kind: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """Quantizes embeddings.

    Args:
        x: f32[N, E].
        kind: ``int8`` divides each dim's range into 256 steps, the first being -128. ``binary`` has
            one bit per dim, 1 above zero, and packs eight of them into an i8 after subtracting 128.
            ``ubinary`` packs the same bits into u8.
        ranges: f32[2, E] for int8; queries use those of the corpus too.

    Returns:
        i8[N, E], i8[N, ceil(E / 8)] or u8[N, ceil(E / 8)].

    Raises:
        ConfigError: ``kind`` is unknown, or ranges are missing or of another width.
    """
    if kind not in KINDS:
        raise ConfigError(f"quantize={kind!r}: choose from {', '.join(KINDS)}")
    if kind != "int8":
        bits = np.packbits(x > 0, axis=-1)
        return bits if kind == "ubinary" else (bits ^ 0x80).view(np.int8)
    if ranges is None or ranges.shape != (2, x.shape[1]):
        given = "none" if ranges is None else list(ranges.shape)
        raise ConfigError(f"int8: ranges of [2, {x.shape[1]}] are needed, not {given}")
    low, step = _steps(ranges)
    return (np.clip(np.floor((x - low) / step), 0, 255) - 128).astype(np.int8)


def dequantized(x: np.ndarray, kind: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """Quantizes embeddings and dequantizes them again.

    Args:
        x: f32[N, E].
        kind: ``int8`` reads a number as the middle of its step; ``binary`` and ``ubinary`` read the
            sign, with an embedding of length 1.
        ranges: as for :func:`quantize`.

    Returns:
        f32[N, E].

    Raises:
        ConfigError: as for :func:`quantize`.
    """
    codes = quantize(x, kind, ranges)
    if kind == "int8" and ranges is not None:
        low, step = _steps(ranges)
        # Only the maximum itself has code 255.
        code = np.minimum(codes.astype(np.float32) + 128, 254)
        return np.minimum(low + (code + 0.5) * step, ranges[1]).astype(np.float32)
    packed = codes.view(np.uint8) ^ np.uint8(0 if kind == "ubinary" else 0x80)
    bits = np.unpackbits(packed, axis=-1)
    return (2.0 * bits[:, : x.shape[1]] - 1).astype(np.float32) / np.float32(x.shape[1] ** 0.5)


def _steps(ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The minimum of each dim, and the size of its steps."""
    low, high = ranges.astype(np.float32)
    step = (high - low) / 255
    return low, np.where(step == 0, 1, step)
