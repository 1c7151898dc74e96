"""Examples — a query, its positive, its negatives — from a file, and back into one."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from jaxvlm.build.items import refuse
from jaxvlm.data import pair_formats
from jaxvlm.data.examples import Example, Item, relevant


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What examples are about: each query and each document once."""

    queries: list[Item]
    documents: list[Item]
    right: list[list[int]]
    """Of each query, the documents that are right: see :func:`jaxvlm.data.examples.relevant`."""
    same: list[list[int]]
    """Of each query, documents that are the query itself."""
    places: list[tuple[int, int, tuple[int, ...]]]
    """Of each example: its query, its positive and its negatives."""


def read(name: str) -> list[Example]:
    """Examples of a file, as :func:`jaxvlm.data.pair_formats.read` reads them.

    Raises:
        DataError: the file, or a record of it, can't be read.
    """
    found, problems = pair_formats.read(name)
    refuse(name, problems)
    return found


def gather(examples: Sequence[Example], more: Iterable[Item] = ()) -> Gathered:
    """Queries and documents of examples, each once, and which belong together: see
    :func:`jaxvlm.data.examples.relevant`.

    Args:
        examples: what to gather from.
        more: documents that may be right for nobody.
    """
    queries: dict[Item, int] = {}
    documents: dict[Item, int] = {}
    places = []
    for e in examples:
        query = queries.setdefault(e.query, len(queries))
        ours = [documents.setdefault(d, len(documents)) for d in (e.positive, *e.negatives)]
        places.append((query, ours[0], tuple(ours[1:])))
    for item in more:
        documents.setdefault(item, len(documents))
    of_content: dict[tuple[str, str], list[int]] = {}
    for item, i in documents.items():
        of_content.setdefault(item.content, []).append(i)
    same = [of_content.get(item.content, []) for item in queries]
    right = relevant(examples, queries, documents)
    return Gathered(list(queries), list(documents), right, same, places)


def record(example: Example, root: pathlib.Path, scores: Sequence[float] = ()) -> dict[str, Any]:
    """A line of JSON that :func:`read` makes ``example`` of.

    Args:
        example: to write.
        root: the folder that pictures' paths are to be relative to.
        scores: of the positive and each negative, instead of its own.
    """

    def picture(item: Item) -> str | None:
        return os.path.relpath(item.image, root) if item.image else None

    row: dict[str, Any] = {"id": example.id}
    for name, item in (("query", example.query), ("positive", example.positive)):
        row |= {name: item.text} if item.text else {}
        row |= {f"{name}_image": picture(item)} if item.image else {}
    row["negatives"] = [item.text or None for item in example.negatives]
    if any(item.image for item in example.negatives):
        row["negative_images"] = [picture(item) for item in example.negatives]
    for name, told in (
        ("query_instruction", example.query.instruction),
        ("document_instruction", example.positive.instruction),
        ("label", example.label),
        ("task", example.task),
    ):
        row |= {name: told} if told else {}
    scores = scores or example.scores
    return row | ({"scores": [round(float(s), 6) for s in scores]} if scores else {})


def write(path: pathlib.Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON lines, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".tmp")
    with half.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    half.replace(path)
