"""What an embedding model is trained on: queries, positives and hard negatives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxvlm.data.formats import PLACEHOLDER, BadItem, check_unicode, tidy


class Item(NamedTuple):
    """What gets a vector: a text, a picture, or both."""

    text: str = ""
    """With one ``<image>`` where the picture goes, if there is one."""
    image: str = ""
    """Picture file; "" is none."""
    instruction: str = ""
    """What the vector is for; "" is the data's own, or the model's."""

    @property
    def content(self) -> tuple[str, str]:
        """What makes two items the same, whatever their vectors are for."""
        return self.text, self.image

    @property
    def words(self) -> str:
        """The text alone."""
        return self.text.replace(PLACEHOLDER, " ").strip()

    @classmethod
    def of(cls, text: str = "", image: str = "", instruction: str = "") -> Item:
        """An item; a picture that no ``<image>`` places goes before the text.

        Args:
            text: its text.
            image: its picture file.
            instruction: what its vector is for.

        Raises:
            BadItem: it is empty, or a mark has no picture.
        """
        text = tidy(text.strip())
        marks = text.count(PLACEHOLDER)
        if not text and not image:
            raise BadItem("neither text nor a picture")
        if marks > bool(image):
            detail = f"{marks} placeholders, {int(bool(image))} pictures"
            raise BadItem("placeholders and pictures differ in number", detail)
        if image and not marks:
            text = PLACEHOLDER + text
        check_unicode(text + instruction)
        return cls(text, image, instruction)


class Example(NamedTuple):
    """One query with what it should find, and what it should not."""

    id: str
    query: Item
    positive: Item
    negatives: tuple[Item, ...] = ()
    label: str = ""
    """Examples with the same one are positives of each other; "" is none."""
    scores: tuple[float, ...] = ()
    """A teacher's, of the positive and each negative, or how like query and positive are; () is
    none."""
    task: str = ""


def relevant(
    examples: Iterable[Example], queries: Iterable[Item], documents: Iterable[Item]
) -> list[list[int]]:
    """Of each query, the documents that are right for it, ascending.

    They are its positives under any example, and those of all examples with a label that it has;
    but for examples that say, by a score of 0 or less, that the two do not belong together. Items
    of one content, a text and a picture, are one query or one document, whatever their vectors are
    for.

    Args:
        examples: who belongs to whom.
        queries: those of the examples, and perhaps others.
        documents: likewise.
    """
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}  # by a query's content
    of_label: dict[str, set[tuple[str, str]]] = {}
    labels: dict[tuple[str, str], set[str]] = {}
    for example in examples:
        query, positive = example.query.content, example.positive.content
        if example.label:
            labels.setdefault(query, set()).add(example.label)
        if example.scores and example.scores[0] <= 0:
            continue
        found.setdefault(query, set()).add(positive)
        if example.label:
            of_label.setdefault(example.label, set()).add(positive)
    places: dict[tuple[str, str], list[int]] = {}
    for i, item in enumerate(documents):
        places.setdefault(item.content, []).append(i)
    out = []
    for item in queries:
        ours = set(found.get(item.content, ()))
        ours.update(*(of_label.get(label, ()) for label in labels.get(item.content, ())))
        out.append(sorted(i for content in ours for i in places.get(content, ())))
    return out
