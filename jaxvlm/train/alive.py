"""Memory of programs on two meshes that give each other arrays."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax

from jaxvlm.train.programs import bytes_of, memory


class Alive:
    """What programs give each other, from the call that makes it to the last that reads it.

    Args:
        first: names of the programs that run on the first of two meshes.
        last: of those whose results lie in the place of what they take.
    """

    def __init__(self, first: Collection[str], last: Collection[str]):
        self.first, self.last = first, last
        self.calls: list[tuple[str, Any]] = []
        self.made: dict[int, tuple[Any, int]] = {}  # the array keeps its id from being used again
        self.read: dict[int, int] = {}

    def call(self, name: str, program: Any, args: Any, made: Any) -> Any:
        """A program has taken ``args`` and given ``made``."""
        self.read |= {id(x): len(self.calls) for x in jax.tree.leaves(args)}
        self.calls.append((name, program))
        return made if name in self.last else self.born(made)

    def born(self, made: Any) -> Any:
        """``made``, from now on."""
        self.made |= {id(x): (x, len(self.calls)) for x in jax.tree.leaves(made)}
        return made

    def most(self, first: Any) -> tuple[int, int]:
        """Most bytes on a device of each mesh, beside what it holds anyway.

        Args:
            first: the first mesh's devices.
        """
        most = [0, 0]
        for i, (name, program) in enumerate(self.calls):
            side = name not in self.first
            sizes = memory(program)
            work = sizes["temporary"] + sizes["outputs"] - sizes["aliased"]
            for x, since in self.made.values():
                here = (x.sharding.device_set != first) == side
                if here and since <= i <= self.read.get(id(x), -1):
                    work += bytes_of(x)
            most[side] = max(most[side], work)
        return most[0], most[1]
