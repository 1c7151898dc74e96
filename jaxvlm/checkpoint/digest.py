"""Digests that verify, on any mesh, that the arrays read are the arrays written.

Storage rarely flips a bit, and the array formats do not notice when it does. So a checkpoint
carries one u32 per array: the sum, modulo 2**32, of every word of its bit pattern times an odd
weight that depends on the word's position. Integer sums do not depend on order, so the digest
is the same for every sharding; an odd weight makes any change within one word visible.

Values that are written right may still be NaN, which :func:`is_finite` finds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_PART = 1 << 20  # values looked at together, with a byte each


def digests(leaves: Sequence[jax.Array]) -> list[int]:
    """Computes one u32 per array, equal for equal bits under any sharding.

    Args:
        leaves: arrays of any shape, on any devices, neither deleted nor donated.

    Returns:
        Digests in [0, 2**32), in the order of ``leaves``, the same on all processes.
    """
    return _by_devices(leaves, copy=False)[0]


def snapshot(leaves: list[jax.Array]) -> tuple[list[int], list[jax.Array]]:
    """Computes :func:`digests`, and arrays that do not change while they are written.

    Orbax copies from the accelerator before ``save`` returns. On CPU its host copy may be a view
    of the device's buffer, which the next step donates: so it is copied first.
    """
    devices: set[Any] = set().union(*(leaf.sharding.device_set for leaf in leaves))
    if any(device.platform == "cpu" for device in devices):
        return _by_devices(leaves, copy=True)
    return digests(leaves), leaves


def _by_devices(leaves: Sequence[jax.Array], copy: bool) -> tuple[list[int], list[jax.Array]]:
    """Makes one compiled call per set of devices, since one program can't span two of them."""
    groups: dict[frozenset[Any], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(frozenset(leaf.sharding.device_set), []).append(i)
    values = [0] * len(leaves)
    copies = list(leaves)
    for indices in groups.values():
        sums, copied = _run(tuple(leaves[i] for i in indices), copy=copy)
        for i, value in zip(indices, np.asarray(sums).tolist()):
            values[i] = value
        for i, array in zip(indices, copied):
            copies[i] = array
    return values, copies


def digest_one(x: jax.Array) -> jax.Array:
    """Computes the digest of one array; traceable.

    Args:
        x: any shape; a numeric dtype of 1, 2, 4 or 8 bytes (bool too).

    Returns:
        u32[].
    """
    words = bit_words(x)
    # Neighbours get unrelated weights, so swapped blocks change the sum.
    return jnp.sum(words * (mix(flat_index(words.shape)) | 1), dtype=jnp.uint32)


def flat_index(shape: Sequence[int]) -> jax.Array:
    """u32[shape]: each element's flat index, modulo 2**32."""
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return index


def mix(x: jax.Array) -> jax.Array:
    """u32: MurmurHash3's finaliser, a bijection."""
    x ^= x >> 16
    x *= jnp.uint32(0x85EBCA6B)
    x ^= x >> 13
    x *= jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def bit_words(x: jax.Array) -> jax.Array:
    """The bit pattern of ``x`` as u32: one word per element, two per eight-byte element."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return bit_words(jnp.stack([x.real, x.imag], axis=-1))
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
    bits = jax.lax.bitcast_convert_type(x, unsigned[x.dtype.itemsize])
    return bits.astype(jnp.uint32)


@functools.partial(jax.jit, static_argnames="copy")
def _run(leaves: tuple[jax.Array, ...], copy: bool) -> tuple[jax.Array, list[Any]]:
    leaves = tuple(jax.device_put(leaf, jax.memory.Space.Device) for leaf in leaves)
    sums = jnp.stack([digest_one(leaf) for leaf in leaves])
    return sums, [jnp.copy(leaf) for leaf in leaves] if copy else []


def is_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite, looked at in parts of a MiB; integers always are."""
    if not jax.dtypes.issubdtype(values.dtype, np.floating):
        return True
    flat = values.reshape(-1)
    return all(np.isfinite(flat[i : i + _PART]).all() for i in range(0, len(flat), _PART))
