"""Pairs packed on disk, which a run opens without reading or tokenizing them.

``jaxvlm data pack`` writes a folder as it does for conversations: ``packed.json``, arrays as
``.npy`` that are mapped into memory (token ids, texts, examples), images as they are in tar files,
and the tokenizer.
"""

from __future__ import annotations

import logging
import pathlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations.content import PACKED_TOKENIZER
from jaxvlm.data.errors import DataError, Problem, enforce
from jaxvlm.data.images import image_files
from jaxvlm.data.packed import checks, image_shards, mapped_arrays, packed_files
from jaxvlm.data.packed.mapped_arrays import ArrayFiles, Chosen, Lazy, Spans, Strings, flat
from jaxvlm.data.pairs import sampler
from jaxvlm.data.pairs.collate_items import Collator, Encoded
from jaxvlm.data.pairs.column import Column, Measured
from jaxvlm.data.pairs.corpus import Contents, PairCorpus, digest_of, image_caches
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.data.sources.member_names import is_remote
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.data.tokenizer.text_tokenizer import TextTokenizer
from jaxvlm.stores.store_requests import concurrently

_log = logging.getLogger("jaxvlm.data")
_SIDES = ("query", "document")
_OF_ITEM = ("first", "length", "image", "patches", "content", "instruction", "image_path")
"""Arrays of a column that are compared whole with their digests when a set is opened. The others
are token ids and what images' tokens are, of which each item has a checksum, and texts."""
_OF_EXAMPLE = ("query", "document", "first", "score", "task", "group")
"""Arrays of examples, which are compared whole too: the order of a run follows from them."""
_MEASURED = ("tiles", "position_rows", "taps", "unknown")


def made_for(config: DataConfig, collators: tuple[Collator, Collator]) -> dict[str, Any]:
    """What the contents of a packed set are a function of, besides its records; JSON-able."""
    pairs = config.pairs
    names = ("max_length", "max_pixels", "on_bad_record")
    of_pairs = (
        *("max_query_length", "max_document_length", "query_instruction", "document_instruction"),
        *("require_negatives", "tasks"),
    )
    made: dict[str, Any] = {f"data.{name}": getattr(config, name) for name in names}
    made |= {f"data.pairs.{name}": getattr(pairs, name) for name in of_pairs}
    for side, collator in zip(_SIDES, collators, strict=True):
        size, patching, most = collator.image
        made |= {f"{side} {name}": value for name, value in collator.fingerprint().items()}
        made[f"{side} image"] = [size, list(patching or ()), most]
        made[f"{side} lengths"] = list(collator.lengths)
        tokenizer = collator.tokenizer
        made[f"{side} tokenizer"] = checks.tokenizer_digest(tokenizer) if tokenizer else ""
    return made


def write(
    folder: pathlib.Path,
    corpus: PairCorpus,
    made: dict[str, Any],
    tokenizer: ChatTokenizer | TextTokenizer | None,
    config: DataConfig,
    shard_bytes: int,
) -> dict[str, Any]:
    """Write a set into an empty folder.

    Args:
        folder: exists, and is empty.
        corpus: what is packed.
        made: result of :func:`made_for`.
        tokenizer: that of the queries' and the documents' tokens; ``None``: there are none.
        config: data settings.
        shard_bytes: size of a tar file of images, about.

    Returns:
        What ``packed.json`` says.

    Raises:
        DataError: an image can't be read any more, or has another size than when its header was
            read; or queries and documents have different tokenizers.
        OSError: the disk is full, for instance.
    """
    if made["query tokenizer"] != made["document tokenizer"]:
        raise DataError("queries and documents with different tokenizers can't be packed together")
    columns = {"query": corpus.queries, "document": corpus.documents}
    number: dict[str, int] = {}
    for column in columns.values():
        for path in column.encoded.paths:
            number.setdefault(path, len(number))
    names = image_shards.write(folder, list(number), range(len(number)), shard_bytes)
    if digest_of(corpus) != corpus.digest:
        raise DataError("images changed while they were packed; pack the data again")
    mixed = config.pairs.tasks == "mixed"
    contents = np.stack([corpus.query_content, corpus.positive_content], axis=1)
    tasks = np.zeros_like(corpus.task) if mixed else corpus.task
    group = sampler.groups_of(contents, tasks)
    mapped_arrays.save(folder, _of_examples(corpus, group) | flat("path", names))
    probes = {}
    for side, column in columns.items():
        where = np.asarray([number[path] for path in column.encoded.paths], np.int64)
        own = _of_column(column, corpus.content[side], where, names)
        mapped_arrays.save(folder, own, f"{side}_")
        spans = column.encoded.spans
        probes[side] = checks.probes(spans, range(len(spans)))
    if tokenizer is not None:
        tokenizer.save(folder / PACKED_TOKENIZER)
    facts = {
        "digest": corpus.digest,
        "has_scores": corpus.has_scores,
        "has_labels": corpus.label is not None,
        "tasks": corpus.tasks,
        "most_documents": corpus.most_documents,
        "truncated": corpus.truncated,
        **{
            side: {name: getattr(column.measured, name) for name in _MEASURED}
            for side, column in columns.items()
        },
    }
    return packed_files.seal(
        folder,
        {
            "kind": packed_files.PAIRS,
            "made_for": made,
            "facts": facts,
            "records": len(corpus.examples),
            "total": len(corpus.examples) + len(corpus.problems),
            "left_out": [list(problem) for problem in corpus.problems],
            "images": len(number),
            "probes": probes,
            "queries": len(corpus.queries.items),
            "documents": len(corpus.documents.items),
            "tokens": sum(int(column.encoded.length.sum()) for column in columns.values()),
        },
    )


def _of_examples(corpus: PairCorpus, group: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays of the examples, by name."""
    arrays = {
        **{name: getattr(corpus, name) for name in _OF_EXAMPLE if name != "group"},
        "group": group,
        **flat("id", [example.id for example in corpus.examples]),
    }
    if corpus.label is not None:
        labels = {e.label: None for e in corpus.examples if e.label}  # numbered in this order
        arrays |= {"label": corpus.label} | flat("label_name", list(labels))
    return arrays


def _of_column(
    column: Column, content: np.ndarray, where: np.ndarray, names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Arrays of a column, by name."""
    encoded, items = column.encoded, column.items
    instructions = {item.instruction: None for item in items}
    number = {instruction: i for i, instruction in enumerate(instructions)}
    checksum = _Checksums(encoded, Chosen(names, where))
    return {
        **{name: getattr(encoded, name) for name in ("tokens", "first", "length", "image")},
        "patches": column.patches,
        "content": content,
        "image_path": where,
        "instruction": np.asarray([number[item.instruction] for item in items], np.int32),
        "checksum": np.fromiter(map(checksum.of_item, range(len(items))), np.uint32),
        **flat("instruction_text", list(instructions)),
        **flat("text", [item.text for item in items]),
        **Spans.arrays(encoded.spans),
    }


class _Checksums:
    """Checksums of what a batch has of an item and no start reads: tokens, image, its tokens."""

    def __init__(self, encoded: Encoded, names: Sequence[str]):
        self._encoded, self._names, self._span = encoded, names, checks.SpanChecksums()

    def of_item(self, item: int) -> int:
        """The checksum of an item."""
        encoded, image = self._encoded, int(self._encoded.image[item])
        found = zlib.crc32(encoded.ids(item).tobytes())
        if image >= 0:
            name = self._names[image].encode("utf-8", "surrogateescape")
            found = zlib.crc32(name, found)
        if image >= 0 and encoded.spans:
            found = zlib.crc32(b"%d" % self._span.of(encoded.spans[image]), found)
        return found


def open_set(spec: str, config: DataConfig, collators: tuple[Collator, Collator]) -> PairCorpus:
    """Open a packed set: its texts, tokens and images stay on disk.

    Args:
        spec: its folder, or its URL.
        config: data settings of the run.
        collators: the run's, of queries and of documents.

    Raises:
        DataError: it is damaged, was packed for other settings, or too many of its records were
            left out.
        StoreError: a store does not give its files.
    """
    folder, index, where = packed_files.opened(spec, config, packed_files.PAIRS)
    checks.check_settings(spec, index["made_for"], made_for(config, collators), config)
    facts, files = index["facts"], ArrayFiles(spec, folder)
    names = [*_OF_EXAMPLE, *(["label"] if facts["has_labels"] else [])]
    names += [f"{side}_{name}" for side in _SIDES for name in _OF_ITEM]
    checks.check_files(spec, folder, index["files"], [f"{name}.npy" for name in names])
    for side in _SIDES:
        if truncated := facts["truncated"][side]:
            text = "%s: %d of %d %s texts were truncated when they were packed"
            count = index["queries" if side == "query" else "documents"]
            _log.warning(text, spec, truncated, count, side)
    problems, check = [Problem(*x) for x in index["left_out"]], f"jaxvlm data verify {spec}"
    enforce(problems, index["total"], config.on_bad_record, config.max_skip_fraction, spec, check)
    memory, columns = image_caches(collators, config), {}
    for side, collator in zip(_SIDES, collators, strict=True):
        opened = _OpenedColumn(spec, folder, where, side, facts)
        each: Callable[..., Any] = concurrently if is_remote(spec) else map
        columns[side] = Column(
            side, opened.items, opened.encoded, collator, memory[side], config.buckets,
            opened.measured, opened.check, each,
        )  # fmt: skip
        image_files.refuse_augmented_tiles(spec, config, columns[side].images)
        if measure := collator.span_of:
            own = columns[side].encoded
            checks.probe(spec, folder, own.paths, own.spans, index["probes"][side], measure)
    arrays = {name: files[name] for name in _OF_EXAMPLE}
    content = {side: files[f"{side}_content"] for side in _SIDES}
    labels = (files["label"], files.strings("label_name")) if facts["has_labels"] else None
    return PairCorpus(
        **arrays,
        examples=_Examples(files.strings("id"), arrays, columns, labels, facts),
        problems=problems,
        queries=columns["query"],
        documents=columns["document"],
        contents=Contents(content, {side: own.items for side, own in columns.items()}),
        has_scores=facts["has_scores"],
        content=content,
        label=None if labels is None else labels[0],
        tasks=facts["tasks"],
        most_documents=facts["most_documents"],
        truncated=facts["truncated"],
        digest=facts["digest"],
        check=check,
    )


def check_embedder(spec: str, facts: dict[str, Any], embedder: str) -> None:
    """Refuse a set whose tokens are of another kind of model, before its tokenizer is loaded.

    Args:
        spec: its folder or URL.
        facts: what ``packed.json`` says.
        embedder: dual | vlm.

    Raises:
        DataError: it is.
    """
    packed = "dual" if facts["made_for"].get("query rows") == "text" else "vlm"
    if packed != embedder:
        raise DataError(
            f"{spec} was packed for config.embedder={packed!r}, and this run has {embedder!r}; "
            "pack the data again with this recipe"
        )


class _OpenedColumn:
    """A column's arrays, on disk.

    Args:
        spec: the set's folder or URL.
        folder: where its arrays are.
        where: what the names of its images begin with.
        side: query | document.
        facts: what holds for all items.
    """

    def __init__(
        self, spec: str, folder: pathlib.Path, where: str, side: str, facts: dict[str, Any]
    ):
        files, all_files = ArrayFiles(spec, folder, f"{side}_"), ArrayFiles(spec, folder)
        which = files["image_path"]
        arrays = {name: files[name] for name in ("tokens", "first", "length", "image")}
        paths = Chosen(all_files.strings("path", prefix=f"{where}/"), which)
        truncated = facts["truncated"][side]
        self.encoded = Encoded(**arrays, paths=paths, spans=files.spans(), truncated=truncated)
        self.measured = Measured(patches=files["patches"], **facts[side])
        instructions = files.strings("instruction_text")
        self.items = _Items(
            files.strings("text"), self.encoded, Chosen(instructions, files["instruction"])
        )
        self._spec, self._folder, self._side = spec, folder, side
        self._known = files["checksum"]
        self._checksums = _Checksums(self.encoded, Chosen(all_files.strings("path"), which))

    def check(self, item: int) -> None:
        """Raise DataError for an item that is not as it was packed."""
        if not checks.holds(lambda: self._checksums.of_item(item), self._known, item):
            raise checks.damaged(f"{self._side} {item}", self._spec, self._folder)


class _Items(Lazy):
    """Items of a column, of texts that stay on disk."""

    def __init__(self, texts: Strings, encoded: Encoded, instructions: Sequence[str]):
        self._texts, self._encoded, self._instructions = texts, encoded, instructions

    def __len__(self) -> int:
        return len(self._texts)

    def item(self, index: int) -> Item:
        """See :class:`Lazy`."""
        image = int(self._encoded.image[index])
        path = self._encoded.paths[image] if image >= 0 else ""
        return Item(self._texts[index], path, self._instructions[index])


class _Examples(Lazy):
    """Examples, of arrays that stay on disk."""

    def __init__(
        self,
        ids: Strings,
        arrays: dict[str, np.ndarray],
        columns: dict[str, Column],
        labels: tuple[np.ndarray, Strings] | None,
        facts: dict[str, Any],
    ):
        self._ids, self._arrays, self._labels, self._facts = ids, arrays, labels, facts
        self._queries, self._documents = (columns[side].items for side in _SIDES)

    def __len__(self) -> int:
        return len(self._ids)

    def item(self, index: int) -> Example:
        """See :class:`Lazy`."""
        arrays, first = self._arrays, self._arrays["first"]
        own = slice(int(first[index]), int(first[index + 1]))
        documents = [self._documents[i] for i in arrays["document"][own].tolist()]
        label = -1 if self._labels is None else int(self._labels[0][index])
        return Example(
            id=self._ids[index],
            query=self._queries[int(arrays["query"][index])],
            positive=documents[0],
            negatives=tuple(documents[1:]),
            label=self._labels[1][label] if self._labels and label >= 0 else "",
            scores=tuple(arrays["score"][own].tolist()) if self._facts["has_scores"] else (),
            task=self._facts["tasks"][int(arrays["task"][index])],
        )
