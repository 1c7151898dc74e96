"""Which pages of the visual-token cache a picture has: a function of the data's order alone.

A virtual shard's rows always lie on the same device, whichever mesh there is: row r of a batch is
of the shards ``r * V/B`` and following. So pages are dealt to virtual shards in their order, and a
picture has the same pages for good, in each virtual shard that it is in.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.data.errors import DataError
from jaxvlm.data.order import Order
from jaxvlm.data.packing import Pieces
from jaxvlm.types import PAGE, Batch


class Given(NamedTuple):
    """Visual tokens that come with a batch."""

    width: int
    dtype: Any


class Unpaged(NamedTuple):
    """Pictures whose tokens come with the batch, or are made, and have no pages."""

    windows: tuple[int, ...]
    """As of :class:`Slots`."""


class Written:
    """Which pages are known to hold their pictures' tokens; for any thread.

    A step's pages are known when the step is done and was not skipped, so what is known is never
    too much; what is written of a frozen tower stays, until all is gone at once.

    Attributes:
        turn: rises whenever all is gone.
    """

    def __init__(self) -> None:
        self.turn = 0
        self._keys: dict[int, bytes] = {}
        self._under_way: collections.deque[tuple[int, dict[int, bytes]]] = collections.deque()

    def take(self, batch: Batch) -> None:
        """A step is sent of these rows."""
        made: dict[int, bytes] = {}
        if batch.image_pages is not None:
            here = batch.image_start >= 0
            first = batch.image_pages[here][:, 0].tolist()
            pages = zip(first, batch.image_key[here], strict=True)
            made = {page: key.tobytes() for page, key in pages if page >= 0}
        self._under_way.append((self.turn, made))

    def settle(self, good: bool) -> None:
        """The step that was sent first, of those under way, is done; or was skipped."""
        turn, made = self._under_way.popleft()
        if good and turn == self.turn:
            self._keys.update(made)

    def forget(self) -> None:
        """No page holds anything any more."""
        self._keys = {}
        self.turn += 1  # behind: who sees it finds no page of before

    def has(self, page: int, key: bytes) -> bool:
        """Whether a tile's first page holds the tokens of the one with this key."""
        return self._keys.get(page) == key


def windows_of(largest: int, room: Callable[[int], int] | None) -> tuple[int, ...]:
    """The largest picture's tokens; of pictures of any size about a quarter, a half and all.

    Args:
        largest: its tokens.
        room: see :class:`Slots`.
    """
    return tuple(sorted({room(largest >> i) for i in range(3)})) if room else (largest,)


class Slots:
    """Pages of each picture.

    Args:
        order: of the run's rows.
        pieces: what they are made of.
        size: a picture's tiles, and the tower's tokens of each.
        limit: tiles that have pages, over all virtual shards; 0: all.
        room: tokens -> as many or more, of sizes that kernels like; ``None``: pictures of one size.
        unused: there are as many pages, and no picture has one.
        given: what tokens that come with a batch are like; ``None``: none do.
        beyond: pages in host memory, over all virtual shards, for pictures that have none on the
            devices; they are numbered from ``count`` on.

    Attributes:
        tiles: tiles that have pages on the devices.
        tiles_beyond: tiles that have pages in host memory.
        pages_beyond: their pages.
        all_on_devices: whether no picture is without pages on the devices.
        beyond: pages that a virtual shard has there, no more than one of them needs.
        count: C, pages in all, those that no picture has counted too.
        per_tile: pages of the largest tile.
        windows: see :func:`windows_of`.

    Raises:
        DataError: not a tile for each virtual shard.
    """

    def __init__(
        self,
        order: Order,
        pieces: Pieces,
        size: Callable[[int], tuple[int, int]],
        limit: int,
        room: Callable[[int], int] | None = None,
        unused: bool = False,
        given: Given | None = None,
        beyond: int = 0,
    ):
        self.unused, self.given, self._size = unused, given, size
        self.beyond, self._turns = beyond // order.num_shards, order.turns
        if 0 < limit < order.num_shards:
            raise DataError(
                f"cache.pictures={limit} is less than one for each of the {order.num_shards} "
                f"virtual shards of the data; {order.num_shards} would do, or a lower "
                "data.virtual_shards"
            )
        most = limit // order.num_shards
        self._first: list[dict[int, int]] = []
        self._outside: list[dict[int, int]] = []
        self.all_on_devices = True
        self.tiles = self.tiles_beyond = self.pages_beyond = self._room = largest = 0
        for shard in order.shards:
            first: dict[int, int] = {}
            outside: dict[int, int] = {}
            tiles = pages = spent = 0
            is_full = False
            for picture in (p for piece in shard.tolist() for p in pieces.pictures[piece]):
                count, tokens = size(picture)
                largest = max(largest, tokens)
                if picture in first or picture in outside:
                    continue
                needed = count * _pages(tokens)
                if not limit or tiles + count <= most:
                    first[picture] = pages
                    tiles += count
                    pages += needed
                    continue
                self.all_on_devices = False
                # The first that has no room ends it, so that a picture's place is the same
                # whatever room there is.
                is_full = is_full or spent + needed > self.beyond
                if not is_full:
                    outside[picture] = spent
                    self.tiles_beyond += count
                    self.pages_beyond += needed
                    spent += needed
            self._first.append(first)
            self._outside.append(outside)
            self.tiles += tiles
            self._room = max(self._room, pages)
        if self.tiles_beyond:  # numbers of pages that nobody needs could leave int32's range
            self.beyond = max(
                at + pages
                for shard in range(len(self._outside))
                for at, pages in self.room_beyond(shard).items()
            )
        self._room = self._room or 1  # arrays of no rows can't be split
        self.per_tile = _pages(largest)
        self.windows = windows_of(largest, room)
        self.count = order.num_shards * self._room

    def shards_of(self, row: int) -> range:
        """The virtual shards whose rows are a batch's row."""
        return range(row * self._turns, (row + 1) * self._turns)

    def room_beyond(self, shard: int) -> dict[int, int]:
        """Of a virtual shard: first page in host memory of each tile that has some there, counted
        from 0, and how many it has.
        """
        room: dict[int, int] = {}
        for picture, first in self._outside[shard].items():
            tiles, tokens = self._size(picture)
            count = _pages(tokens)
            room.update((first + i * count, count) for i in range(tiles))
        return room

    def pages(self, shard: int, picture: int) -> np.ndarray:
        """i32[tiles, per_tile]: pages of a picture's tiles; -1 where there is none, ``count`` and
        above in host memory.
        """
        tiles, tokens = self._size(picture)
        out = np.full((tiles, self.per_tile), -1, np.int32)
        first = self._first[shard].get(picture, -1)
        outside = self._outside[shard].get(picture, -1)
        if max(first, outside) >= 0 and not self.unused:
            count = _pages(tokens)
            begin = shard * self._room + first
            if outside >= 0:
                begin = self.count + shard * self.beyond + outside
            out[:, :count] = begin + np.arange(tiles * count).reshape(tiles, count)
        return out


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
