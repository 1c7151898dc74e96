"""What a process does to JAX before it starts."""

from __future__ import annotations

import pathlib
import time

import jax
import jax.numpy as jnp

from jaxvlm.plan import chips


def use_compile_cache(setting: str) -> None:
    """Keep compiled programs on disk, so that the next start is fast.

    Args:
        setting: a folder, ``auto`` (the user's cache), or ``""`` for none.
    """
    set_already = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]  # made at run time
    if not setting or set_already:
        return
    folder = pathlib.Path("~/.cache/jaxvlm/xla" if setting == "auto" else setting).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home: slower, not wrong
    jax.config.update("jax_compilation_cache_dir", str(folder))


def peak_flops(mesh: jax.sharding.Mesh, dtype: str) -> tuple[float, str]:
    """Matmul FLOP/s of all devices together, and where the figure is from.

    Args:
        mesh: the devices.
        dtype: of the matmuls.
    """
    device = mesh.devices.flat[0]
    chip = chips.lookup(device.device_kind, dtype)
    if chip is not None:
        return chip.peak_flops * mesh.size, chip.name
    # Forced CPU devices share the cores, so what one matmul reaches is all there is.
    return _measured(), "measured matmul"


def _measured(size: int = 1024, repeats: int = 3) -> float:
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
