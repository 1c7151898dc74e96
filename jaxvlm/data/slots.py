"""Which pages of the visual-token cache a picture has: a function of the data's order alone.

A virtual shard's rows always lie on the same device, whichever mesh there is: row r of a batch is
of the shards ``r * V/B`` and following. So pages are dealt to virtual shards in their order, and a
picture has the same pages for good, in each virtual shard that it is in.
"""

from __future__ import annotations

import numpy as np

from jaxvlm.data.chat import Corpus
from jaxvlm.data.errors import DataError
from jaxvlm.data.order import Order
from jaxvlm.data.packing import Pieces


class Slots:
    """Pages of each picture.

    Args:
        order: of the run's rows.
        pieces: what they are made of.
        corpus: says how many tiles a picture has.
        per_tile: pages of a tile.
        limit: tiles that have pages, over all virtual shards; 0: all.
        unused: there are as many pages, and no picture has one.

    Attributes:
        tiles: tiles that have pages.
        count: C, pages in all, those that no picture has counted too.

    Raises:
        DataError: not a tile for each virtual shard.
    """

    def __init__(
        self,
        order: Order,
        pieces: Pieces,
        corpus: Corpus,
        per_tile: int,
        limit: int,
        unused: bool = False,
    ):
        self.per_tile, self.unused = per_tile, unused
        if 0 < limit < order.num_shards:
            raise DataError(
                f"cache.pictures={limit} is less than one for each of the {order.num_shards} "
                f"virtual shards of the data; {order.num_shards} would do, or a lower "
                "data.virtual_shards"
            )
        room = limit // order.num_shards
        self._first: list[dict[int, int]] = []
        used = []
        for shard in order.shards:
            first: dict[int, int] = {}
            taken = 0
            for picture in (p for piece in shard.tolist() for p in pieces.pictures[piece]):
                tiles = len(corpus.spans[picture].starts)
                if picture not in first and (not limit or taken + tiles <= room):
                    first[picture] = taken
                    taken += tiles
            self._first.append(first)
            used.append(taken)
        self._room = room or max(used)
        self.tiles = sum(used)
        self.count = order.num_shards * self._room * per_tile

    def pages(self, shard: int, picture: int, tiles: int) -> np.ndarray:
        """i32[tiles, n]: pages of a picture's tiles; -1 where it has none."""
        first = self._first[shard].get(picture, -1)
        if first < 0 or self.unused:
            return np.full((tiles, self.per_tile), -1, np.int32)
        tile = shard * self._room + first + np.arange(tiles, dtype=np.int32)
        return tile[:, None] * self.per_tile + np.arange(self.per_tile, dtype=np.int32)
