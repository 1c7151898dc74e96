"""Training examples of embedding models: queries, positives and hard negatives."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxvlm.data.sources.conversation_formats import PLACEHOLDER, check_unicode, tidy
from jaxvlm.data.sources.fields import BadItem, is_empty
from jaxvlm.data.sources.visuals import file_name


class Item(NamedTuple):
    """Input of one embedding: a text, an image, or both."""

    text: str = ""
    """Text; contains one ``<image>`` at the image's place if there is an image."""
    image: str = ""
    """Image file; "" is none."""
    instruction: str = ""
    """Task of the embedding; "" takes the instruction of the data settings, or the model's."""

    @property
    def content(self) -> tuple[str, str]:
        """Text and image: items with equal content are the same, whatever their instruction.

        Texts that are the same characters to Unicode (NFC) are equal, as they are to a reader.
        """
        return unicodedata.normalize("NFC", self.text), self.image

    @property
    def words(self) -> str:
        """The text without the image placeholder."""
        return self.text.replace(PLACEHOLDER, " ").strip()

    @classmethod
    def of(cls, text: str = "", image: Any = "", instruction: str = "") -> Item:
        """Create an item; an image without an ``<image>`` placeholder goes before the text.

        Args:
            text: text of the item.
            image: name of the item's image file.
            instruction: task of the embedding.

        Raises:
            BadItem: the item is empty, a placeholder has no image, or an image is no file's name.
        """
        image = "" if is_empty(image) else image
        if not isinstance(image, str):
            file_name(image)  # which refuses it
        text = tidy(text.strip())
        marks = text.count(PLACEHOLDER)
        if not text and not image:
            raise BadItem("neither text nor an image")
        if marks > bool(image):
            detail = f"{marks} placeholders, {int(bool(image))} images"
            raise BadItem("placeholders and images differ in number", detail)
        if image and not marks:
            text = PLACEHOLDER + text
        check_unicode(text + instruction)
        return cls(text, image, instruction)


class Example(NamedTuple):
    """One query with a document to retrieve (positive) and others not to (hard negatives)."""

    id: str
    query: Item
    positive: Item
    negatives: tuple[Item, ...] = ()
    label: str = ""
    """Examples with the same label are positives of each other; "" is none."""
    scores: tuple[float, ...] = ()
    """Teacher scores of the positive and each negative, or the similarity of query and positive;
    () is none."""
    task: str = ""
    """Name of the example's task; "" is none."""


def relevant(
    examples: Iterable[Example], queries: Iterable[Item], documents: Iterable[Item]
) -> list[list[int]]:
    """List the relevant documents of each query, ascending.

    They are the positives of the query in all :func:`matching` examples, and those of all that
    share a label with it. Items with equal content (text and image) are the same query or document,
    whatever their instructions.

    Args:
        examples: examples that define which documents match a query.
        queries: queries of the examples, and possibly others.
        documents: documents of the examples, and possibly others.

    Returns:
        For each query, the indices of its relevant documents.
    """
    positives: dict[tuple[str, str], set[tuple[str, str]]] = {}  # by a query's content
    of_label: dict[str, set[tuple[str, str]]] = {}
    labels: dict[tuple[str, str], set[str]] = {}
    examples = list(examples)
    for example in examples:
        if example.label:
            labels.setdefault(example.query.content, set()).add(example.label)
    for example in matching(examples):
        query, positive = example.query.content, example.positive.content
        positives.setdefault(query, set()).add(positive)
        if example.label:
            of_label.setdefault(example.label, set()).add(positive)
    indices: dict[tuple[str, str], list[int]] = {}
    for i, item in enumerate(documents):
        indices.setdefault(item.content, []).append(i)
    out = []
    for item in queries:
        matches = set(positives.get(item.content, ()))
        matches.update(*(of_label.get(label, ()) for label in labels.get(item.content, ())))
        out.append(sorted(i for content in matches for i in indices.get(content, ())))
    return out


def matching(examples: Sequence[Example]) -> Iterator[Example]:
    """Yield the examples whose query and positive match.

    Where scores are similarities of pairs (no example has one for a negative), those with a score
    of 0 or less do not. A teacher's scores, of positives and negatives, have no such zero.
    """
    of_teacher = any(len(example.scores) > 1 for example in examples)
    for example in examples:
        if of_teacher or not example.scores or example.scores[0] > 0:
            yield example


def same_content(queries: Iterable[Item], documents: Iterable[Item]) -> list[list[int]]:
    """List, for each query, the indices of the documents that have its text and image."""
    indices: dict[tuple[str, str], list[int]] = {}
    for i, item in enumerate(documents):
        indices.setdefault(item.content, []).append(i)
    return [indices.get(item.content, []) for item in queries]


def never_retrieved(same: Sequence[list[int]], relevant: Sequence[list[int]]) -> list[list[int]]:
    """List, for each query, the documents that are the query itself and not relevant to it.

    A search of a corpus that holds its queries finds each of them first; an evaluation leaves them
    out, as BEIR leaves out documents with the query's id.

    Args:
        same: see :func:`same_content`.
        relevant: see :func:`relevant`.
    """
    return [sorted({*own} - {*right}) for own, right in zip(same, relevant, strict=True)]
