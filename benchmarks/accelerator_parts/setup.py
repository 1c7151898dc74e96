"""The machine in figures, and what the other parts share."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.accelerator_parts import Unavailable

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "torch", "transformers", "libtpu")
NEEDED = (
    "flax", "optax", "ml_collections", "absl", "yaml", "msgpack", "treescope", "rich", "jaxtyping",
    "safetensors", "tokenizers", "PIL", "zstandard", "jinja2",
)  # fmt: skip
"""Modules of the packages in accelerator_wheels.txt that jaxvlm imports."""


def environment(tiny: bool) -> Iterator[dict[str, Any]]:
    """Devices, versions, and which packages are missing."""
    yield {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "missing": [name for name in NEEDED if importlib.util.find_spec(name) is None],
        "host": platform.node(),
        "cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    devices = jax.devices()
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    yield {
        "device": devices[0].device_kind,
        "platform": devices[0].platform,
        "devices": len(devices),
        "memory_gib": None if limit is None else gib(limit),
        "compute_capability": getattr(devices[0], "compute_capability", None),
    }
    x = jax.numpy.ones((256 if tiny else 8192,) * 2, "bfloat16")
    median = milliseconds(jax.jit(jax.numpy.matmul), x, x, steps=3)
    yield {"bfloat16_matmul_tflop_per_s": round(2 * len(x) ** 3 / median / 1e9, 2)}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def devices(tiny: bool, count: int = 1) -> list[Any]:
    """The first ``count`` devices; 0: all of them, which must be several.

    Raises:
        Unavailable: real sizes on a CPU, or too few devices.
    """
    here = jax.devices()
    if here[0].platform == "cpu" and not tiny:
        raise Unavailable("real sizes need a GPU or TPU, and JAX has a CPU here; use --tiny")
    if count == 0 and len(here) < 4:
        raise Unavailable(f"needs at least 4 devices, and JAX has {len(here)} here")
    return here[: count or len(here)]


def gib(number: float) -> float:
    """Bytes in GiB."""
    return round(number / 2**30, 4)


def milliseconds(program: Callable[..., Any], *args: Any, steps: int) -> float:
    """Median milliseconds of a program; its first two runs do not count."""
    seconds = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[2:])
