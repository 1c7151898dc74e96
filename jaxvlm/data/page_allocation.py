"""Allocation of the visual-token cache's pages to images: a function of the data order alone.

A row of the batch is always on the same device of a mesh, and has the same records in each pass, on
whichever mesh. So pages are allocated to rows, and an image has the same pages for the whole run,
in each row that it is in.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.data.conversations.mixture import MixtureOrder
from jaxvlm.data.conversations.packing import Pieces, SequenceOrder
from jaxvlm.data.errors import DataError
from jaxvlm.types import PAGE, Batch


class TokenShape(NamedTuple):
    """Width and dtype of visual tokens that come with a batch."""

    width: int
    """Channels of a token."""
    dtype: Any


class NoPages(NamedTuple):
    """Stands for a cache without pages: tokens come with the batch, or images are encoded."""

    windows: tuple[int, ...]
    """As of :class:`PageAllocation`."""


class WrittenPages:
    """Record of the pages that hold their images' tokens; may be used from any thread.

    A step's pages are recorded once the step is done and its update was not skipped, so every page
    in the record is written. Tokens of a frozen vision encoder stay until all pages are evicted.

    Attributes:
        generation: rises whenever all pages are evicted.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._keys: dict[int, bytes] = {}
        self._pending: collections.deque[tuple[int, dict[int, bytes]]] = collections.deque()

    def take(self, batch: Batch) -> None:
        """Note the pages of a batch whose step was dispatched."""
        written: dict[int, bytes] = {}
        if batch.image_pages is not None:
            is_image = batch.image_start >= 0
            first = batch.image_pages[is_image][:, 0].tolist()
            pages = zip(first, batch.image_key[is_image], strict=True)
            written = {page: key.tobytes() for page, key in pages if page >= 0}
        self._pending.append((self.generation, written))

    def settle(self, good: bool) -> None:
        """Record the pages of the oldest pending step, which is done.

        Args:
            good: whether its update was applied; a skipped one wrote no page.
        """
        generation, written = self._pending.popleft()
        if good and generation == self.generation:
            self._keys.update(written)

    def forget(self) -> None:
        """Drop the record: all pages were evicted."""
        self._keys = {}
        self.generation += 1  # last: a thread that sees it finds no page of before

    def has(self, page: int, key: bytes) -> bool:
        """Whether a tile's first page holds the tokens of the tile with this key."""
        return self._keys.get(page) == key


def windows_of(largest: int, room: Callable[[int], int] | None) -> tuple[int, ...]:
    """Return the numbers of tokens that images are padded to when they are encoded, ascending.

    Images of one size have one window. Images of any size have up to three: about a quarter, a
    half and all of the largest image's tokens.

    Args:
        largest: tokens of the largest image.
        room: see :class:`PageAllocation`.
    """
    return tuple(sorted({room(largest >> i) for i in range(3)})) if room else (largest,)


class PageAllocation:
    """Allocates the cache's pages to the images of the training data.

    Args:
        order: of the run's packed sequences.
        pieces: records that the sequences are packed from.
        size: image -> its tiles, and the vision encoder's tokens of each tile.
        limit: tiles that have pages on the devices, over all rows of the batch; 0: all.
        room: tokens -> that number rounded up to a size that kernels run well on; ``None``: images
            have one size.
        unused: allocate the pages, but give none to an image.
        given: shape of tokens that come with a batch; ``None``: none do.
        beyond: pages in host memory, over all rows, for images that have none on the
            devices; they are numbered from ``count`` on.

    Attributes:
        tiles: tiles that have pages on the devices.
        tiles_beyond: tiles that have pages in host memory.
        pages_beyond: pages of those tiles.
        all_on_devices: whether every image has pages on the devices.
        beyond: pages in host memory of each row, at most as many as the fullest needs.
        count: C, pages on the devices, including those that no image has.
        per_tile: pages of the largest tile.
        windows: see :func:`windows_of`.

    Raises:
        DataError: ``limit`` is below one tile a row.
    """

    def __init__(
        self,
        order: SequenceOrder | MixtureOrder,
        pieces: Pieces,
        size: Callable[[int], tuple[int, int]],
        limit: int,
        room: Callable[[int], int] | None = None,
        unused: bool = False,
        given: TokenShape | None = None,
        beyond: int = 0,
    ):
        self.unused, self.given, self._size = unused, given, size
        self.beyond = beyond // order.rows
        if 0 < limit < order.rows:
            raise DataError(
                f"cache.max_images={limit} is less than one for each sequence of a batch; set it "
                f"to data.batch_size={order.rows} or more"
            )
        most = limit // order.rows
        self._first: list[dict[int, int]] = []
        self._outside: list[dict[int, int]] = []
        self.all_on_devices = True
        self.tiles = self.tiles_beyond = self.pages_beyond = self._room = largest = 0
        for row in range(order.rows):
            first: dict[int, int] = {}
            outside: dict[int, int] = {}
            tiles = pages = spent = 0
            is_full = False
            for image in (p for i in order.pieces_of_row(row).tolist() for p in pieces.images[i]):
                count, tokens = size(image)
                largest = max(largest, tokens)
                if image in first or image in outside:
                    continue
                needed = count * _pages(tokens)
                if not limit or tiles + count <= most:
                    first[image] = pages
                    tiles += count
                    pages += needed
                    continue
                self.all_on_devices = False
                # The first image without room ends the allocation, so that an image's page number
                # does not depend on how much host memory there is.
                is_full = is_full or spent + needed > self.beyond
                if not is_full:
                    outside[image] = spent
                    self.tiles_beyond += count
                    self.pages_beyond += needed
                    spent += needed
            self._first.append(first)
            self._outside.append(outside)
            self.tiles += tiles
            self._room = max(self._room, pages)
        if self.tiles_beyond:  # numbers of unused pages could exceed int32
            self.beyond = max(
                at + pages
                for row in range(order.rows)
                for at, pages in self.room_beyond(row).items()
            )
        self._room = self._room or 1  # an empty array can't be sharded
        self.per_tile = _pages(largest)
        self.windows = windows_of(largest, room)
        self.count = order.rows * self._room

    def room_beyond(self, row: int) -> dict[int, int]:
        """Return a row's pages in host memory: first page, counted from 0 -> number of
        pages, for each tile that has some there.
        """
        room: dict[int, int] = {}
        for image, first in self._outside[row].items():
            tiles, tokens = self._size(image)
            count = _pages(tokens)
            room.update((first + i * count, count) for i in range(tiles))
        return room

    def pages(self, row: int, image: int) -> np.ndarray:
        """Return the pages i32[tiles, per_tile] of an image's tiles.

        -1: no page; below ``count``: on the devices; ``count`` and above: in host memory.
        """
        tiles, tokens = self._size(image)
        out = np.full((tiles, self.per_tile), -1, np.int32)
        first = self._first[row].get(image, -1)
        outside = self._outside[row].get(image, -1)
        if max(first, outside) >= 0 and not self.unused:
            count = _pages(tokens)
            begin = row * self._room + first
            if outside >= 0:
                begin = self.count + row * self.beyond + outside
            out[:, :count] = begin + np.arange(tiles * count).reshape(tiles, count)
        return out


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
