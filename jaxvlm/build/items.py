"""Items — a text, a picture, or both — and the vectors that any embedding model makes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxvlm.build.encoder import Encoder
from jaxvlm.build.loaded import Loaded
from jaxvlm.config import ConfigError
from jaxvlm.data import tables
from jaxvlm.data.chat import INSTRUCTION
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.examples import Item
from jaxvlm.data.formats import BadItem

_log = logging.getLogger("jaxvlm.build")
_FIELDS = ("id", "text", "image", "instruction")


def read(name: str) -> tuple[list[Item], list[str]]:
    """Items of a file, and their ids.

    Args:
        name: what :func:`jaxvlm.data.tables.read` reads; a record has ``text``, ``image`` (a path,
            relative to the file's folder) or both, ``instruction`` and ``id``.

    Returns:
        Items in order, and an id each, "" where the file has none.

    Raises:
        DataError: the file, or a record of it, can't be read.
    """
    raw, problems = tables.read(name)
    refuse(name, problems)
    items, ids = [], []
    unread: set[str] = set()
    seen: set[str] = set()
    for record in raw:
        try:
            if not isinstance(record.fields, dict):
                raise BadItem("not a JSON object")
            row = {field: value for field, value in record.fields.items() if value is not None}
            unread |= row.keys() - set(_FIELDS)
            text, image, told = (row.get(field, "") for field in _FIELDS[1:])
            if bad := [n for n in _FIELDS[1:] if not isinstance(row.get(n, ""), str)]:
                raise BadItem(f"{bad[0]!r} is not text")
            items.append(Item.of(text, record.locate(image) if image else "", told))
            ids.append(str(row.get("id", "")))
            if ids[-1] in seen:
                raise BadItem(f"id {ids[-1]!r} is there twice; what is written goes by it")
            seen.update(ids[-1:] if ids[-1] else ())
        except BadItem as bad:
            problems.append(Problem(record.where, bad.reason, bad.detail))
    refuse(name, problems)
    if unread:
        _log.warning("%s: fields that are not read: %s", name, ", ".join(sorted(unread)[:5]))
    return items, ids


def refuse(name: str, problems: Sequence[Problem]) -> None:
    """Vectors go by records, so none may be left out.

    Raises:
        DataError: there are problems; it names the first.
    """
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise DataError(f"{name}: {problems[0]}{more}")


def embed_items(
    model: Encoder | Loaded,
    items: Sequence[Item],
    batch_size: int = 64,
    dims: int = 0,
    instruction: str = "",
) -> np.ndarray:
    """Vectors of items, by whatever model makes vectors.

    Args:
        model: an encoder, which takes a text or a picture; or a decoder, which takes both.
        items: see :class:`~jaxvlm.data.examples.Item`.
        batch_size: items at a time, over all devices.
        dims: keep the first so many, of unit length again; 0 is all, as the model makes them.
        instruction: of items that have none. A decoder reads it as the system's turn; a text
            encoder in front of the text, as sentence-transformers' prompts.

    Returns:
        f32[len(items), E or dims], in their order.

    Raises:
        ConfigError: ``dims`` is out of range, or an item is not what the model takes.
        DataError: a picture can't be read.
    """
    if not 0 <= dims <= model.width:
        raise ConfigError(f"dims={dims}: the model's vectors have {model.width}")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: at least 1")
    out = np.zeros((len(items), dims or model.width), np.float32)
    if isinstance(model, Encoder):
        _encoded(model, items, out, batch_size, instruction)
    else:
        _decoded(model, items, out, batch_size, instruction)
    return out


def cut(vectors: np.ndarray, dims: int) -> np.ndarray:
    """The first ``dims`` of f32[N, E], of unit length again (Matryoshka); 0: as they are.

    Source: arXiv 2205.13147; sentence-transformers' ``truncate_embeddings``.
    """
    if not dims:
        return vectors
    some = vectors[:, :dims]
    return some / np.maximum(np.linalg.norm(some, axis=1, keepdims=True), 1e-12)


def _encoded(
    model: Encoder, items: Sequence[Item], out: np.ndarray, batch_size: int, instruction: str
) -> None:
    pictures = [i for i, item in enumerate(items) if item.image]
    words = [i for i, item in enumerate(items) if not item.image]
    for i in pictures:
        if items[i].words:
            raise ConfigError(
                f"item {i + 1}, {items[i].image}: it has a picture and a text; {model.name} "
                "makes a vector of either, not of both"
            )
        if items[i].instruction or instruction:
            raise ConfigError(
                f"item {i + 1}, {items[i].image}: {model.name} takes an instruction with texts "
                "alone"
            )
    # As a run reads them, and as sentence-transformers' prompts: no space comes between.
    texts = [(items[i].instruction or instruction) + items[i].text for i in words]
    if words:
        out[words] = cut(model.encode_text(texts, batch_size), _dims(model, out))
    if pictures:
        found = model.encode_image([items[i].image for i in pictures], batch_size)
        out[pictures] = cut(found, _dims(model, out))


def _dims(model: Encoder | Loaded, out: np.ndarray) -> int:
    """Of a prefix; 0 where ``out`` takes whole vectors."""
    return out.shape[1] if out.shape[1] < model.width else 0


def _decoded(
    model: Loaded, items: Sequence[Item], out: np.ndarray, batch_size: int, instruction: str
) -> None:
    """Items of one instruction and of like length share a batch; rows are filled up to a power."""

    def like(i: int) -> tuple[str, bool, int]:
        item = items[i]
        return item.instruction or instruction, bool(item.image), len(item.text)

    order = sorted(range(len(items)), key=like)
    for where in _runs(order, lambda i: like(i)[:2], batch_size):
        queries = [([items[i].image] if items[i].image else [], items[i].text) for i in where]
        filled = queries + queries[:1] * (min(batch_size, _power(len(where))) - len(where))
        told = like(where[0])[0] or INSTRUCTION
        out[where] = model.embed(filled, told, _dims(model, out))[: len(where)]


def _runs(order: Sequence[int], key: Callable[[int], Any], most: int) -> list[list[int]]:
    """Pieces of ``order`` of one key each, of at most ``most``."""
    runs: list[list[int]] = []
    for i in order:
        if not runs or len(runs[-1]) == most or key(runs[-1][0]) != key(i):
            runs.append([])
        runs[-1].append(i)
    return runs


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
