"""Rows of visual tokens in host memory, before those on disk."""

from __future__ import annotations

import collections
import threading
from typing import Any

import numpy as np

from jaxvlm.cache.store import Store


class Tiers:
    """Visual tokens by key: the latest used in memory, all of them on disk. For any thread.

    Args:
        store: on disk; ``None``: memory alone.
        memory_mb: of tokens in memory, in 2**20 bytes.
        dtype: that tokens are given in.
    """

    def __init__(self, store: Store | None, memory_mb: int, dtype: Any):
        self.store, self.dtype = store, np.dtype(dtype)
        self._room, self._bytes = memory_mb * 2**20, 0
        self._kept: collections.OrderedDict[bytes, np.ndarray] = collections.OrderedDict()
        self._new = set(store.unread) if store else set[bytes]()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> np.ndarray | None:
        """[T, D], or ``None``; not to be written to."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        found = self.store.get(key) if self.store and key not in self._new else None
        if found is None or key in self._new:  # it may have been put since it was asked for
            return None
        return self._keep(key, found.astype(self.dtype, copy=False))

    def has(self, key: bytes) -> bool:
        """Whether a row is kept, on disk or in memory."""
        with self._lock:
            if key in self._kept:
                return True
        return self.store is not None and self.store.has(key)

    def is_new(self, key: bytes) -> bool:
        """Whether a row is kept that this run made, and only another may read."""
        return key in self._new

    def put(self, key: bytes, tokens: np.ndarray) -> None:
        """Keep a row in both, as long as there is room; [T, D].

        Behind a codec that changes numbers it is for the next run: in this one they would change
        as soon as a thread happens to be done.
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
        """Of the rows in memory."""
        return self._bytes

    @property
    def takes(self) -> bool:
        """Whether a row that is given is kept anywhere."""
        return self._room > 0 or (self.store is not None and not self.store.read_only)

    def close(self) -> None:
        """Wait for the disk."""
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
