"""Vectors of many items: in parts that survive a kill, and then in one file."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import shutil
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxvlm.build.encoder import Encoder
from jaxvlm.build.items import embed_items
from jaxvlm.build.loaded import Loaded
from jaxvlm.config import ConfigError
from jaxvlm.data import tars
from jaxvlm.data.examples import Item
from jaxvlm.infer.quantize import FEW, KINDS, quantize, ranges_of
from jaxvlm.io import vectors
from jaxvlm.io.digest import digests
from jaxvlm.io.parts import Parts
from jaxvlm.parallel.sharding import sum_over_processes
from jaxvlm.train.progress import Progress

_log = logging.getLogger("jaxvlm.build")
_READ = {".json", ".txt", ".jinja", ".model"}  # what a checkpoint's folder says beside weights


@dataclasses.dataclass(frozen=True)
class Embedding:
    """How items become vectors."""

    batch_size: int = 64
    """Items at a time, over all devices."""
    dims: int = 0
    """Keep the first so many, of unit length again; 0 is all."""
    instruction: str = ""
    """Of items that have none."""
    part_size: int = 4096
    """Items between two writes: what a kill can cost, and what is in memory."""


def in_parts(
    model: Encoder | Loaded,
    items: Sequence[Item],
    folder: pathlib.Path,
    how: Embedding,
    checkpoint: str = "",
    title: str = "embed",
) -> Parts:
    """Vectors of ``items`` in ``folder``; those that an interrupted run left there are kept.

    Args:
        model: what makes them.
        items: of which all processes hold all.
        folder: read by all processes where there are several.
        how: see :class:`Embedding`.
        checkpoint: the model's folder; what its tokenizer and processor say is part of what the
            vectors are made from.
        title: of the line of progress.

    Returns:
        f32[len(items), E], on disk.

    Raises:
        ConfigError: ``folder`` holds vectors of something else, or a setting is out of range.
        DataError: a picture can't be read.
    """
    if not 0 <= how.dims <= model.width:
        raise ConfigError(f"dims={how.dims}: the model's vectors have {model.width}")
    parts = Parts(folder, (len(items), how.dims or model.width), how.part_size)
    made_from = identity(model, items, how, checkpoint)
    first = jax.process_index() == 0
    done = parts.begin(made_from) if first else [False] * len(parts.slices)
    done = (sum_over_processes(np.asarray(done, np.float64)) > 0).tolist()
    ready = sum(s.stop - s.start for s, is_done in zip(parts.slices, done) if is_done)
    with Progress(len(items), start=ready, title=title) as progress:
        if ready:
            progress.log(f"{title}: {ready} of {len(items)} vectors are there from before")
        for number, (some, is_done) in enumerate(zip(parts.slices, done)):
            if is_done:
                continue
            begun = time.monotonic()
            made = embed_items(model, items[some], how.batch_size, how.dims, how.instruction)
            if first:
                parts.write(number, made)
            ready += len(made)
            rate = len(made) / max(time.monotonic() - begun, 1e-9)
            progress.update(ready, {"vec/s": rate})
    _meet()  # before others read them
    return parts


def in_memory(
    model: Encoder | Loaded, items: Sequence[Item], how: Embedding, title: str = "embed"
) -> np.ndarray:
    """f32[len(items), E]; as :func:`in_parts`, of which nothing outlives the process."""
    made = []
    with Progress(len(items), title=title) as progress:
        for first in range(0, len(items), how.part_size):
            some = items[first : first + how.part_size]
            made.append(embed_items(model, some, how.batch_size, how.dims, how.instruction))
            progress.update(first + len(some), {})
    return np.concatenate(made)


def remove(folder: pathlib.Path) -> None:
    """Delete vectors that are needed no more, once every process is here."""
    _meet()
    if jax.process_index() == 0:
        shutil.rmtree(folder)


def _meet() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jaxvlm vectors")


def identity(
    model: Encoder | Loaded, items: Sequence[Item], how: Embedding, checkpoint: str = ""
) -> dict[str, str]:
    """What vectors depend on, a digest for each thing: weights, files, items, settings.

    A picture counts by name, size and time of its last change. The batch size is not in it: it
    changes vectors by rounding alone.
    """
    seen = hashlib.sha256()
    for item in items:
        stat: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            file = item.image.split("::")[0] if tars.is_member(item.image) else item.image
            found = os.stat(file) if file else None
            stat = (found.st_size, found.st_mtime_ns) if found else ()
        seen.update(json.dumps([*item, *stat]).encode() + b"\n")
    names = sorted(model.params)
    weights = digests(jax.tree.leaves([model.params[name] for name in names]))
    of_model = hashlib.sha256(repr((names, weights, model.model.config)).encode())
    root = pathlib.Path(checkpoint)
    for path in sorted({*root.glob("*"), *root.glob("*/*")} if checkpoint else ()):
        if path.suffix in _READ and path.is_file():
            of_model.update(path.name.encode() + path.read_bytes())
    return {
        "model": of_model.hexdigest(),
        "items": seen.hexdigest(),
        "settings": f"dims={how.dims}, part_size={how.part_size}, {how.instruction!r}",
    }


def check(count: int, size: int, kind: str, ranges: np.ndarray | None) -> None:
    """Refuse what :func:`write` could not do, before work is spent on it.

    Args:
        count: vectors.
        size: their dims.
        kind: ``int8``, ``binary`` or ``ubinary``; "" is float32.
        ranges: for int8, of other vectors.

    Raises:
        ConfigError: an unknown kind, or ranges that are missing, of no use or of another width.
    """
    if kind and kind not in KINDS:
        raise ConfigError(f"--quantize={kind}: choose from {', '.join(KINDS)}")
    if ranges is not None and kind != "int8":
        raise ConfigError("--ranges are of int8 vectors: give --quantize=int8, or leave them out")
    if ranges is not None and ranges.shape[1] != size:
        raise ConfigError(f"--ranges are of {ranges.shape[1]} dims, the vectors have {size}")
    if kind == "int8" and ranges is None and count < FEW:
        if count < 2:
            raise ConfigError(
                "--quantize=int8: the ranges of dims can't be told from one vector; give those of "
                "a corpus, --ranges=FILE"
            )
        _log.warning("int8: ranges from %d vectors; from more they are steadier (--ranges)", count)


def write(
    parts: Parts,
    rows: Sequence[dict[str, str]],
    output: pathlib.Path,
    kind: str = "",
    ranges: np.ndarray | None = None,
) -> tuple[int, int]:
    """``parts`` in one file, in fewer bits if wanted; then they are removed. Process 0 writes.

    Args:
        parts: of :func:`in_parts`.
        rows: what each vector is of, for formats that hold it.
        output: see :mod:`jaxvlm.io.vectors`.
        kind: ``int8``, ``binary`` or ``ubinary``; "" is float32.
        ranges: f32[2, E] for int8; from these vectors if ``None``.

    Returns:
        The shape of what is written.

    Raises:
        ConfigError: an unknown format or kind, or ranges that do not fit.
    """
    count, size = parts.shape
    if jax.process_index() == 0:
        if kind == "int8" and ranges is None:
            ranges = ranges_of(parts)
        held = ranges if kind == "int8" else None
        dtype = {"": "float32", "ubinary": "uint8"}.get(kind, "int8")
        made: Iterable[Any] = (quantize(x, kind, held) for x in parts) if kind else parts
        shape = (count, -(-size // 8) if kind.endswith("binary") else size)
        vectors.write(output, vectors.Table(rows, made, shape, np.dtype(dtype), held))
    remove(parts.folder)
    return count, -(-size // 8) if kind.endswith("binary") else size
