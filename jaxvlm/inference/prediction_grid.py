"""Prediction grids: images with answers, or queries with the documents they retrieve."""

from __future__ import annotations

import io
import pathlib
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from jaxvlm.checkpoint.run_record import whole_file
from jaxvlm.data.conversations.dataset import Dataset
from jaxvlm.data.sources import members
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER, Record
from jaxvlm.data.sources.member_names import is_file, is_video

_WIDTH, _IMAGE, _TEXT, _COLUMNS, _MARGIN = 190, 128, 76, 6, 8
_RIGHT, _WRONG, _INK = (0, 120, 60), (190, 30, 30), (30, 30, 30)
_SEED = 0x5E


Answer = Callable[[Sequence[tuple[Sequence[str], str]]], list[str]]
"""Maps (image files, question) pairs to their answers."""


def write_prediction_grid(
    answer: Answer, dataset: Dataset, path: pathlib.Path, count: int = 24
) -> bool:
    """Generates answers for a fixed random choice of records and draws them.

    Args:
        answer: function that generates answers.
        dataset: data set to choose records with one image and one question from.
        path: PNG file to write.
        count: maximum number of cells.

    Returns:
        False, with nothing written, if no record has one image and one question.
    """
    usable = [i for i in dataset.usable() if _question(dataset.records[i]) is not None]
    rng = np.random.default_rng(_SEED)
    chosen = rng.permutation(len(usable))[:count]
    records = [dataset.records[usable[i]] for i in chosen.tolist()]
    queries = [(record.images, _question(record) or "") for record in records]
    if not queries:
        return False
    # A fixed number of sequences compiles one program.
    padded = queries + [queries[0]] * (count - len(queries))
    answers = answer(padded)[: len(queries)]
    questions = (question.replace(PLACEHOLDER, "").strip() for _, question in queries)
    cells = [
        Prediction(record.images[0], question, answer, _answer(record))
        for record, question, answer in zip(records, questions, answers)
    ]
    if not jax.process_index():
        draw_predictions(cells, path)
    return True


def pixels(path: pathlib.Path) -> np.ndarray:
    """u8[H, W, 3]: the pixels of a written grid."""
    with Image.open(path) as grid:
        return np.asarray(grid.convert("RGB"))


def _question(record: Record) -> str | None:
    """The question of a record with one question and one image, else ``None``."""
    roles = [turn.role for turn in record.turns]
    is_usable = roles == ["user", "assistant"] and len(record.images) == 1
    return record.turns[0].content if is_usable else None


def _answer(record: Record) -> str:
    return record.turns[1].content


class Prediction(NamedTuple):
    """A cell of the grid: an image with a question and its answers."""

    image: str
    """Path of the image."""
    question: str
    answer: str
    """The model's answer."""
    expected: str
    """The reference answer."""

    @property
    def right(self) -> bool:
        """Whether the answer equals the expected one, ignoring case and outer space."""
        return self.answer.strip().lower() == self.expected.strip().lower()


def draw_predictions(cells: Sequence[Prediction], path: pathlib.Path) -> None:
    """Draws a grid with right answers in green, and wrong ones in red with the expected answer.

    Args:
        cells: cells in reading order.
        path: PNG file to write; its folder is created.
    """
    rows = -(-len(cells) // _COLUMNS)
    columns = min(_COLUMNS, len(cells))
    height = _IMAGE + _TEXT + _MARGIN
    grid = Image.new("RGB", (columns * _WIDTH + _MARGIN, rows * height + _MARGIN), "white")
    font = ImageFont.load_default(12)
    pen = ImageDraw.Draw(grid)
    for i, cell in enumerate(cells):
        left = _MARGIN + (i % _COLUMNS) * _WIDTH
        top = _MARGIN + (i // _COLUMNS) * height
        grid.paste(_thumb(cell.image), (left, top))
        colour = _RIGHT if cell.right else _WRONG
        pen.rectangle(
            (left - 2, top - 2, left + _IMAGE + 1, top + _IMAGE + 1), outline=colour, width=2
        )
        verdict = "right" if cell.right else f"wrong, expected {cell.expected!r}"
        lines = textwrap.wrap(cell.question, 30)[:2]
        for n, (text, ink) in enumerate(
            [(line, _INK) for line in lines]
            + [(cell.answer[:30] or "(nothing)", colour)]
            + [(line, colour) for line in textwrap.wrap(verdict, 30)[:2]]
        ):
            pen.text((left, top + _IMAGE + 4 + 14 * n), text, fill=ink, font=font)
    _save(grid, path)


def _save(grid: Image.Image, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = Image.registered_extensions().get(path.suffix.lower(), "PNG")
    with whole_file(path) as file:  # a link there is replaced, and not followed
        grid.save(file, kind)


class GridItem(NamedTuple):
    """A query or a document: a text, an image, or both."""

    text: str = ""
    image: str = ""
    """Name of the image file; "" is none."""


class RetrievedRow(NamedTuple):
    """A row of the grid: a query and the documents it retrieves, best first."""

    query: GridItem
    documents: Sequence[GridItem]
    scores: Sequence[float]
    right: Sequence[bool]
    """Whether each of the documents is relevant."""
    rank: int = 0
    """Rank of the first relevant document among all, from 1; 0 if there is none."""


def draw_retrieval(rows: Sequence[RetrievedRow], path: pathlib.Path) -> None:
    """Draws a grid with one row per query, the query first, relevant documents in green frames.

    Args:
        rows: rows from the top.
        path: PNG file to write; its folder is created.
    """
    columns = 1 + max(len(row.documents) for row in rows)
    height = _IMAGE + _TEXT + _MARGIN
    grid = Image.new("RGB", (columns * _WIDTH + _MARGIN, len(rows) * height + _MARGIN), "white")
    pen = ImageDraw.Draw(grid)
    for y, row in enumerate(rows):
        places = [(_MARGIN + x * _WIDTH, _MARGIN + y * height) for x in range(columns)]
        head = f"query; first right: {row.rank}" if row.rank else "query; none is right"
        _draw_item(grid, pen, places[0], row.query, head, _INK)
        retrieved = zip(places[1:], row.documents, row.scores, row.right)
        for rank, (place, document, score, right) in enumerate(retrieved, 1):
            head = f"{rank}.  {score:.3f}  {'right' if right else 'wrong'}"
            _draw_item(grid, pen, place, document, head, _RIGHT if right else _WRONG)
    _save(grid, path)


def _draw_item(
    grid: Image.Image,
    pen: ImageDraw.ImageDraw,
    place: tuple[int, int],
    item: GridItem,
    head: str,
    colour: tuple[int, int, int],
) -> None:
    """Draws a frame with a head line, the image, and as much of the text as fits."""
    (left, top), font = place, ImageFont.load_default(12)
    pen.rectangle(
        (left - 2, top - 2, left + _WIDTH - 8, top + _IMAGE + _TEXT - 2), outline=colour, width=2
    )
    pen.text((left + 3, top + 1), head, fill=colour, font=font)
    y = top + 18
    if item.image:
        grid.paste(_thumb(item.image), (left + 3, y))
        y += _IMAGE + 2
    room = (top + _IMAGE + _TEXT - 6 - y) // 14
    for n, line in enumerate(textwrap.wrap(item.text, 28)[:room]):
        pen.text((left + 3, y + 14 * n), line, fill=_INK, font=font)


def _thumb(name: str) -> Image.Image:
    if is_video(name):
        return _frames(name)
    with Image.open(name if is_file(name) else io.BytesIO(members.read(name))) as image:
        thumb = image.convert("RGB")
    return thumb.resize(_fit(thumb.size), Image.Resampling.NEAREST)


def _frames(name: str) -> Image.Image:
    """A video as one image of the same size: up to nine frames from its first to its last,
    in reading order."""
    from jaxvlm.data.videos import video_files

    clip = video_files.read_clip(name, sys.maxsize)
    side = 1 if len(clip.pts) < 2 else 2 if len(clip.pts) < 9 else 3
    chosen = np.linspace(0, len(clip.pts) - 1, side * side).round().astype(int)
    frames = [Image.fromarray(x) for x in video_files.read_frames(name, clip, chosen.tolist())]
    width, height = (max(1, size // side) for size in _fit(frames[0].size))
    sheet = Image.new("RGB", (width * side, height * side), "white")
    for i, frame in enumerate(frames):
        small = frame.resize((width, height), Image.Resampling.BILINEAR)
        sheet.paste(small, (i % side * width, i // side * height))
    return sheet


def _fit(size: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the same aspect ratio that fits a cell."""
    scale = _IMAGE / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
