"""What a process does to JAX before it starts."""

from __future__ import annotations

import ctypes
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.plan import chips


def use_compile_cache(setting: str) -> None:
    """Keep compiled programs on disk, so that the next start is fast.

    Args:
        setting: a folder, ``auto`` (the user's cache), or ``""`` for none.
    """
    if not setting or jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = pathlib.Path("~/.cache/jaxvlm/xla" if setting == "auto" else setting).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home: slower, not wrong
    jax.config.update("jax_compilation_cache_dir", str(folder))


def keep_freed_memory() -> None:
    """Let glibc reuse what a CPU step frees, instead of handing it back to the kernel.

    A step allocates its temporary buffers anew; returned and faulted in again page by page, they
    cost a fifth of a step. To be called before JAX starts its threads. Does nothing where there
    is an accelerator, whose buffers are elsewhere, or another C library.
    """
    platforms = jax.config.values["jax_platforms"] or ""
    accelerators = ("/dev/nvidiactl", "/dev/accel0", "/dev/vfio/0", "/dev/kfd")
    if platforms != "cpu" and any(pathlib.Path(path).exists() for path in accelerators):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1):
            mallopt(option, value)


_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h


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
