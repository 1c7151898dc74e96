"""What is known of pages that steps write: only what is sure."""

import numpy as np

from jaxvlm.data.slots import Written
from jaxvlm.types import Batch


def showing(*pages):
    """A row whose tiles lie in these first pages; their keys are all that differs."""
    number = np.arange(len(pages), dtype=np.uint32)
    return Batch(None, None, None, None)._replace(
        image_start=np.where(number < 9, 0, -1)[None],
        image_pages=np.stack([pages, np.full(len(pages), 99)], axis=1)[None].astype(np.int32),
        image_key=np.repeat(number[:, None], 4, axis=1)[None],
    )


def key(number):
    return np.full(4, number, np.uint32).tobytes()


def test_a_page_is_known_once_its_step_is_done_and_good():
    written = Written()
    for pages in ((4, 6), (8, -1), (10, 12)):
        written.take(showing(*pages))
    assert not written.has(4, key(0)), "its step is under way"
    written.settle(True)
    assert written.has(4, key(0)) and written.has(6, key(1))
    assert not written.has(6, key(0)), "another picture's"
    written.settle(False)
    assert not written.has(8, key(0)), "that step was skipped, and wrote nothing"
    assert not written.has(-1, key(1))
    written.settle(True)
    assert written.has(10, key(0))


def test_what_is_given_back_is_forgotten_and_what_was_under_way_too():
    written = Written()
    written.take(showing(4))
    written.settle(True)
    written.take(showing(6))
    turn = written.turn
    written.forget()
    assert written.turn != turn and not written.has(4, key(0))
    written.settle(True)
    assert not written.has(6, key(0))
    written.take(showing(4))
    written.settle(True)
    assert written.has(4, key(0))


def test_rows_without_a_picture():
    written = Written()
    written.take(Batch(None, None, None, None))
    empty = showing(4)
    written.take(empty._replace(image_start=np.full((1, 1), -1)))
    written.settle(True)
    written.settle(True)
    assert not written.has(4, key(0))
