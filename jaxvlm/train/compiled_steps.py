"""Compiled train steps, one for each shape of batch and size of the cache, and their memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxvlm.types import Batch, Pairs, TrainState


class CompiledSteps:
    """Compiles and keeps the step for each shape of batch: ``programs.get(state, batch)``.

    Args:
        build: compiles the step for a state and a batch, or for their shapes.
        log: takes a line whenever a program is compiled.
        sizes: shapes of the states that a run may have, where the sizes of their caches may differ:
            each shape of batch is compiled for all of them at once, so that evicting cache memory
            does not wait for a compilation.
    """

    def __init__(
        self,
        build: Callable[[TrainState, Any], Any],
        log: Callable[[str], None],
        sizes: Sequence[TrainState] = (),
    ):
        self.build, self.log, self.sizes = build, log, sizes
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def get(self, state: TrainState, batch: Batch | Pairs) -> Any:
        """Return the program for a batch's shape: ``program(state, batch) -> (state, metrics)``."""
        leaves, kind = jax.tree.flatten(batch)
        shapes = (kind, *((x.shape, str(x.dtype)) for x in leaves))
        key = shapes, _size(state)
        if key not in self.compiled:
            start = time.perf_counter()
            for other in self.sizes or (state,):
                self.compiled[shapes, _size(other)] = self.build(other, batch)
            seconds = time.perf_counter() - start
            batches = [batch] if isinstance(batch, Batch) else [batch.query, batch.document]
            shape = " and ".join(map(_shape, batches))
            self.log(
                f"compiled the step for {shape} per sequence: {seconds:.1f} s (program "
                f"{len(self.compiled)})"
            )
        return self.compiled[key]


def _shape(batch: Batch) -> str:
    rows, length = math.prod(batch.tokens.shape[:-1]), batch.tokens.shape[-1]
    images = 0 if batch.image_start is None else batch.image_start.shape[-1]
    patches = "" if batch.patches is None else f" of {batch.patches.shape[-2]} patches"
    return f"{rows} sequences x {length} tokens, {images} images{patches}"


def _size(state: TrainState) -> tuple[Any, ...]:
    """Return the shapes of the cache, the only part of the state that may change its size."""
    return tuple(x.shape for x in jax.tree.leaves(state.cache))


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
