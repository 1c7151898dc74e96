"""Reads and writes examples, each a query with its positive and its negatives."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from jaxvlm.checkpoint.run_record import whole_file
from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.pairs.examples import Example, Item, matching, relevant, same_content
from jaxvlm.data.sources import pair_formats, tables
from jaxvlm.data.sources.member_names import with_file
from jaxvlm.inference.items import refuse


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The distinct queries and documents of some examples, and which belong together."""

    queries: list[Item]
    documents: list[Item]
    positives: list[list[int]]
    """For each query, the indices of its relevant documents: see
    :func:`jaxvlm.data.pairs.examples.relevant`."""
    same: list[list[int]]
    """For each query, the indices of documents with the same content as the query."""
    indices: list[tuple[int, int, tuple[int, ...]]]
    """For each example, the indices of its query, its positive and its negatives."""


def read(name: str, config: DataConfig = tables.DEFAULT) -> list[Example]:
    """Reads the examples of a file with :func:`jaxvlm.data.sources.pair_formats.read`.

    Args:
        name: file or pattern of files.
        config: data settings that say how the file is read.

    Raises:
        DataError: the file, or a record of it, can't be read.
    """
    examples, problems = pair_formats.read(name, config)
    refuse(name, problems)
    return examples


def split_matching(examples: Sequence[Example]) -> tuple[list[Example], list[Item]]:
    """Returns examples whose query and positive match, and the documents of the others.

    See :func:`jaxvlm.data.pairs.examples.matching`.

    Raises:
        DataError: no example's do.
    """
    match = list(matching(examples))
    if examples and not match:
        raise DataError("every pair has a score of 0 or less, so that no query has a positive")
    kept = {id(example) for example in match}
    others = (example for example in examples if id(example) not in kept)
    return match, [item for e in others for item in (e.positive, *e.negatives)]


def gather(examples: Sequence[Example], more: Iterable[Item] = ()) -> Gathered:
    """Collects the distinct queries and documents of examples, and which belong together.

    Args:
        examples: the examples to collect from.
        more: further documents, which need not be relevant to any query.
    """
    queries: dict[Item, int] = {}
    documents: dict[Item, int] = {}
    indices = []
    for e in examples:
        query = queries.setdefault(e.query, len(queries))
        own = [documents.setdefault(d, len(documents)) for d in (e.positive, *e.negatives)]
        indices.append((query, own[0], tuple(own[1:])))
    for item in more:
        documents.setdefault(item, len(documents))
    same = same_content(queries, documents)
    positives = relevant(examples, queries, documents)
    return Gathered(list(queries), list(documents), positives, same, indices)


def root_of(output: pathlib.Path, config: DataConfig) -> pathlib.Path | None:
    """The folder that image names in a file are relative to, so that a run finds the images.

    Args:
        output: the file to write.
        config: data settings by which the examples were read.

    Returns:
        The file's own folder; ``None`` if ``image_root`` is set, by which a run would read relative
        names, and a run without it would not: the names are then whole paths.
    """
    return None if config.image_root else output.parent.absolute()


def settings_to_leave_out(config: DataConfig) -> list[str]:
    """Names settings of ``config`` by which examples that :func:`record` wrote are read otherwise.

    Args:
        config: data settings by which the examples were read.
    """
    names = ["format"] if config.format.target else []
    names += ["column_mapping"] if config.column_mapping else []
    names += ["ignored_fields"] if set(config.ignored_fields) & pair_formats.OWN_FIELDS else []
    return [f"config.data.{name}" for name in names]


def record(
    example: Example, root: pathlib.Path | None, scores: Sequence[float] = ()
) -> dict[str, Any]:
    """Converts an example to a JSON record that :func:`read` reads back.

    Args:
        example: the example to write.
        root: folder that image paths are written relative to; ``None``: they are whole paths.
        scores: scores of the positive and each negative, instead of the example's own.
    """

    def image(item: Item) -> str | None:
        if not item.image:
            return None
        return with_file(
            item.image, lambda name: os.path.relpath(name, root) if root else os.path.abspath(name)
        )

    shared = example.positive.instruction
    if any(item.instruction != shared for item in example.negatives):
        shared = ""  # each document is an object with its own

    def fields(item: Item) -> tuple[Any, str | None]:
        if item.instruction == shared:
            return item.text or None, image(item)
        whole = {"text": item.text, "image": image(item), "instruction": item.instruction}
        return {name: value for name, value in whole.items() if value}, None

    row: dict[str, Any] = {"id": example.id}
    asked = example.query.text or None, image(example.query)
    for name, (text, file) in (("query", asked), ("positive", fields(example.positive))):
        row |= {name: text} if text else {}
        row |= {f"{name}_image": file} if file else {}
    negatives = [fields(item) for item in example.negatives]
    row["negatives"] = [text for text, _ in negatives]
    if any(file for _, file in negatives):
        row["negative_images"] = [file for _, file in negatives]
    for name, value in (
        ("query_instruction", example.query.instruction),
        ("document_instruction", shared),
        ("label", example.label),
        ("task", example.task),
    ):
        row |= {name: value} if value else {}
    scores = scores or example.scores
    return row | ({"scores": [round(float(s), 6) for s in scores]} if scores else {})


def write(path: pathlib.Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes records as JSON lines, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with whole_file(path) as file:
        file.writelines(map(str.encode, lines))
