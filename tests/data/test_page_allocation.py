"""What is known of pages that steps write: only what is sure."""

import numpy as np
import pytest

from jaxvlm.data.conversations.packing import Pieces, SequenceOrder
from jaxvlm.data.page_allocation import PageAllocation, WrittenPages
from jaxvlm.types import PAGE, Batch


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
    written = WrittenPages()
    for pages in ((4, 6), (8, -1), (10, 12)):
        written.take(showing(*pages))
    assert not written.has(4, key(0)), "its step is under way"
    written.settle(True)
    assert written.has(4, key(0)) and written.has(6, key(1))
    assert not written.has(6, key(0)), "another image's"
    written.settle(False)
    assert not written.has(8, key(0)), "that step was skipped, and wrote nothing"
    assert not written.has(-1, key(1))
    written.settle(True)
    assert written.has(10, key(0))


def test_what_is_given_back_is_forgotten_and_what_was_under_way_too():
    written = WrittenPages()
    written.take(showing(4))
    written.settle(True)
    written.take(showing(6))
    generation = written.generation
    written.forget()
    assert written.generation != generation and not written.has(4, key(0))
    written.settle(True)
    assert not written.has(6, key(0))
    written.take(showing(4))
    written.settle(True)
    assert written.has(4, key(0))


def test_rows_without_an_image():
    written = WrittenPages()
    written.take(Batch(None, None, None, None))
    empty = showing(4)
    written.take(empty._replace(image_start=np.full((1, 1), -1)))
    written.settle(True)
    written.settle(True)
    assert not written.has(4, key(0))


class Dealt(SequenceOrder):
    """Pieces that two rows of a batch have."""

    def __init__(self):
        self.rows = 2

    def pieces_of_row(self, row):
        return [np.arange(5), np.arange(5, 9)][row]


ORDER = Dealt()
PIECES = Pieces(
    *[np.zeros(0, kind) for kind in (np.int64, np.int32, *[np.int64] * 2, *[np.int32] * 2)],
    images=((0,), (1, 2), (1,), (3,), (4,), (5,), (6,), (7,), (0,)),
    num_tokens=np.zeros(9, np.int32),
    num_images=np.zeros(9, np.int32),
    num_patches=np.zeros(9, np.int32),
)
"""Images 0-4 in the first row; 5-7, and 0 again, in the second."""


def test_a_place_in_host_memory_is_the_same_whatever_room_there_is():
    """One of the images is larger: where it has no room, those after it have none."""

    def size(image):
        return 1, (3 if image == 2 else 1) * PAGE

    most = PageAllocation(ORDER, PIECES, size, limit=2, beyond=40)
    places = [most.pages(0, image)[0, 0] - most.count for image in range(5)]
    assert places[1:] == [0, 1, 4, 5] and most.room_beyond(0) == {0: 1, 1: 3, 4: 1, 5: 1}
    for room, count in ((1, 1), (2, 1), (3, 1), (4, 2), (5, 3), (6, 4)):
        allocation = PageAllocation(ORDER, PIECES, size, limit=2, beyond=2 * room)
        found = [allocation.pages(0, image)[0, 0] for image in range(1, 5)]
        assert found == [allocation.count + at for at in places[1 : count + 1]] + [-1] * (4 - count)
        assert allocation.pages_beyond == sum(allocation.room_beyond(0).values()) + min(room, 3)
        assert not allocation.all_on_devices
    assert PageAllocation(ORDER, PIECES, size, limit=2, beyond=2**80).beyond == most.beyond == 6


@pytest.mark.parametrize("beyond", [0, 4, 5, 20])
def test_images_without_pages_on_the_devices_have_pages_beyond_them(beyond):
    """Each image is of two pages; two of each shard's have them on the devices."""
    allocation = PageAllocation(ORDER, PIECES, lambda image: (1, 2 * PAGE), limit=4, beyond=beyond)
    assert (allocation.tiles, allocation.count) == (4, 8), "as without any beyond"
    room = beyond // 2 // 2
    assert allocation.tiles_beyond == min(room, 3) + min(room, 2)
    for shard, images in ((0, [0, 1, 2, 3, 4]), (1, [5, 6, 7, 0])):
        first = [allocation.pages(shard, image)[0, 0] for image in images]
        assert first[:2] == [4 * shard, 4 * shard + 2]
        begin = allocation.count + shard * allocation.beyond
        outside = [begin + 2 * i if i < room else -1 for i in range(len(images) - 2)]
        assert first[2:] == outside


def test_where_none_is_used_none_is_beyond_either():
    allocation = PageAllocation(
        ORDER, PIECES, lambda image: (1, PAGE), limit=4, unused=True, beyond=8
    )
    assert allocation.pages(0, 4).max() == -1
