"""The denominator of MFU: the peak matmul rate of a run's devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.train import chips


def peak_flops(meshes: Sequence[jax.sharding.Mesh], dtype: str) -> tuple[float, str]:
    """Peak matmul FLOP/s of all devices together, and the source of the figure.

    Args:
        meshes: the devices, all of one kind.
        dtype: dtype of the matmuls.
    """
    device, size = meshes[0].devices.flat[0], sum(mesh.size for mesh in meshes)
    chip = chips.lookup(device.device_kind, dtype)
    if chip is not None:
        return chip.peak_flops * size, chip.name
    # Forced CPU devices share the cores, so one matmul measures the rate of all of them.
    if device.platform == "cpu":
        return _measured(jnp.float32, 1024), "measured matmul"
    return _measured(jnp.dtype(dtype), 8192) * size, "measured matmul"


def _measured(dtype: Any, size: int, repeats: int = 3) -> float:
    """Measured matmul FLOP/s of one device."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
