"""The memory of a compiled program on one device, and what to do where there is not enough."""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxvlm.types import Batch, Pairs


def memory(program: Any) -> dict[str, int]:
    """Return the bytes of a compiled program on one device, as the compiler counts them.

    A step that consists of several programs reports its own ``memory``.
    """
    if own := getattr(program, "memory", None):
        return own()
    stats = program.memory_analysis()
    if stats is None:
        return {}
    outside = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporary = stats.temp_size_in_bytes
    if _platform(program) == "tpu":  # libtpu 0.0.42's temporaries are a third more than their heap
        temporary = max(0, stats.peak_memory_in_bytes - outside)
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporary": temporary,
        "host": stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
        "peak": outside + temporary,
    }


def _platform(program: Any) -> str:
    """Return the platform of the devices that a program is compiled for."""
    shardings = jax.tree.leaves(program.input_shardings)
    return next((str(d.platform) for sharding in shardings for d in sharding.device_set), "")


def bytes_of(x: Any) -> int:
    """Return the bytes of an array, or of a ShapeDtypeStruct, on one of its devices."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is a device's out-of-memory error."""
    text = str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    )


def explain_out_of_memory(
    state: Any, batch: Batch | Pairs, others: dict[str, int], advice: list[str]
) -> str:
    """Format one line: the largest buffers on a device, and what to change.

    Args:
        state: arrays or ShapeDtypeStructs with shardings.
        batch: arrays or ShapeDtypeStructs with shardings.
        others: name -> bytes of buffers that are part of neither.
        advice: settings to change, cheapest first.
    """
    sizes = dict(others)
    for path, leaf in jax.tree_util.tree_leaves_with_path((state, batch)):
        sizes[jax.tree_util.keystr(path, simple=True, separator="/")] = bytes_of(leaf)
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    shown = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in largest)
    return (
        f"out of device memory; largest buffers on a device: {shown}. "
        f"Try, in this order: {'; '.join(advice)}"
    )
