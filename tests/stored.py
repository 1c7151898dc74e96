"""Rows for stores of visual tokens, and what tests ask of them."""

from __future__ import annotations

import pathlib

import ml_dtypes
import numpy as np

from jaxvlm.cache.store import segment_files
from jaxvlm.cache.store.rows import Store

FACTS = {"weights": "5b1d", "images": {"size": 224, "mean": 0.5}, "platform": "cpu"}


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "big")


def row_of(i: int, width: int = 8) -> np.ndarray:
    """Row i, and no other one."""
    x = np.arange(3 * width, dtype=np.float32).reshape(3, width) + 100 * i
    return x.astype(ml_dtypes.bfloat16) if i % 2 else x


def same(got: np.ndarray | None, i: int, width: int = 8) -> bool:
    want = row_of(i, width)
    return got is not None and got.dtype == want.dtype and got.tobytes() == want.tobytes()


def filled(opened, rows=range(6), a_file: int = 3) -> Store:
    """A closed store with so many rows a segment."""
    store = opened()
    for i in rows:
        store.put(key_of(i), row_of(i))
        if i % a_file == a_file - 1:
            store.flush()
    store.close()
    return store


def segments(store: Store) -> list[pathlib.Path]:
    """By their rows: the clock of a file system is too coarse to order them."""
    found = segment_files.list_folder(store.folder).segments
    return sorted(found, key=lambda path: min(segment_files.read_segment(path).rows))


def assert_none_wrong(store: Store, rows: range, width: int = 8) -> int:
    """Each row is right or absent; how many are right."""
    got = {i: store.get(key_of(i)) for i in rows}
    assert all(same(x, i, width) for i, x in got.items() if x is not None)
    return sum(x is not None for x in got.values())
