"""A picture as a batch wants it: pixels to encode, or visual tokens that were made before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.data import images
from jaxvlm.data.errors import ImageError
from jaxvlm.data.patches import Patching
from jaxvlm.types import Span

_AUDIT = 0xAD  # tag of a random stream
Lookup = Callable[[bytes], np.ndarray | None]
"""16 bytes of a tile's key -> its visual tokens [P, D], where they are known."""

Tag = Callable[[np.ndarray], np.ndarray]
"""u32[4] -> u32[4]."""


class View(NamedTuple):
    """A picture's tile, or what the tower made of it."""

    key: np.ndarray
    """u32[4]."""
    pixels: np.ndarray | None
    """u8[H, W, 3]; ``None``: there are tokens."""
    tokens: np.ndarray | None = None
    """[P, D]; ``None``: there are pixels."""
    grid: tuple[int, int, int] | None = None
    """(t, h, w) in patches, where there are no pixels of a picture that may have any size."""

    @property
    def in_pages(self) -> bool:
        """Whether there are neither pixels nor tokens: these are on the devices."""
        return self.pixels is None and self.tokens is None


class Views:
    """The pictures of a data set.

    Args:
        paths: their files.
        spans: what each is in a row; () where rows have no tokens of pictures.
        pictures: decodes them.
        patching: how pictures of any size are cut; ``None`` where they have one size.

    Attributes:
        lookup: where tokens are looked for before a picture is decoded; ``None``: nowhere.
        tag: of a tile's key, what its tokens are kept by.
        audited: share of the pictures whose tokens are not looked up, so that they are made again.
    """

    def __init__(
        self,
        paths: Sequence[str],
        spans: Sequence[Span],
        pictures: images.Pictures,
        patching: Patching | None,
    ):
        self.paths, self.spans, self.patching, self._pictures = paths, spans, patching, pictures
        self.lookup: Lookup | None = None
        self.tag: Tag | None = None
        self.audited = 0.0

    def audits(self, picture: int, pass_: int) -> bool:
        """Whether a picture is shown as pixels, in a pass, although its tokens may be known."""
        chance = np.random.default_rng([_AUDIT, pass_, picture]).random() if self.audited else 1.0
        return bool(chance < self.audited)

    def get(
        self, picture: int, drawn: tuple[int, ...] = (), other: np.ndarray | None = None,
        look: bool = False, written: Callable[[int, bytes], bool] | None = None,
    ) -> list[View]:  # fmt: skip
        """The tiles of a picture.

        Args:
            picture: its number among ``paths``.
            drawn: its augmentation.
            other: for each picture another one, which is shown in its size: the blind control.
            look: whether tokens do as well.
            written: a tile's number and 16 bytes of its key -> whether nothing at all would do,
                since its tokens are on the devices.

        Raises:
            ImageError: why it can't be used.
        """
        if look and written and (found := self._left_out(picture, written)):
            return found
        if look and self.lookup and (found := self._found(picture, self.lookup)):
            return found
        decoded = self._decoded(picture, other)
        pixels = images.augment(decoded.pixels, drawn)
        tiles = list(pixels[None] if pixels.ndim == 3 else pixels)
        return [View(*x) for x in zip(self._keys(decoded.digest, len(tiles), drawn), tiles)]

    def _keys(self, digest: bytes, tiles: int, drawn: tuple[int, ...] = ()) -> list[np.ndarray]:
        key, tag = images.key(digest, self._pictures.prepare.fingerprint, drawn), self.tag
        keys = [images.tile_key(key, i) for i in range(tiles)]
        return [tag(key) for key in keys] if tag else keys

    def _found(self, picture: int, lookup: Lookup) -> list[View]:
        """The tokens of all of a picture's tiles, if they are known; nothing is decoded."""
        out = []
        for key, grid in self._tiles(picture):
            found = lookup(key.tobytes())
            if found is None or (grid and len(found) != math.prod(grid)):
                return []
            out.append(View(key, None, found, grid))
        return out

    def _left_out(self, picture: int, written: Callable[[int, bytes], bool]) -> list[View]:
        """A picture's tiles with nothing in them, if all are on the devices."""
        tiles = self._tiles(picture)
        here = (written(i, key.tobytes()) for i, (key, _) in enumerate(tiles))
        return [View(key, None, None, grid) for key, grid in tiles] if all(here) else []

    def _tiles(self, picture: int) -> list[tuple[np.ndarray, tuple[int, int, int] | None]]:
        """Key and grid of each of a picture's tiles, nothing decoded; [] where that can't be."""
        patching, grid, tiles = self.patching, None, 1
        if self.spans and patching:
            # Its tokens' positions are those of blocks of patches, where these have three rows.
            span = self.spans[picture]
            where = span.positions[:, span.tile > 0]
            if len(where) != 3:
                return []
            t, h, w = (int(x.max() - x.min()) + 1 for x in where)
            grid = (t, h * patching.block, w * patching.block)
        elif self.spans:
            tiles = len(self.spans[picture].starts)
        keys = self._keys(self._pictures.digest(self.paths[picture]), tiles)
        return [(key, grid) for key in keys]

    def _decoded(self, picture: int, other: np.ndarray | None) -> images.Decoded:
        """A picture, or for the blind control another one in its size; raises ImageError."""
        patching, paths = self.patching, self.paths
        if not self.spans:
            return self._pictures.get(paths[picture])
        if patching is None:
            found = self._pictures.get(paths[picture if other is None else int(other[picture])])
            due, tiles = len(self.spans[picture].starts), found.pixels
            if tiles.ndim == 3:
                return found
            if other is None and len(tiles) != due:  # the tokens are in the row already
                raise ImageError(f"cut in {len(tiles)} tiles, which are not its {due}")
            # Another picture may have fewer: they are gone through again.
            return found._replace(pixels=tiles[np.arange(due) % len(tiles)])
        own = self._pictures.get(paths[picture])
        tokens = int((self.spans[picture].tile > 0).sum())
        if tokens * patching.per_token != math.prod(patching.grid(own.pixels)):
            raise ImageError("prepared in another size than its header says")
        if other is None:
            return own
        decoded = self._pictures.get(paths[int(other[picture])])
        same = images.resized(decoded.pixels, *own.pixels.shape[:2])
        return decoded._replace(pixels=same)
