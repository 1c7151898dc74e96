"""Embeds many items: in parts from which an interrupted run resumes, then in one file."""

from __future__ import annotations

import contextlib
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

from jaxvlm.checkpoint.digest import digests
from jaxvlm.checkpoint.run_folder import local_to_read
from jaxvlm.config import ConfigError
from jaxvlm.data.pairs.examples import Item
from jaxvlm.data.sources import member_names
from jaxvlm.inference import embedding_files
from jaxvlm.inference.encoder import Encoder
from jaxvlm.inference.items import EmbedConfig, embed_items
from jaxvlm.inference.quantize import KINDS, MIN_FOR_RANGES, quantize, ranges_of
from jaxvlm.inference.resumable_array import ResumableArray
from jaxvlm.inference.vlm import VLM
from jaxvlm.parallel.distributed.processes import barrier
from jaxvlm.parallel.sharding import sum_over_processes
from jaxvlm.train.progress import Progress

_log = logging.getLogger(__name__)
_HASHED = {".json", ".txt", ".jinja", ".model"}  # files of a checkpoint other than weights


def in_parts(
    model: Encoder | VLM,
    items: Sequence[Item],
    folder: pathlib.Path,
    config: EmbedConfig,
    checkpoint: str = "",
    title: str = "embed",
) -> ResumableArray:
    """Embeds ``items`` into files in ``folder``; parts from an interrupted run are reused.

    Args:
        model: model that computes the embeddings.
        items: items to embed, all of them on every process.
        folder: folder of the parts, which every process reads.
        config: see :class:`EmbedConfig`.
        checkpoint: the model's folder; its tokenizer and processor files are part of the identity
            of the embeddings.
        title: title of the progress line.

    Returns:
        f32[len(items), E], stored on disk.

    Raises:
        ConfigError: ``folder`` holds parts with another identity, or a setting is out of range.
        DataError: an image can't be read.
    """
    if not 0 <= config.dims <= model.width:
        raise ConfigError(f"dims={config.dims}: the model's embeddings have {model.width}")
    parts = ResumableArray(folder, (len(items), config.dims or model.width), config.part_size)
    embeddings_identity = identity(model, items, config, checkpoint)
    first = jax.process_index() == 0
    done = parts.begin(embeddings_identity) if first else [False] * len(parts.slices)
    done = (sum_over_processes(np.asarray(done, np.float64)) > 0).tolist()
    ready = sum(s.stop - s.start for s, is_done in zip(parts.slices, done) if is_done)
    with Progress(len(items), start=ready, title=title) as progress:
        if ready:
            progress.log(f"{title}: {ready} of {len(items)} embeddings come from an earlier run")
        for number, (some, is_done) in enumerate(zip(parts.slices, done)):
            if is_done:
                continue
            begun = time.monotonic()
            embeddings = embed_items(model, items[some], config)
            if first:
                parts.write(number, embeddings)
            ready += len(embeddings)
            rate = len(embeddings) / max(time.monotonic() - begun, 1e-9)
            progress.update(ready, {"items/s": rate})
    barrier("embeddings")  # before other processes read the parts
    return parts


def in_memory(
    model: Encoder | VLM, items: Sequence[Item], config: EmbedConfig, title: str = "embed"
) -> np.ndarray:
    """Embeds ``items`` as :func:`in_parts` does, but in memory: f32[len(items), E]."""
    parts = []
    with Progress(len(items), title=title) as progress:
        for first in range(0, len(items), config.part_size):
            some = items[first : first + config.part_size]
            parts.append(embed_items(model, some, config))
            progress.update(first + len(some), {})
    return np.concatenate(parts)


def remove(folder: pathlib.Path) -> None:
    """Deletes the parts in ``folder``, once every process has finished reading them."""
    barrier("embeddings")
    if jax.process_index() == 0:
        shutil.rmtree(folder)


def identity(
    model: Encoder | VLM, items: Sequence[Item], config: EmbedConfig, checkpoint: str = ""
) -> dict[str, str]:
    """Digests of everything that embeddings depend on: the model, the items and the settings.

    The model counts by its weights, configuration and checkpoint files, an image by name, size and
    modification time. The batch size is left out: it changes embeddings by rounding alone.
    """
    item_hash = hashlib.sha256()
    for item in items:
        stat: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            member = member_names.parse(item.image)
            file = member.file if member else item.image
            status = os.stat(file) if file else None
            stat = (status.st_size, status.st_mtime_ns) if status else ()
        item_hash.update(json.dumps([*item, *stat]).encode() + b"\n")
    names = sorted(model.params)
    weights = digests(jax.tree.leaves([model.params[name] for name in names]))
    model_hash = hashlib.sha256(repr((names, weights, model.model.config)).encode())
    root = local_to_read(checkpoint, "checkpoint")
    for path in sorted({*root.glob("*"), *root.glob("*/*")} if checkpoint else ()):
        if path.suffix in _HASHED and path.is_file():
            model_hash.update(path.name.encode() + path.read_bytes())
    return {
        "model": model_hash.hexdigest(),
        "items": item_hash.hexdigest(),
        "settings": f"dims={config.dims}, part_size={config.part_size}, {config.instruction!r}, "
        f"max_length={config.max_length}",
    }


def check(count: int, size: int, kind: str, ranges: np.ndarray | None) -> None:
    """Refuses settings that :func:`write` could not use, before the embeddings are computed.

    Args:
        count: number of embeddings.
        size: number of dims of an embedding.
        kind: ``int8``, ``binary`` or ``ubinary``; "" is float32.
        ranges: f32[2, E] of other embeddings, for int8.

    Raises:
        ConfigError: ``kind`` is unknown, or ranges are missing, unused or of another width.
    """
    if kind and kind not in KINDS:
        raise ConfigError(f"--quantize={kind}: choose from {', '.join(KINDS)}")
    if ranges is not None and kind != "int8":
        raise ConfigError("--ranges is for int8 embeddings: add --quantize=int8, or drop --ranges")
    if ranges is not None and ranges.shape[1] != size:
        raise ConfigError(f"--ranges has {ranges.shape[1]} dims, but the embeddings have {size}")
    if kind == "int8" and ranges is None and count < MIN_FOR_RANGES:
        if count < 2:
            raise ConfigError(
                "--quantize=int8: the ranges of dims can't be computed from one embedding; give "
                "those of a corpus with --ranges=FILE"
            )
        _log.warning(
            "int8: the ranges come from only %d embeddings; give those of a corpus with --ranges",
            count,
        )


def write(
    parts: ResumableArray,
    records: Sequence[dict[str, str]],
    output: pathlib.Path,
    kind: str = "",
    ranges: np.ndarray | None = None,
) -> tuple[int, int]:
    """Writes ``parts`` to one file, quantized if ``kind`` says so, and deletes them.

    Process 0 writes.

    Args:
        parts: result of :func:`in_parts`.
        records: id, text and image of each embedding, for formats that store them.
        output: file to write; see :mod:`jaxvlm.inference.embedding_files`.
        kind: ``int8``, ``binary`` or ``ubinary``; "" is float32.
        ranges: f32[2, E] for int8; computed from these embeddings if ``None``.

    Returns:
        Shape of the written array.

    Raises:
        ConfigError: the format or ``kind`` is unknown, or ``ranges`` do not fit.
    """
    count, size = parts.shape
    if jax.process_index() == 0:
        if kind == "int8" and ranges is None:
            ranges = ranges_of(parts)
        stored_ranges = ranges if kind == "int8" else None
        dtype = {"": "float32", "ubinary": "uint8"}.get(kind, "int8")
        blocks: Iterable[Any] = (quantize(x, kind, stored_ranges) for x in parts) if kind else parts
        shape = (count, -(-size // 8) if kind.endswith("binary") else size)
        content = (records, blocks, shape, np.dtype(dtype), stored_ranges)
        embedding_files.write(output, embedding_files.EmbeddingTable(*content))
    remove(parts.folder)
    return count, -(-size // 8) if kind.endswith("binary") else size
