"""Input of an image to a batch: pixels to encode, or cached visual tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.data.errors import ImageError
from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import Patching
from jaxvlm.types import Span

_AUDIT = 0xAD  # tag of a random stream
Lookup = Callable[[bytes], np.ndarray | None]
"""16 bytes of a tile's key -> its cached visual tokens [P, D]; None on a miss."""

Tag = Callable[[np.ndarray], np.ndarray]
"""u32[4] key of a tile -> u32[4] key that its tokens are cached under."""


class ImageInput(NamedTuple):
    """One tile of an image: its pixels, or its cached visual tokens, or neither."""

    key: np.ndarray
    """u32[4]: cache key."""
    pixels: np.ndarray | None
    """u8[H, W, 3]; ``None`` if the tokens are cached."""
    tokens: np.ndarray | None = None
    """[P, D]; ``None`` if there are pixels, or if the tokens are on the devices."""
    grid: tuple[int, int, int] | None = None
    """(t, h, w) in patches, for images of any size without pixels."""

    @property
    def in_pages(self) -> bool:
        """Whether there are neither pixels nor tokens, as the tokens are on the devices."""
        return self.pixels is None and self.tokens is None


class ImageInputs:
    """Inputs of a data set's images: decodes them, or finds their cached visual tokens.

    Args:
        paths: image files.
        spans: token span of each image; () if sequences have no image tokens.
        image_cache: decodes the files.
        patching: how images of any size are cut into patches; ``None`` if all have the same size.

    Attributes:
        lookup: finds cached tokens before an image is decoded; ``None`` finds none.
        tag: maps a tile's key to the key that its tokens are cached under; ``None`` keeps it.
        audited: fraction of the images, 0..1, that skip the lookup so that their tokens are
            recomputed.
    """

    def __init__(
        self,
        paths: Sequence[str],
        spans: Sequence[Span],
        image_cache: image_files.ImageCache,
        patching: Patching | None,
    ):
        self.paths, self.spans, self.patching, self._images = paths, spans, patching, image_cache
        self.lookup: Lookup | None = None
        self.tag: Tag | None = None
        self.audited = 0.0

    def audits(self, image: int, pass_: int) -> bool:
        """Whether an image comes as pixels in a pass although its tokens may be cached."""
        chance = np.random.default_rng([_AUDIT, pass_, image]).random() if self.audited else 1.0
        return bool(chance < self.audited)

    def get(
        self, image: int, augmentation: tuple[int, ...] = (), other: np.ndarray | None = None,
        use_cached: bool = False, written: Callable[[int, bytes], bool] | None = None,
    ) -> list[ImageInput]:  # fmt: skip
        """Load the tiles of an image.

        Args:
            image: index into ``paths``.
            augmentation: drawn transformation, see :func:`jaxvlm.data.images.image_files.draw`.
            other: another image for each image, resized to its size: the blind control.
            use_cached: whether cached tokens may replace the pixels.
            written: function of a tile's index and the 16 bytes of its key that tells whether its
                tokens are on the devices, so that neither pixels nor tokens are needed.

        Raises:
            ImageError: the image can't be used; the message is the reason.
        """
        if use_cached and written and (cached := self._written_tiles(image, written)):
            return cached
        if use_cached and self.lookup and (cached := self._cached_tiles(image, self.lookup)):
            return cached
        decoded = self._decode(image, other)
        pixels = image_files.augment(decoded.pixels, augmentation)
        tiles = list(pixels[None] if pixels.ndim == 3 else pixels)
        return [
            ImageInput(*x) for x in zip(self._keys(decoded.digest, len(tiles), augmentation), tiles)
        ]

    def _keys(
        self, digest: bytes, tiles: int, augmentation: tuple[int, ...] = ()
    ) -> list[np.ndarray]:
        key, tag = image_files.key(digest, self._images.prepare.fingerprint, augmentation), self.tag
        keys = [image_files.tile_key(key, i) for i in range(tiles)]
        return [tag(key) for key in keys] if tag else keys

    def _cached_tiles(self, image: int, lookup: Lookup) -> list[ImageInput]:
        """Find the cached tokens of all tiles of an image without decoding it; [] on a miss."""
        out = []
        for key, grid in self._tiles(image):
            tokens = lookup(key.tobytes())
            if tokens is None or (grid and len(tokens) != math.prod(grid)):
                return []
            out.append(ImageInput(key, None, tokens, grid))
        return out

    def _written_tiles(self, image: int, written: Callable[[int, bytes], bool]) -> list[ImageInput]:
        """Build empty tiles of an image if the tokens of all are on the devices; else []."""
        tiles = self._tiles(image)
        on_device = (written(i, key.tobytes()) for i, (key, _) in enumerate(tiles))
        return [ImageInput(key, None, None, grid) for key, grid in tiles] if all(on_device) else []

    def _tiles(self, image: int) -> list[tuple[np.ndarray, tuple[int, int, int] | None]]:
        """Key and grid of each tile of an image without decoding it; [] if that is impossible."""
        patching, grid, tiles = self.patching, None, 1
        if self.spans and patching:
            # With three rows of positions (M-RoPE), a token's position is that of its patch block.
            span = self.spans[image]
            where = span.positions[:, span.tile > 0]
            if len(where) != 3:
                return []
            t, h, w = (int(x.max() - x.min()) + 1 for x in where)
            grid = (t, h * patching.block, w * patching.block)
        elif self.spans:
            tiles = len(self.spans[image].starts)
        keys = self._keys(self._images.digest(self.paths[image]), tiles)
        return [(key, grid) for key in keys]

    def _decode(self, image: int, other: np.ndarray | None) -> image_files.Decoded:
        """Decode an image, or for the blind control another one resized; raises ImageError."""
        patching, paths = self.patching, self.paths
        if not self.spans:
            return self._images.get(paths[image])
        if patching is None:
            decoded = self._images.get(paths[image if other is None else int(other[image])])
            expected, tiles = len(self.spans[image].starts), decoded.pixels
            if tiles.ndim == 3:
                return decoded
            if other is None and len(tiles) != expected:  # its tokens are in the sequence already
                raise ImageError(f"cut into {len(tiles)} tiles instead of {expected}")
            # Another image may have fewer tiles: they are repeated.
            return decoded._replace(pixels=tiles[np.arange(expected) % len(tiles)])
        own = self._images.get(paths[image])
        tokens = int((self.spans[image].tile > 0).sum())
        if tokens * patching.per_token != math.prod(patching.grid(own.pixels)):
            raise ImageError("its prepared size differs from the size in its header")
        if other is None:
            return own
        decoded = self._images.get(paths[int(other[image])])
        pixels = image_files.resized(decoded.pixels, *own.pixels.shape[:2])
        return decoded._replace(pixels=pixels)
