"""Draws pictures with questions and answers on one page."""

from __future__ import annotations

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
        with Image.open(cell.picture) as picture:
            thumb = picture.convert("RGB")
        thumb = thumb.resize(_inside(thumb.size), Image.Resampling.NEAREST)
        sheet.paste(thumb, (left, top))
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


def _inside(size: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the same shape within a cell's picture."""
    scale = _PICTURE / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
