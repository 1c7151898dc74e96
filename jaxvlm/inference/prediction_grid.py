"""Prediction grids: images of a data set with the model's answers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from PIL import Image

from jaxvlm.data.conversations.dataset import Dataset
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER, Record
from jaxvlm.evals.grid_image import Prediction, draw_predictions

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
    cells = [
        Prediction(
            record.images[0], question.replace(PLACEHOLDER, "").strip(), answer, _answer(record)
        )
        for record, (_, question), answer in zip(records, queries, answers)
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
