"""Input of an image to a batch: pixels to encode, or cached visual tokens."""

from __future__ import annotations

import collections
import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.data.errors import ImageError
from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.sources.member_names import is_video
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
    """u8[H, W, 3], or u8[frames, H, W, 3] of a video; ``None`` if the tokens are cached."""
    tokens: np.ndarray | None = None
    """[P, D]; ``None`` if there are pixels, or if the tokens are on the devices."""
    grid: tuple[int, int, int] | None = None
    """(t, h, w) in patches, for images of any size without pixels."""

    @property
    def in_pages(self) -> bool:
        """Whether there are neither pixels nor tokens, as the tokens are on the devices."""
        return self.pixels is None and self.tokens is None


class ImageCache:
    """LRU cache of decoded images by file, of a limited number of megabytes."""

    def __init__(self, prepare: image_files.Preparation, max_pixels: int, cache_mb: int):
        """Create an empty cache.

        Args:
            prepare: preprocessing of images.
            max_pixels: maximum of an image's width times height.
            cache_mb: maximum size of the cached pixels, in 2**20 bytes.
        """
        self.prepare, self.max_pixels = prepare, max_pixels
        self._max_bytes = cache_mb * 2**20
        self._images: collections.OrderedDict[str, image_files.Decoded] = collections.OrderedDict()
        self._digests: dict[str, bytes] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, path: str) -> image_files.Decoded:
        """Return the image of a file, decoding it on a miss.

        Raises:
            ImageError: the image can't be decoded; the message is the reason.
        """
        with self._lock:
            if path in self._images:
                self._images.move_to_end(path)
                return self._images[path]
        if is_video(path):  # a video's bytes are never all in memory
            pixels = self.prepare.of_videos().decode(path, self.max_pixels)
            digest = image_files.digest(path)
        else:
            data = image_files.read_bytes(path)
            pixels = image_files.decode(data, self.prepare, self.max_pixels)
            digest = hashlib.blake2b(data, digest_size=16).digest()
        decoded = image_files.Decoded(pixels, digest)
        with self._lock:
            self._digests[path] = decoded.digest
            if path not in self._images and pixels.nbytes <= self._max_bytes:
                self._images[path] = decoded
                self._bytes += pixels.nbytes
                while self._bytes > self._max_bytes:
                    self._bytes -= self._images.popitem(last=False)[1].pixels.nbytes
        return decoded

    def digest(self, path: str) -> bytes:
        """Hash a file's bytes to 16 bytes, without decoding it.

        Raises:
            ImageError: the file can't be read; the message is the reason.
        """
        if path not in self._digests:
            self._digests[path] = image_files.digest(path)
        return self._digests[path]


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
        image_cache: ImageCache,
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
        tiles = list(_tiles_of(image_files.augment(decoded.pixels, augmentation)))
        keys = self._keys(image, decoded.digest, len(tiles), augmentation)
        return [ImageInput(*x) for x in zip(keys, tiles)]

    def _keys(
        self, image: int, digest: bytes, tiles: int, augmentation: tuple[int, ...] = ()
    ) -> list[np.ndarray]:
        fingerprint = self._images.prepare.of(self.paths[image])
        key, tag = image_files.key(digest, fingerprint, augmentation), self.tag
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
        if self.spans:
            span, tiles = self.spans[image], len(self.spans[image].starts)
            if patching:
                # With three rows of positions (M-RoPE), a token's are those of its patch block.
                where = span.positions[:, span.tile == 1]  # a video's frames have one size
                if len(where) != 3:
                    return []
                t, h, w = (int(x.max() - x.min()) + 1 for x in where)
                grid = (t, h * patching.block, w * patching.block)
        keys = self._keys(image, self._images.digest(self.paths[image]), tiles)
        return [(key, grid) for key in keys]

    def _decode(self, image: int, other: np.ndarray | None) -> image_files.Decoded:
        """Decode an image, or for the blind control another one resized; raises ImageError."""
        patching, paths = self.patching, self.paths
        if not self.spans:
            return self._images.get(paths[image])
        if patching is None:
            decoded = self._images.get(paths[image if other is None else int(other[image])])
            expected, tiles = len(self.spans[image].starts), _tiles_of(decoded.pixels)
            if other is None:
                if len(tiles) != expected:  # its tokens are in the sequence already
                    raise ImageError(f"cut into {len(tiles)} tiles instead of {expected}")
                return decoded
            # Another image may have fewer tiles: they are repeated.
            return decoded._replace(pixels=tiles[np.arange(expected) % len(tiles)])
        own, span = self._images.get(paths[image]), self.spans[image]
        tiles, tokens = _tiles_of(own.pixels), int((span.tile > 0).sum())
        patches = len(tiles) * math.prod(patching.grid(tiles[0]))
        if (len(span.starts), tokens * patching.per_token) != (len(tiles), patches):
            raise ImageError("its prepared size differs from the size in its header")
        if other is None:
            return own
        decoded = self._images.get(paths[int(other[image])])
        others = _tiles_of(decoded.pixels)[np.arange(len(tiles)) % len(_tiles_of(decoded.pixels))]
        height, width = tiles.shape[-3:-1]
        return decoded._replace(
            pixels=np.stack([image_files.resized(tile, height, width) for tile in others])
        )


def _tiles_of(pixels: np.ndarray) -> np.ndarray:
    """An image's tiles, of which it may be the only one: u8[tiles, ..., H, W, 3]."""
    return pixels[None] if pixels.ndim == 3 else pixels
