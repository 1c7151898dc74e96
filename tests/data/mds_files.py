"""MDS shards of the tests' own, whose columns may be of any encoding."""

from __future__ import annotations

import json
import pathlib

import numpy as np


def write(path: pathlib.Path, rows: list[dict[str, bytes]], encodings: dict[str, str]) -> None:
    """Write a shard and the index of its folder; values are bytes as their encodings want them."""
    names = list(encodings)
    samples = []
    for row in rows:
        sizes = np.array([len(row[name]) for name in names], "<u4").tobytes()
        samples.append(sizes + b"".join(row[name] for name in names))
    head = 4 * (len(samples) + 2)
    offsets = np.cumsum([head, *map(len, samples)]).astype("<u4")
    data = np.uint32(len(samples)).tobytes() + offsets.tobytes() + b"".join(samples)
    path.write_bytes(data)
    shard = {
        "format": "mds", "column_names": names, "column_encodings": list(encodings.values()),
        "column_sizes": [None] * len(names), "samples": len(rows),
        "raw_data": {"basename": path.name, "bytes": len(data)},
    }  # fmt: skip
    (path.parent / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
