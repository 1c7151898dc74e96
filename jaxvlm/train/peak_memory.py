"""Peak memory of a sequence of programs on two meshes that pass arrays to each other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax

from jaxvlm.train.program_memory import bytes_of, memory


class PeakMemory:
    """Lifetimes of arrays between programs, from the call that makes one to the last that reads it.

    Args:
        first: names of the programs that run on the first of two meshes.
        last: names of the programs whose results reuse their arguments' buffers.
    """

    def __init__(self, first: Collection[str], last: Collection[str]):
        self.first, self.last = first, last
        self.calls: list[tuple[str, Any]] = []
        self.made: dict[int, tuple[Any, int]] = {}  # the array keeps its id from being used again
        self.read: dict[int, int] = {}

    def call(self, name: str, program: Any, args: Any, out: Any) -> Any:
        """Record a program's call: it reads ``args`` and returns ``out``."""
        self.read |= {id(x): len(self.calls) for x in jax.tree.leaves(args)}
        self.calls.append((name, program))
        return out if name in self.last else self.allocate(out)

    def allocate(self, arrays: Any) -> Any:
        """Record arrays as allocated from now on; returns them."""
        self.made |= {id(x): (x, len(self.calls)) for x in jax.tree.leaves(arrays)}
        return arrays

    def most(self, first: Any) -> tuple[int, int]:
        """Return peak bytes on a device of each mesh, in addition to the state and the batch.

        Args:
            first: the first mesh's devices.
        """
        most = [0, 0]
        for i, (name, program) in enumerate(self.calls):
            side = name not in self.first
            sizes = memory(program)
            work = sizes["temporary"] + sizes["outputs"] - sizes["aliased"]
            for x, since in self.made.values():
                on_side = (x.sharding.device_set != first) == side
                if on_side and since <= i <= self.read.get(id(x), -1):
                    work += bytes_of(x)
            most[side] = max(most[side], work)
        return most[0], most[1]
