"""Order of packed sequences over training steps: a function of (seed, step, V) and nothing else."""

from __future__ import annotations

import bisect
import functools
import threading
from typing import NamedTuple

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations import packing
from jaxvlm.data.conversations.packing import Pieces


class PackedSequence(NamedTuple):
    """One packed sequence of a batch."""

    pieces: np.ndarray
    """i32[k]: pieces in the sequence's order; empty is padding."""
    pass_: int = 0
    """Number of complete passes over the sequence's virtual shard before this one."""
    shard: int = -1
    """Index of the virtual shard."""


EMPTY = PackedSequence(np.zeros(0, np.int32))


class SequenceOrder:
    """An endless order of packed training sequences, with random access by step.

    Sequence r of step s is the next one of virtual shard ``r * (V/B) + s mod (V/B)``. A shard that
    is exhausted begins its next pass, in a new order, whether or not the others are.
    """

    def __init__(self, pieces: Pieces, config: DataConfig, seed: int):
        """Assign the pieces to virtual shards.

        Raises:
            DataError: there are fewer pieces than sequences in a batch.
        """
        self.pieces, self.config, self.seed = pieces, config, seed
        members = packing.units(pieces, config.batch_size)
        self.num_shards = packing.effective_shards(
            config.virtual_shards, config.batch_size, len(members)
        )
        self.shards = packing.assign(pieces, members, self.num_shards, seed)
        self.turns = self.num_shards // config.batch_size  # steps between two visits to a shard
        self._ends: list[list[int]] = [[] for _ in self.shards]  # sequences up to each pass's end
        self._lock = threading.Lock()
        # Two passes of each shard: prefetching crosses from one to the next.
        self._pass = functools.lru_cache(maxsize=2 * self.num_shards)(self._pack_pass)

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every record has been in a batch (every shard has completed a pass)."""
        last = 0
        for shard in range(self.num_shards):
            visits = len(self._pass(shard, 0))
            last = max(last, (visits - 1) * self.turns + shard % self.turns + 1)
        return last

    def sequence(self, step: int, index: int) -> PackedSequence:
        """Look up the pieces of one sequence of a step.

        Args:
            step: training step, from 0.
            index: index of the sequence in the global batch.
        """
        shard = index * self.turns + step % self.turns
        visit = step // self.turns
        with self._lock:
            ends = self._ends[shard]
            while not ends or ends[-1] <= visit:
                packed = self._pass(shard, len(ends))
                ends.append((ends[-1] if ends else 0) + len(packed))
            pass_ = bisect.bisect_right(ends, visit)
            begin = ends[pass_ - 1] if pass_ else 0
            return PackedSequence(self._pass(shard, pass_)[visit - begin], pass_, shard)

    def _pack_pass(self, shard: int, pass_: int) -> list[np.ndarray]:
        order = packing.shuffled(self.shards[shard], self.seed, pass_, shard)
        return sequences(order, self.pieces, self.config)


def sequences(order: np.ndarray, pieces: Pieces, config: DataConfig) -> list[np.ndarray]:
    """Pack pieces in ``order`` as ``config`` says; one piece a sequence if packing is off."""
    limit = 0 if config.packing else 1
    return packing.pack(order, pieces, packing.limits_of(config), limit)
