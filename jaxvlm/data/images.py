"""Picture files -> u8 pixels of one size, their cache keys, and their augmentation."""

from __future__ import annotations

import collections
import hashlib
import io
import os
import pathlib
import sys
import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8, UInt32
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from jaxvlm.data import tars
from jaxvlm.data.errors import ImageError
from jaxvlm.data.patches import Patching
from jaxvlm.types import Span

Pixels = UInt8[np.ndarray, "*tiles H W 3"]
RESIZE = ("auto", "squash", "pad", "crop")
PAD = 128  # grey: 0 once the model has mapped 0..255 to -1..1

_open_lock = threading.Lock()  # warnings.catch_warnings is not safe among threads


class Decoded(NamedTuple):
    """A picture, ready for a batch."""

    pixels: Pixels
    digest: bytes
    """16 bytes: hash of the file."""


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What is decoded. Not all that Pillow knows: its EPS reader runs Ghostscript on the file."""


def check(path: str, max_pixels: int) -> str | None:
    """Why a picture can't be used, as far as its header tells; nothing is decoded.

    Args:
        path: picture file.
        max_pixels: width times height, at most.

    Returns:
        The reason, or None if the header is good.
    """
    try:
        with _open(path, max_pixels):
            return None
    except ImageError as error:
        return str(error)


class Preparation(NamedTuple):
    """How a picture becomes pixels."""

    convert: Callable[[Image.Image], Pixels]
    """An upright picture of any mode -> u8[H, W, 3], of one size or its own; or its tiles of one
    size, u8[tiles, H, W, 3]."""
    fingerprint: str
    """Preparations with the same one give the same pixels."""
    draft: int = 0
    """Pixels a side below which a JPEG is never decoded; 0: always in full."""


class PictureFormat(NamedTuple):
    """What a model wants of a picture."""

    prepare: Preparation
    size: int
    """Pixels a side of a tile; 0 where pictures keep their shape."""
    span: Callable[[int, int], Span]
    """(width, height) of an upright picture -> its tokens."""
    fixed: bool = True
    """Whether every picture has the same."""
    patching: Patching | None = None
    """How pictures of any size are cut; ``None`` where all have one size."""

    def of_file(self, path: str) -> Span:
        """The span of a file.

        Raises:
            ImageError: its size can't be read, or the model takes no such picture.
        """
        if self.fixed:
            return self.span(0, 0)
        with _open(path, sys.maxsize) as image:
            try:
                turned = image.getexif().get(ExifTags.Base.Orientation, 1) > 4
            except Exception as error:  # of a PNG, Pillow looks for it behind the pixels too
                raise ImageError(_reason(error)) from None
            return self.of_size(*(image.size[::-1] if turned else image.size))

    def of_size(self, width: int, height: int) -> Span:
        """The span of an upright picture. Raises ImageError: the model takes no such picture."""
        try:
            return self.span(width, height)
        except ValueError as error:
            raise ImageError(str(error)) from None


def squares(size: int, resize: str = "auto") -> Preparation:
    """Squares of RGB; transparency is laid over white.

    A JPEG much larger than ``size`` is decoded at a half, quarter or eighth, never below twice
    ``size``.

    Args:
        size: pixels a side.
        resize: ``squash`` (or ``auto``) to a square; ``pad`` to one with grey; ``crop`` its
            middle.
    """

    def convert(image: Image.Image) -> Pixels:
        return np.asarray(_fit(rgb(image), size, resize))

    kind = "squash" if resize == "auto" else resize
    return Preparation(convert, f"{size}|{kind}|rgb-1", 2 * size)


def load(path: str, prepare: Preparation, max_pixels: int = 50_000_000) -> Pixels:
    """Decode a picture and prepare it; its EXIF orientation is applied.

    Args:
        path: picture file.
        prepare: how it becomes pixels.
        max_pixels: width times height, at most.

    Raises:
        ImageError: why it can't be decoded.
    """
    return decode(_bytes(path), prepare, max_pixels)


def decode(data: bytes, prepare: Preparation, max_pixels: int) -> Pixels:
    """:func:`load`, of a file's bytes."""
    with _open(io.BytesIO(data), max_pixels) as image:
        try:
            if prepare.draft:
                image.draft("RGB", (prepare.draft, prepare.draft))
            image.load()
            return prepare.convert(_upright(image))
        except Exception as error:  # damaged files make Pillow's decoders raise all kinds
            raise ImageError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """What is wrong with a picture that Pillow can't decode."""
    short = "truncated" in str(error) or "broken" in str(error)
    return "truncated file" if short else f"can't be decoded: {str(error) or type(error).__name__}"


def convert(image: Image.Image, prepare: Preparation) -> Pixels:
    """An open picture as :func:`load` gives it."""
    return prepare.convert(ImageOps.exif_transpose(image))


def key(
    digest: bytes, fingerprint: str, augmentation: tuple[int, ...] = ()
) -> UInt32[np.ndarray, "4"]:
    """The visual-token cache's key: equal only if the model sees equal pixels.

    Args:
        digest: hash of the picture file's bytes.
        fingerprint: of the preprocessing (size, resize ...).
        augmentation: what :func:`augment` drew; () is none.

    Returns:
        u32[4].
    """
    text = f"{fingerprint}|{augmentation}".encode()
    return np.frombuffer(hashlib.blake2b(digest + text, digest_size=16).digest(), "<u4").copy()


def tile_key(key: UInt32[np.ndarray, "4"], tile: int) -> UInt32[np.ndarray, "4"]:
    """The key of a picture's tile; the first has the picture's own."""
    if not tile:
        return key
    return np.frombuffer(
        hashlib.blake2b(key.tobytes() + tile.to_bytes(4, "little"), digest_size=16).digest(), "<u4"
    ).copy()


def draw(rng: np.random.Generator, flip: bool, shift: int) -> tuple[int, ...]:
    """An augmentation: (mirrored 0|1, pixels down, pixels right); () where it changes nothing."""
    mirrored = int(rng.integers(2)) if flip else 0
    down, right = (int(i) for i in rng.integers(-shift, shift + 1, 2)) if shift else (0, 0)
    return (mirrored, down, right) if mirrored or down or right else ()


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """A prepared picture in another's size."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def augment(pixels: Pixels, drawn: tuple[int, ...]) -> Pixels:
    """Apply what :func:`draw` drew; edges are repeated where a shift uncovers them."""
    if not drawn:
        return pixels
    mirrored, down, right = drawn
    height, width = pixels.shape[-3:-1]
    rows = np.clip(np.arange(height) - down, 0, height - 1)
    columns = np.clip(np.arange(width) - right, 0, width - 1)
    columns = columns[::-1] if mirrored else columns
    return pixels[..., rows[:, None], columns[None, :], :]


class Pictures:
    """Decoded pictures by file, the latest used kept up to a number of megabytes."""

    def __init__(self, prepare: Preparation, max_pixels: int, cache_mb: int):
        """Say how pictures are decoded.

        Args:
            prepare: how a picture becomes pixels.
            max_pixels: of a file, at most.
            cache_mb: bound on the pixels kept in memory, in 2**20 bytes.
        """
        self.prepare, self.max_pixels = prepare, max_pixels
        self._room = cache_mb * 2**20
        self._kept: collections.OrderedDict[str, Decoded] = collections.OrderedDict()
        self._digests: dict[str, bytes] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, path: str) -> Decoded:
        """The picture of a file, decoded now or before.

        Raises:
            ImageError: why it can't be decoded.
        """
        with self._lock:
            if path in self._kept:
                self._kept.move_to_end(path)
                return self._kept[path]
        data = _bytes(path)
        pixels = decode(data, self.prepare, self.max_pixels)
        decoded = Decoded(pixels, hashlib.blake2b(data, digest_size=16).digest())
        with self._lock:
            self._digests[path] = decoded.digest
            if path not in self._kept and pixels.nbytes <= self._room:
                self._kept[path] = decoded
                self._bytes += pixels.nbytes
                while self._bytes > self._room:
                    self._bytes -= self._kept.popitem(last=False)[1].pixels.nbytes
        return decoded

    def digest(self, path: str) -> bytes:
        """16 bytes: hash of a file; nothing is decoded.

        Raises:
            ImageError: why it can't be read.
        """
        if path not in self._digests:
            self._digests[path] = hashlib.blake2b(_bytes(path), digest_size=16).digest()
        return self._digests[path]


def name_and_size(path: str) -> tuple[str, int]:
    """A picture file's name without its folder, and its bytes; what a data set is known by."""
    size = tars.size(path) if tars.is_member(path) else os.path.getsize(path)
    return os.path.basename(path), size


def _bytes(path: str) -> bytes:
    try:
        return tars.read(path) if tars.is_member(path) else pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        raise ImageError("missing file") from None
    except (OSError, ValueError) as error:
        raise ImageError(f"can't be read: {getattr(error, 'strerror', error)}") from None


def _open(source: str | io.BytesIO, max_pixels: int) -> ImageFile.ImageFile:
    """Open a picture and read its header; raises ImageError."""
    if isinstance(source, str) and tars.is_member(source):
        source = io.BytesIO(_bytes(source))
    try:
        empty = not (os.stat(source).st_size if isinstance(source, str) else source.getbuffer())
        if empty:
            raise ImageError("0-byte file")
        with _open_lock, warnings.catch_warnings():
            # Our own bound follows, and names the record.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(source, formats=FORMATS)
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError("missing file") from None
    except UnidentifiedImageError:
        raise ImageError("not a picture that Pillow can read") from None
    except Image.DecompressionBombError:
        raise ImageError(f"more than data.max_pixels={max_pixels} pixels") from None
    except Exception as error:  # damaged headers make Pillow's plugins raise all kinds
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageError(f"can't be read: {reason}") from None
    if image.width * image.height > max_pixels:
        image.close()
        raise ImageError(f"more than data.max_pixels={max_pixels} pixels")
    return image


def _upright(image: Image.Image) -> Image.Image:
    ImageOps.exif_transpose(image, in_place=True)  # in place: else it copies upright ones too
    return image


def rgb(image: Image.Image) -> Image.Image:
    """Any mode as RGB; transparency over white."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        # Pillow's own conversion clips at 255 instead of scaling.
        values = np.asarray(image).astype(np.float64)
        scale = 255 / 65535 if values.max(initial=0) > 255 else 1.0
        grey = np.clip(np.rint(values * scale), 0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _fit(image: Image.Image, size: int, resize: str) -> Image.Image:
    """To ``size`` by ``size``, by one of RESIZE."""
    if image.size == (size, size):
        return image
    if resize == "pad":
        # Not ImageOps.pad: it rounds the short side of a 1 x 40 picture to nothing.
        scale = size / max(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        canvas = Image.new("RGB", (size, size), (PAD, PAD, PAD))
        inner = image.resize((width, height), Image.Resampling.BICUBIC)
        canvas.paste(inner, ((size - width) // 2, (size - height) // 2))
        return canvas
    if resize == "crop":
        return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return image.resize((size, size), Image.Resampling.BICUBIC)
