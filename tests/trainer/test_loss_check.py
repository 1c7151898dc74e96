"""The examples on which a user's loss is computed before a run begins."""

from __future__ import annotations

import numpy as np
from builders import random_batch

from jaxvlm.losses.next_token import targets
from jaxvlm.trainer.loss_check import _rows, _window


def test_a_window_holds_the_first_answers():
    batch = random_batch()
    cut = _window(batch, 16)
    assert cut.tokens.shape == (8, 16) and cut.positions.shape == (8, 1, 16)
    assert np.all(np.sum(targets(cut)[1], axis=1) > 0)
    for row in range(8):
        start = max(0, np.argmax(batch.loss_weight[row] > 0) - 8)
        part = slice(start, start + 16)
        np.testing.assert_array_equal(cut.tokens[row], batch.tokens[row, part])
        np.testing.assert_array_equal(cut.positions[row, 0], batch.positions[row, 0, part])
        there = np.maximum(batch.image_start[row] - start, -1)
        np.testing.assert_array_equal(cut.image_start[row], there)
    assert _window(batch, 32) is batch


def test_examples_with_most_to_train_on_are_two_halves():
    weight = np.asarray([0.0, 3, 1, 2, 0, 5, 4, 0])
    rows = np.arange(8)
    assert _rows(rows, weight).tolist() == [5, 6, 1, 3, 2, 0, 4, 7]
    assert _rows(rows[:3], weight[:3]).tolist() == [1, 2, 0, 1]
    assert _rows(rows[:1], weight[:1]).tolist() == [0, 0]
