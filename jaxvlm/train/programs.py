"""Compiled steps, one for each shape of batch and size of the cache, counted and timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxvlm.types import Batch, Pairs, TrainState


class Programs:
    """``programs.get(state, batch)`` is the step compiled for the batch's shape.

    Args:
        build: compiles the step for the state and the batch that it is given, or for their shapes.
        say: takes a line whenever a program is compiled.
        sizes: shapes of the states that a run may have, where their caches may differ: a shape of
            batch is compiled for all of them at once, so that none waits when memory is short.
    """

    def __init__(
        self,
        build: Callable[[TrainState, Any], Any],
        say: Callable[[str], None],
        sizes: Sequence[TrainState] = (),
    ):
        self.build, self.say, self.sizes = build, say, sizes
        self.compiled: dict[tuple[Any, ...], Any] = {}
        self.seconds = 0.0

    def get(self, state: TrainState, batch: Batch | Pairs) -> Any:
        """The program for ``batch``'s shape: ``program(state, batch) -> (state, metrics)``."""
        leaves, kind = jax.tree.flatten(batch)
        shapes = (kind, *((x.shape, str(x.dtype)) for x in leaves))
        key = shapes, _size(state)
        if key not in self.compiled:
            start = time.perf_counter()
            for other in self.sizes or (state,):
                self.compiled[shapes, _size(other)] = self.build(other, batch)
            seconds = time.perf_counter() - start
            self.seconds += seconds
            sides = [batch] if isinstance(batch, Batch) else [batch.query, batch.document]
            rows = " and ".join(map(_shape, sides))
            self.say(
                f"compiled the step for {rows} a row: {seconds:.1f} s (program "
                f"{len(self.compiled)})"
            )
        return self.compiled[key]


def _shape(batch: Batch) -> str:
    rows, length = math.prod(batch.tokens.shape[:-1]), batch.tokens.shape[-1]
    pictures = 0 if batch.image_start is None else batch.image_start.shape[-1]
    patches = "" if batch.patches is None else f" of {batch.patches.shape[-2]} patches"
    return f"{rows} rows x {length} tokens, {pictures} pictures{patches}"


def _size(state: TrainState) -> tuple[Any, ...]:
    """Of its cache, the one part that a run may have in several sizes."""
    return tuple(x.shape for x in jax.tree.leaves(state.cache))


def memory(program: Any) -> dict[str, int]:
    """Bytes of a compiled program on one device, as its compiler counts them.

    Of a step that is several programs, what it says itself.
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
    """Of the devices that a program is compiled for."""
    places = jax.tree.leaves(program.input_shardings)
    return next((str(d.platform) for place in places for d in place.device_set), "")


def bytes_of(x: Any) -> int:
    """Bytes of an array, or of what stands for one, on one of its devices."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that a device's memory is used up."""
    text = str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    )


def explain_out_of_memory(
    state: Any, batch: Batch | Pairs, others: dict[str, int], advice: list[str]
) -> str:
    """One line: the largest buffers on a device, and what to change.

    Args:
        state: arrays or ShapeDtypeStructs with shardings.
        batch: likewise.
        others: name -> bytes of buffers that are no part of either.
        advice: fields to change, cheapest first.
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
