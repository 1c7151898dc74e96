"""Two cache tiers of visual tokens: least recently used rows in host memory, all rows on disk."""

from __future__ import annotations

import collections
import threading
from typing import Any

import numpy as np

from jaxvlm.cache.store.rows import Store


class Tiers:
    """Visual tokens by key: the most recently used in memory, all of them on disk.

    May be used from any thread.

    Args:
        store: on disk; ``None``: memory alone.
        memory_mb: limit of the tokens in memory, in 2**20 bytes.
        dtype: of the tokens that :meth:`get` returns.
    """

    def __init__(self, store: Store | None, memory_mb: int, dtype: Any):
        self.store, self.dtype = store, np.dtype(dtype)
        self._room, self._bytes = memory_mb * 2**20, 0
        self._kept: collections.OrderedDict[bytes, np.ndarray] = collections.OrderedDict()
        self._new = set(store.unread) if store else set[bytes]()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> np.ndarray | None:
        """Return a row's tokens [T, D], not to be written to; ``None`` on a miss."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        tokens = self.store.get(key) if self.store and key not in self._new else None
        if tokens is None or key in self._new:  # another thread may have put it meanwhile
            return None
        return self._keep(key, tokens.astype(self.dtype, copy=False))

    def has(self, key: bytes) -> bool:
        """Whether a row is on disk or in memory."""
        with self._lock:
            if key in self._kept:
                return True
        return self.store is not None and self.store.has(key)

    def is_new(self, key: bytes) -> bool:
        """Whether this run wrote the row with a lossy codec, so only other runs may read it."""
        return key in self._new

    def put(self, key: bytes, tokens: np.ndarray) -> None:
        """Write a row [T, D] to both tiers, as far as there is room.

        With a lossy codec it is written to disk alone, for later runs: in this run, its tokens
        would change at a time that depends on a thread.
        """
        if self.store and self.store.codec != "exact":
            self._new.add(key)
            self.store.put(key, tokens)
            return
        if self.store:
            self.store.put(key, tokens)
        self._keep(key, np.array(tokens, self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in memory."""
        return self._bytes

    @property
    def takes(self) -> bool:
        """Whether :meth:`put` stores rows at all."""
        return self._room > 0 or (self.store is not None and not self.store.read_only)

    def close(self) -> None:
        """Wait until all rows are on disk."""
        if self.store:
            self.store.close()

    def _keep(self, key: bytes, tokens: np.ndarray) -> np.ndarray:
        with self._lock:
            if key not in self._kept and tokens.nbytes <= self._room and np.isfinite(tokens).all():
                self._kept[key] = tokens
                self._bytes += tokens.nbytes
                while self._bytes > self._room:
                    self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return tokens
