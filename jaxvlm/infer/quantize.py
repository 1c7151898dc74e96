"""Vectors in eight bits or one bit a dim.

Source: sentence-transformers' ``quantize_embeddings``; what it writes, others' indices read.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxvlm.config import ConfigError

KINDS = ("int8", "binary", "ubinary")
FEW = 100
"""Fewer vectors than that give ranges that more would not keep."""


def ranges_of(parts: Iterable[np.ndarray]) -> np.ndarray:
    """f32[2, E]: the least and the greatest value of each dim, over f32[n, E] parts.

    Raises:
        ConfigError: they hold one vector; its ranges say nothing.
    """
    low: np.ndarray | None = None
    high, count = np.zeros(0), 0
    for part in parts:
        count += len(part)
        if len(part):
            least, most = part.min(axis=0), part.max(axis=0)
            low, high = (
                (least, most) if low is None else (np.minimum(low, least), np.maximum(high, most))
            )
    if low is None or count < 2:
        raise ConfigError(
            f"int8: the ranges of dims can't be told from {count} vector{'s' * (count != 1)}; give "
            "those of a corpus (--ranges=FILE)"
        )
    return np.stack([low, high]).astype(np.float32)


def quantize(x: np.ndarray, kind: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """Vectors in fewer bits.

    Args:
        x: f32[N, E].
        kind: ``int8``: each dim's range in 256 steps, the first -128. ``binary``: a bit a dim, 1
            above zero, eight of them as i8 with 128 taken off. ``ubinary``: the same as u8.
        ranges: f32[2, E] for int8; of the corpus, for queries too.

    Returns:
        i8[N, E], i8[N, ceil(E / 8)] or u8[N, ceil(E / 8)].

    Raises:
        ConfigError: ``kind`` is none of these, or ranges are missing or of another width.
    """
    if kind not in KINDS:
        raise ConfigError(f"quantize={kind!r}: choose from {', '.join(KINDS)}")
    if kind != "int8":
        bits = np.packbits(x > 0, axis=-1)
        return bits if kind == "ubinary" else (bits ^ 0x80).view(np.int8)
    if ranges is None or ranges.shape != (2, x.shape[1]):
        has = "none" if ranges is None else list(ranges.shape)
        raise ConfigError(f"int8: ranges of [2, {x.shape[1]}] are needed, not {has}")
    low, step = _steps(ranges)
    return (np.clip(np.floor((x - low) / step), 0, 255) - 128).astype(np.int8)


def kept(x: np.ndarray, kind: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """Vectors as they are read back when :func:`quantize` has written them.

    Args:
        x: f32[N, E].
        kind: ``int8``: a number is the middle of its step. ``binary``: its sign, a vector has
            length 1.
        ranges: as of :func:`quantize`.

    Returns:
        f32[N, E].

    Raises:
        ConfigError: as :func:`quantize`.
    """
    codes = quantize(x, kind, ranges)
    if kind == "int8" and ranges is not None:
        low, step = _steps(ranges)
        code = np.minimum(codes.astype(np.float32) + 128, 254)  # 255 is the greatest value alone
        return np.minimum(low + (code + 0.5) * step, ranges[1]).astype(np.float32)
    packed = codes.view(np.uint8) ^ np.uint8(0 if kind == "ubinary" else 0x80)
    bits = np.unpackbits(packed, axis=-1)
    return (2.0 * bits[:, : x.shape[1]] - 1).astype(np.float32) / np.float32(x.shape[1] ** 0.5)


def _steps(ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each dim begins, and how long a step of it is."""
    low, high = ranges.astype(np.float32)
    step = (high - low) / 255
    return low, np.where(step == 0, 1, step)
