"""Contact sheets: what a model answered, picture by picture."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from PIL import Image

from jaxvlm.data.formats import PLACEHOLDER, Record
from jaxvlm.data.loader import Dataset
from jaxvlm.evals.sheet import Cell, draw

_SEED = 0x5E


Answer = Callable[[Sequence[tuple[Sequence[str], str]]], list[str]]
"""Image files and a question each -> an answer each."""


def contact_sheet(answer: Answer, dataset: Dataset, path: pathlib.Path, count: int = 24) -> bool:
    """Generate answers for some records and draw them.

    Args:
        answer: generates answers.
        dataset: where records come from; a fixed random choice of those with a picture.
        path: PNG to write.
        count: cells at most.

    Returns:
        False if no record has one picture and one question; nothing is written then.
    """
    usable = [i for i in dataset.usable() if _question(dataset.records[i]) is not None]
    rng = np.random.default_rng(_SEED)
    chosen = rng.permutation(len(usable))[:count]
    records = [dataset.records[usable[i]] for i in chosen.tolist()]
    queries = [(record.images, _question(record) or "") for record in records]
    if not queries:
        return False
    # A fixed number of rows compiles one program.
    filled = queries + [queries[0]] * (count - len(queries))
    answers = answer(filled)[: len(queries)]
    cells = [
        Cell(record.images[0], question.replace(PLACEHOLDER, "").strip(), answer, _answer(record))
        for record, (_, question), answer in zip(records, queries, answers)
    ]
    if not jax.process_index():
        draw(cells, path)
    return True


def pixels(path: pathlib.Path) -> np.ndarray:
    """u8[H, W, 3] of a written sheet."""
    with Image.open(path) as sheet:
        return np.asarray(sheet.convert("RGB"))


def _question(record: Record) -> str | None:
    """The first user turn of a one-question record with one picture, else ``None``."""
    roles = [turn.role for turn in record.turns]
    ok = roles == ["user", "assistant"] and len(record.images) == 1
    return record.turns[0].content if ok else None


def _answer(record: Record) -> str:
    return record.turns[1].content
