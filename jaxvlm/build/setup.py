"""The denominator of MFU: what the devices of a run reach at best."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.plan import chips


def peak_flops(meshes: Sequence[jax.sharding.Mesh], dtype: str) -> tuple[float, str]:
    """Matmul FLOP/s of all devices together, and where the figure is from.

    Args:
        meshes: the devices, all of one kind.
        dtype: of the matmuls.
    """
    device, size = meshes[0].devices.flat[0], sum(mesh.size for mesh in meshes)
    chip = chips.lookup(device.device_kind, dtype)
    if chip is not None:
        return chip.peak_flops * size, chip.name
    # Forced CPU devices share the cores, so what one matmul reaches is all there is.
    if device.platform == "cpu":
        return _measured(jnp.float32, 1024), "measured matmul"
    return _measured(jnp.dtype(dtype), 8192) * size, "measured matmul"


def _measured(dtype: Any, size: int, repeats: int = 3) -> float:
    """FLOP/s of one device."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
