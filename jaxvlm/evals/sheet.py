"""Draws pictures with questions and answers, or queries and what they found, on one page."""

from __future__ import annotations

import io
import pathlib
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

_WIDTH, _PICTURE, _TEXT, _COLUMNS, _MARGIN = 190, 128, 76, 6, 8
_RIGHT, _WRONG, _INK = (0, 120, 60), (190, 30, 30), (30, 30, 30)


class Cell(NamedTuple):
    """One picture and what was said about it."""

    picture: str
    """File."""
    question: str
    answer: str
    """The model's."""
    expected: str

    @property
    def right(self) -> bool:
        """Whether the answer is the expected one, case and outer space aside."""
        return self.answer.strip().lower() == self.expected.strip().lower()


def draw(cells: Sequence[Cell], path: pathlib.Path) -> None:
    """Write the sheet: green and ✓ for right answers, red and ✗ with the expected one for wrong.

    Args:
        cells: in reading order.
        path: PNG; its folder is made.
    """
    rows = -(-len(cells) // _COLUMNS)
    columns = min(_COLUMNS, len(cells))
    height = _PICTURE + _TEXT + _MARGIN
    sheet = Image.new("RGB", (columns * _WIDTH + _MARGIN, rows * height + _MARGIN), "white")
    font = ImageFont.load_default(12)
    pen = ImageDraw.Draw(sheet)
    for i, cell in enumerate(cells):
        left = _MARGIN + (i % _COLUMNS) * _WIDTH
        top = _MARGIN + (i // _COLUMNS) * height
        sheet.paste(_thumb(cell.picture), (left, top))
        colour = _RIGHT if cell.right else _WRONG
        pen.rectangle(
            (left - 2, top - 2, left + _PICTURE + 1, top + _PICTURE + 1), outline=colour, width=2
        )
        verdict = "right" if cell.right else f"wrong, expected {cell.expected!r}"
        lines = textwrap.wrap(cell.question, 30)[:2]
        for n, (text, ink) in enumerate(
            [(line, _INK) for line in lines]
            + [(cell.answer[:30] or "(nothing)", colour)]
            + [(line, colour) for line in textwrap.wrap(verdict, 30)[:2]]
        ):
            pen.text((left, top + _PICTURE + 4 + 14 * n), text, fill=ink, font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


class Shown(NamedTuple):
    """A query or a document: a text, a picture, or both."""

    text: str = ""
    picture: str | io.BytesIO = ""
    """File, or one that is open; "" is none."""


class Found(NamedTuple):
    """A query and what it found, best first."""

    query: Shown
    documents: Sequence[Shown]
    scores: Sequence[float]
    right: Sequence[bool]
    """Which of the documents are right."""
    rank: int = 0
    """Of the first right one among all, from 1; 0: there is none."""


def draw_found(rows: Sequence[Found], path: pathlib.Path) -> None:
    """Write a sheet: a row a query, the query at its left, right documents in green frames.

    Args:
        rows: from the top.
        path: PNG; its folder is made.
    """
    columns = 1 + max(len(row.documents) for row in rows)
    height = _PICTURE + _TEXT + _MARGIN
    sheet = Image.new("RGB", (columns * _WIDTH + _MARGIN, len(rows) * height + _MARGIN), "white")
    pen = ImageDraw.Draw(sheet)
    for y, row in enumerate(rows):
        places = [(_MARGIN + x * _WIDTH, _MARGIN + y * height) for x in range(columns)]
        head = f"query; first right: {row.rank}" if row.rank else "query; none is right"
        _draw_shown(sheet, pen, places[0], row.query, head, _INK)
        found = zip(places[1:], row.documents, row.scores, row.right)
        for rank, (place, document, score, right) in enumerate(found, 1):
            head = f"{rank}.  {score:.3f}  {'right' if right else 'wrong'}"
            _draw_shown(sheet, pen, place, document, head, _RIGHT if right else _WRONG)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _draw_shown(
    sheet: Image.Image,
    pen: ImageDraw.ImageDraw,
    place: tuple[int, int],
    shown: Shown,
    head: str,
    colour: tuple[int, int, int],
) -> None:
    """A frame with a head line, a picture, and as much of the text as there is room for."""
    (left, top), font = place, ImageFont.load_default(12)
    pen.rectangle(
        (left - 2, top - 2, left + _WIDTH - 8, top + _PICTURE + _TEXT - 2), outline=colour, width=2
    )
    pen.text((left + 3, top + 1), head, fill=colour, font=font)
    below = top + 18
    if shown.picture:
        sheet.paste(_thumb(shown.picture), (left + 3, below))
        below += _PICTURE + 2
    room = (top + _PICTURE + _TEXT - 6 - below) // 14
    for n, line in enumerate(textwrap.wrap(shown.text, 28)[:room]):
        pen.text((left + 3, below + 14 * n), line, fill=_INK, font=font)


def _thumb(file: str | io.BytesIO) -> Image.Image:
    with Image.open(file) as picture:
        thumb = picture.convert("RGB")
    return thumb.resize(_inside(thumb.size), Image.Resampling.NEAREST)


def _inside(size: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the same shape within a cell's picture."""
    scale = _PICTURE / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
