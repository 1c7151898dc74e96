"""Reads items (a text, an image, or both) and embeds them with any embedding model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import ConfigError, DataConfig
from jaxvlm.data.conversations.tokenize import INSTRUCTION
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.pairs.examples import Item
from jaxvlm.data.sources import members, tables
from jaxvlm.data.sources.conversation_formats import id_of
from jaxvlm.data.sources.fields import Allowed, BadItem
from jaxvlm.data.sources.member_names import InFile
from jaxvlm.evals.zero_shot import unit
from jaxvlm.inference.encoder import Encoder
from jaxvlm.inference.input_types import InputType
from jaxvlm.inference.vlm import VLM

_FIELDS = ("id", "text", "image", "instruction")


@dataclasses.dataclass(frozen=True)
class EmbedConfig:
    """Settings of how items are embedded."""

    batch_size: int = 64
    """Number of items per batch, over all devices."""
    dims: int = 0
    """Number of dims to truncate embeddings to, at unit length again; 0 keeps all."""
    instruction: str = ""
    """Instruction for items that have none of their own. A decoder reads it as the system turn; a
    text encoder reads it directly before the text, like sentence-transformers' prompts."""
    max_length: int = 0
    """Maximum number of tokens of an item, whose text is truncated; 0: the model's own limit."""
    part_size: int = 4096
    """Number of items between two writes, which a kill can lose and memory has to hold."""

    def of_type(self, own: InputType) -> EmbedConfig:
        """Returns these settings for items of a type that the model knows."""
        return dataclasses.replace(self, **own._asdict())


DEFAULT = EmbedConfig()


def read(name: str, config: DataConfig = tables.DEFAULT) -> tuple[list[Item], list[str]]:
    """Reads items and their ids from a file.

    Args:
        name: file that :func:`jaxvlm.data.sources.tables.each` reads; a record has ``text``,
            ``image`` (a path relative to the file's folder) or both, and optionally
            ``instruction`` and ``id``.
        config: data settings that say how the file is read.

    Returns:
        The items in order, and the id of each, "" where the record has none.

    Raises:
        DataError: the file or a record of it can't be read.
    """
    unread, problems = list[Problem](), list[Problem]()
    allowed = Allowed.of(config.ignored_fields, config.literal_markers)
    items, ids = [], []
    seen: set[str] = set()
    for record in tables.each(name, config):
        if isinstance(record, Problem):
            unread.append(record)
            continue
        try:
            if not isinstance(record.fields, dict):
                raise BadItem("not a JSON object")
            given = {field: value for field, value in record.fields.items() if value is not None}
            given = allowed.fields_of("record", given, _FIELDS)
            text, image, instruction = (given.get(field, "") for field in _FIELDS[1:])
            if bad := [n for n in _FIELDS[1:] if not isinstance(given.get(n, ""), str)]:
                raise BadItem(f"{bad[0]!r} is not text")
            text = members.text(text) if isinstance(text, InFile) else text
            if image:
                allowed.refuse_markers(text)
            items.append(Item.of(text, record.locate(image) if image else "", instruction))
            ids.append(id_of(given.get("id"), ""))
            if ids[-1] in seen:
                raise BadItem(f"id {ids[-1]!r} occurs twice; ids must be unique in the output")
            seen.update(ids[-1:] if ids[-1] else ())
        except BadItem as bad:
            problems.append(Problem(record.where, bad.reason, bad.detail))
    refuse(name, [*unread, *problems])
    return items, ids


def refuse(name: str, problems: Sequence[Problem]) -> None:
    """Refuses a file with bad records: embeddings are matched to records, so none may be skipped.

    Raises:
        DataError: there are problems; the message has the first.
    """
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise DataError(f"{name}: {problems[0]}{more}")


def embed_items(
    model: Encoder | VLM, items: Sequence[Item], config: EmbedConfig = DEFAULT
) -> np.ndarray:
    """Embeds items with an encoder or a decoder.

    Args:
        model: an encoder, which takes a text or an image; or a decoder, which takes both.
        items: see :class:`~jaxvlm.data.pairs.examples.Item`.
        config: see :class:`EmbedConfig`.

    Returns:
        f32[len(items), E or dims], in the order of ``items``.

    Raises:
        ConfigError: ``dims`` is out of range, or the model does not take such an item.
        DataError: an image can't be read.
    """
    if not 0 <= config.dims <= model.width:
        raise ConfigError(f"dims={config.dims}: the model's embeddings have {model.width}")
    if config.batch_size < 1:
        raise ConfigError(f"batch_size={config.batch_size} must be at least 1")
    out = np.zeros((len(items), config.dims or model.width), np.float32)
    if isinstance(model, Encoder):
        _embed_with_encoder(model, items, out, config)
    else:
        _embed_with_decoder(model, items, out, config)
    if bad := np.flatnonzero(~np.isfinite(out).all(axis=1)).tolist():
        raise ConfigError(
            f"the model's embedding of item {bad[0]} has values that are NaN or infinite, and of "
            f"{len(bad) - 1} others; its weights are damaged, or too large for its dtype"
        )
    return out


def truncate(embeddings: np.ndarray, dims: int) -> np.ndarray:
    """Truncates f32[N, E] to the first ``dims`` dims, at unit length again; 0 changes nothing.

    Source: Matryoshka, arXiv 2205.13147; sentence-transformers' ``truncate_embeddings``.
    """
    if not dims:
        return embeddings
    return unit(embeddings[:, :dims])


def _embed_with_encoder(
    model: Encoder, items: Sequence[Item], out: np.ndarray, config: EmbedConfig
) -> None:
    images = [i for i, item in enumerate(items) if item.image]
    words = [i for i, item in enumerate(items) if not item.image]
    for i in images:
        if items[i].words:
            raise ConfigError(
                f"item {i + 1}, {items[i].image}: it has an image and a text, but "
                f"{model.name} embeds either, not both"
            )
        if items[i].instruction:
            raise ConfigError(
                f"item {i + 1}, {items[i].image}: {model.name} takes an instruction only with texts"
            )
    # No space in between, as in training runs and in sentence-transformers' prompts.
    texts = [(items[i].instruction or config.instruction) + items[i].text for i in words]
    if words:
        embeddings = model.encode_text(texts, config.batch_size, config.max_length)
        out[words] = truncate(embeddings, _dims(model, out))
    if images:
        embeddings = model.encode_image([items[i].image for i in images], config.batch_size)
        out[images] = truncate(embeddings, _dims(model, out))


def _dims(model: Encoder | VLM, out: np.ndarray) -> int:
    """The number of dims to truncate to; 0 where ``out`` takes all dims."""
    return out.shape[1] if out.shape[1] < model.width else 0


def _embed_with_decoder(
    model: VLM, items: Sequence[Item], out: np.ndarray, config: EmbedConfig
) -> None:
    """Batches items of one instruction and similar length; pads a batch to a power of two."""

    def sort_key(i: int) -> tuple[str, bool, int]:
        item = items[i]
        return item.instruction or config.instruction, bool(item.image), len(item.text)

    order = sorted(range(len(items)), key=sort_key)
    for indices in _batches(order, lambda i: sort_key(i)[:2], config.batch_size):
        queries = [([items[i].image] if items[i].image else [], items[i].text) for i in indices]
        count = min(config.batch_size, _next_power_of_two(len(indices)))
        padded = queries + queries[:1] * (count - len(indices))
        system = sort_key(indices[0])[0] or INSTRUCTION
        how = (system, _dims(model, out), config.max_length)
        out[indices] = model.embed(padded, *how)[: len(indices)]


def _batches(order: Sequence[int], key: Callable[[int], Any], most: int) -> list[list[int]]:
    """Splits ``order`` into batches of one key each and at most ``most`` items."""
    batches: list[list[int]] = []
    for i in order:
        if not batches or len(batches[-1]) == most or key(batches[-1][0]) != key(i):
            batches.append([])
        batches[-1].append(i)
    return batches


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
