"""What an embedding model is trained on: queries, positives and hard negatives."""

from __future__ import annotations

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
