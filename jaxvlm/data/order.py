"""Which pieces stand in which row of which step: a function of (seed, step, V), nothing else."""

from __future__ import annotations

import bisect
import functools
import threading
from typing import NamedTuple

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data import packing
from jaxvlm.data.packing import Pieces


class Row(NamedTuple):
    """One row of a batch."""

    pieces: np.ndarray
    """i32[k]: pieces in the row's order; empty is padding."""
    pass_: int = 0
    """How often the row's virtual shard was gone through before."""
    shard: int = -1
    """The virtual shard."""


EMPTY = Row(np.zeros(0, np.int32))


class Order:
    """Endless rows of training, by step, at random access.

    Row r of step s is the next row of virtual shard ``r * (V/B) + s mod (V/B)``; a shard that
    is through begins its next pass, in a new order, whether or not the others are.
    """

    def __init__(self, pieces: Pieces, config: DataConfig, seed: int):
        """Deal the pieces.

        Raises:
            DataError: fewer pieces than rows a batch.
        """
        self.pieces, self.config, self.seed = pieces, config, seed
        members = packing.units(pieces, config.batch_size)
        self.num_shards = packing.effective_shards(
            config.virtual_shards, config.batch_size, len(members)
        )
        self.shards = packing.assign(pieces, members, self.num_shards, seed)
        self.turns = self.num_shards // config.batch_size  # steps until a shard comes again
        self._ends: list[list[int]] = [[] for _ in self.shards]  # rows through each pass
        self._lock = threading.Lock()
        # Two passes a shard: reading ahead crosses from one to the next.
        self._pass = functools.lru_cache(maxsize=2 * self.num_shards)(self._pack_pass)

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every record has been in a batch (every shard is through one pass)."""
        last = 0
        for shard in range(self.num_shards):
            visits = len(self._pass(shard, 0))
            last = max(last, (visits - 1) * self.turns + shard % self.turns + 1)
        return last

    def row(self, step: int, row: int) -> Row:
        """The pieces of one global row.

        Args:
            step: training step, from 0.
            row: row of the global batch.
        """
        shard = row * self.turns + step % self.turns
        visit = step // self.turns
        with self._lock:
            ends = self._ends[shard]
            while not ends or ends[-1] <= visit:
                rows = self._pass(shard, len(ends))
                ends.append((ends[-1] if ends else 0) + len(rows))
            pass_ = bisect.bisect_right(ends, visit)
            begin = ends[pass_ - 1] if pass_ else 0
            return Row(self._pass(shard, pass_)[visit - begin], pass_, shard)

    def _pack_pass(self, shard: int, pass_: int) -> list[np.ndarray]:
        order = packing.shuffled(self.shards[shard], self.seed, pass_, shard)
        return rows(order, self.pieces, self.config)


def rows(order: np.ndarray, pieces: Pieces, config: DataConfig) -> list[np.ndarray]:
    """Pieces in ``order`` packed as ``config`` says; one a row where packing is off."""
    limit = 0 if config.packing else 1
    return packing.pack(order, pieces, packing.limits_of(config), limit)
