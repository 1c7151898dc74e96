"""Decode image files to u8 pixels, compute their cache keys, and augment them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pathlib
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt32
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError, features

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.images.patches import MAX_SIDE, Patching, Pixels
from jaxvlm.data.sources import members
from jaxvlm.data.sources.member_names import bare, is_file, is_video
from jaxvlm.data.videos import Videos
from jaxvlm.types import Span

RESIZE = ("auto", "squash", "pad", "crop")
PAD = 128  # grey: close to 0 once the model has normalized 0..255 to -1..1

_open_lock = threading.Lock()  # warnings.catch_warnings is not safe among threads


class Decoded(NamedTuple):
    """A decoded and preprocessed image."""

    pixels: Pixels
    digest: bytes
    """16 bytes: hash of the file's bytes."""


HAS_AVIF = bool(features.check("avif"))
"""Whether this Pillow reads AVIF; its wheels do from version 11.3."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", *(["AVIF"] if HAS_AVIF else []))
"""File formats that are decoded. Pillow reads more, but its EPS reader runs Ghostscript."""

_SEVERAL = (
    "several frames or pages, of which only the first would be read; save the one that is meant as "
    "a file of its own"
)
_NEW_SUBFILE, _SUBFILE = 254, 255  # TIFF tags: what a page is to others
RGB = "rgb-2"
"""Part of each preparation's fingerprint: another number where :func:`rgb` gives other pixels."""


def check(path: str, max_pixels: int) -> str | None:
    """Check an image file's header without decoding the image.

    Args:
        path: image file.
        max_pixels: maximum of width times height.

    Returns:
        The reason why the image can't be used, or None if its header is good.
    """
    try:
        with _open(path, max_pixels):
            return None
    except ImageError as error:
        return str(error)


class Preparation(NamedTuple):
    """Preprocessing of an image to pixels."""

    convert: Callable[[Image.Image], Pixels]
    """Function of an upright image of any mode that returns u8[H, W, 3], of a fixed size or the
    image's own, or its tiles of a fixed size, u8[tiles, H, W, 3]."""
    fingerprint: str
    """Preparations with equal fingerprints give equal pixels."""
    draft: int = 0
    """Minimum height and width in pixels at which a JPEG is decoded; 0 decodes at full size."""
    videos: Callable[[], Videos] | None = None
    """Preprocessing of videos, made when there is one; ``None``: the model takes none."""

    def of(self, path: str) -> str:
        """The fingerprint of the preprocessing of a file."""
        return self.video_fingerprint if is_video(path) else self.fingerprint

    @property
    def video_fingerprint(self) -> str:
        """The same of videos, if the model takes any."""
        return self.of_videos().fingerprint

    def of_videos(self) -> Videos:
        """The preprocessing of videos; raises ImageError where the model takes none."""
        if self.videos is None:
            raise ImageError("a video, and this model takes images alone")
        return self.videos()


class ImageFormat(NamedTuple):
    """Image input of a model: preprocessing, size and token spans."""

    prepare: Preparation
    size: int
    """Height and width of a tile in pixels; 0 if images keep their shape."""
    span: Callable[[int, int], Span]
    """(width, height) of an upright image -> its token span."""
    fixed: bool = True
    """Whether every image has the same span."""
    patching: Patching | None = None
    """How images of any size are cut into patches; ``None`` if all have the same size."""

    def with_videos(self, make: Callable[[], Videos]) -> ImageFormat:
        """The same images, with videos; ``make`` is called once, when there is one."""
        return self._replace(prepare=self.prepare._replace(videos=functools.cache(make)))

    def of_file(self, path: str) -> Span:
        """Compute the token span of an image file, or of a video.

        Raises:
            ImageError: its size can't be read, or the model does not accept it.
        """
        if is_video(path):
            return self.prepare.of_videos().of_file(path)
        return self.span(0, 0) if self.fixed else self.of_size(*upright_size(path))

    def of_size(self, width: int, height: int) -> Span:
        """Compute an upright image's token span; raises ImageError if its size is not accepted."""
        try:
            return self.span(width, height)
        except ValueError as error:
            raise ImageError(str(error)) from None


def upright_size(path: str) -> tuple[int, int]:
    """Width and height of an image file in pixels, its EXIF orientation applied.

    Raises:
        ImageError: its header can't be read.
    """
    with _open(path, sys.maxsize) as image:
        try:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) > 4
        except Exception as error:  # of a PNG, Pillow also reads chunks after the pixels
            raise ImageError(_reason(error)) from None
        width, height = image.size
        return (height, width) if turned else (width, height)


def squares(size: int, resize: str = "auto") -> Preparation:
    """Preparation of square RGB images; transparency is composited over white.

    A JPEG much larger than ``size`` is decoded at a half, quarter or eighth of its size, never
    below twice ``size``.

    Args:
        size: height and width in pixels.
        resize: ``squash`` (or ``auto``) resizes to a square; ``pad`` pads to a square with grey;
            ``crop`` takes the central square.
    """

    def convert(image: Image.Image) -> Pixels:
        return np.asarray(_fit(rgb(image), size, resize))

    mode = "squash" if resize == "auto" else resize
    return Preparation(convert, f"{size}|{mode}|{RGB}", 2 * size)


def load(path: str, prepare: Preparation, max_pixels: int = 50_000_000) -> Pixels:
    """Decode and preprocess an image file; its EXIF orientation is applied.

    Args:
        path: image file.
        prepare: preprocessing.
        max_pixels: maximum of width times height.

    Raises:
        ImageError: the image can't be decoded; the message is the reason.
    """
    return decode(read_bytes(path), prepare, max_pixels)


def decode(data: bytes, prepare: Preparation, max_pixels: int) -> Pixels:
    """Decode and preprocess the bytes of an image file; see :func:`load`."""
    with _open(io.BytesIO(data), max_pixels) as image:
        try:
            if prepare.draft:
                image.draft("RGB", (prepare.draft, prepare.draft))
            image.load()
            return prepare.convert(_upright(image))
        except Exception as error:  # damaged files make Pillow's decoders raise all kinds
            raise ImageError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """Describe the fault of an image that Pillow can't decode."""
    short = "truncated" in str(error) or "broken" in str(error)
    return "truncated file" if short else f"can't be decoded: {str(error) or type(error).__name__}"


def convert(image: Image.Image, prepare: Preparation) -> Pixels:
    """Preprocess an open image as :func:`load` does."""
    return prepare.convert(ImageOps.exif_transpose(image))


def key(
    digest: bytes, fingerprint: str, augmentation: tuple[int, ...] = ()
) -> UInt32[np.ndarray, "4"]:
    """Compute the visual-token cache's key: equal only if the model sees equal pixels.

    Args:
        digest: hash of the image file's bytes.
        fingerprint: fingerprint of the preprocessing (size, resize ...).
        augmentation: result of :func:`draw`; () is none.

    Returns:
        u32[4].
    """
    text = f"{fingerprint}|{augmentation}".encode()
    return np.frombuffer(hashlib.blake2b(digest + text, digest_size=16).digest(), "<u4").copy()


def tile_key(key: UInt32[np.ndarray, "4"], tile: int) -> UInt32[np.ndarray, "4"]:
    """Compute the key of an image's tile; that of the first is the image's own."""
    if not tile:
        return key
    digest = hashlib.blake2b(key.tobytes() + tile.to_bytes(4, "little"), digest_size=16).digest()
    return np.frombuffer(digest, "<u4").copy()


def draw(rng: np.random.Generator, flip: bool, shift: int) -> tuple[int, ...]:
    """Draw an augmentation: (mirrored 0|1, pixels down, pixels right); () changes nothing."""
    mirrored = int(rng.integers(2)) if flip else 0
    down, right = (int(i) for i in rng.integers(-shift, shift + 1, 2)) if shift else (0, 0)
    return (mirrored, down, right) if mirrored or down or right else ()


def refuse_augmented_tiles(name: str, config: DataConfig, tiles: int) -> None:
    """Refuse to augment images of data ``name`` that are cut into up to ``tiles`` tiles."""
    if (config.flip or config.max_shift) and tiles > 1:
        raise DataError(
            f"{name}: data.flip and data.max_shift would augment each tile of an image "
            "separately; set --config.data.flip=False --config.data.max_shift=0"
        )


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize a preprocessed image, or each of a video's frames."""
    if pixels.shape[-3:-1] == (height, width):
        return pixels
    if pixels.ndim > 3:
        return np.stack([resized(frame, height, width) for frame in pixels])
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def augment(pixels: Pixels, drawn: tuple[int, ...]) -> Pixels:
    """Apply an augmentation of :func:`draw`; a shift repeats the edge pixels that it uncovers."""
    if not drawn:
        return pixels
    mirrored, down, right = drawn
    height, width = pixels.shape[-3:-1]
    rows = np.clip(np.arange(height) - down, 0, height - 1)
    columns = np.clip(np.arange(width) - right, 0, width - 1)
    columns = columns[::-1] if mirrored else columns
    return pixels[..., rows[:, None], columns[None, :], :]


def name_and_size(path: str) -> tuple[str, int]:
    """Return an image file's name without its folder, and its size in bytes, for fingerprints."""
    if is_file(path):
        path = bare(path)
        return os.path.basename(path), os.path.getsize(path)
    return members.name_and_size(path)


def sample_digest(paths: Sequence[str], count: int = 16) -> str:
    """Hash the bytes of up to ``count`` of the files, evenly chosen; one that can't be read counts
    as empty."""
    digest = hashlib.blake2b(digest_size=8)
    for i in np.unique(np.linspace(0, len(paths) - 1, min(count, len(paths))).round().astype(int)):
        with contextlib.suppress(ImageError):
            digest.update(read_bytes(paths[i]))
        digest.update(b"\0")
    return digest.hexdigest()


def digest(path: str) -> bytes:
    """Hash a file's bytes to 16 bytes; raises ImageError."""
    if not is_file(path):
        known = members.digest(path)  # a read of these bytes compares them with it
        return known or hashlib.blake2b(read_bytes(path), digest_size=16).digest()
    check_regular(bare(path))
    with opened(bare(path)) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()


def read_bytes(path: str) -> bytes:
    """Read an image file, or one inside of another file; raises ImageError."""
    path = bare(path)
    check_regular(path)
    try:
        return pathlib.Path(path).read_bytes() if is_file(path) else members.read(path)
    except FileNotFoundError:
        raise ImageError("missing file") from None
    except (OSError, ValueError) as error:
        raise ImageError(f"can't be read: {getattr(error, 'strerror', error)}") from None


def opened(path: str) -> io.BufferedReader:
    """Open a file to read it; raises ImageError."""
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise ImageError("missing file") from None
    except OSError as error:
        raise ImageError(f"can't be read: {error.strerror or error}") from None


def check_regular(path: str) -> None:
    """Refuse a pipe, a device or a folder, which may be read without end; raises ImageError."""
    if is_file(path) and os.path.exists(path) and not os.path.isfile(path):
        raise ImageError("can't be read: not a regular file")


def _open(source: str | io.BytesIO, max_pixels: int) -> ImageFile.ImageFile:
    """Open an image and read its header; raises ImageError."""
    if isinstance(source, str) and not is_file(source):
        source = io.BytesIO(read_bytes(source))
    if isinstance(source, str):
        check_regular(source)
    try:
        empty = not (os.stat(source).st_size if isinstance(source, str) else source.getbuffer())
        if empty:
            raise ImageError("0-byte file")
        image = _reader(source)
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError("missing file") from None
    except MemoryError:
        raise ImageError("can't be decoded: not enough memory") from None
    except UnidentifiedImageError:
        raise ImageError(_unidentified(source)) from None
    except Image.DecompressionBombError:
        raise ImageError(f"more than data.max_pixels={max_pixels} pixels") from None
    except Exception as error:  # damaged headers make Pillow's plugins raise all kinds
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageError(f"can't be read: {reason}") from None
    if image.width * image.height > max_pixels:
        image.close()
        raise ImageError(f"more than data.max_pixels={max_pixels} pixels")
    if max(image.size) > MAX_SIDE:
        image.close()
        raise ImageError(f"a side of more than {MAX_SIDE} pixels")
    several = _has_several_images(source, image)
    if reason := _SEVERAL if several else _unknown_range(image):
        image.close()
        raise ImageError(reason)
    return image


def _reader(source: str | io.BytesIO) -> ImageFile.ImageFile:
    """Pillow's image of a file, of which the header is read."""
    with _open_lock, warnings.catch_warnings():
        # max_pixels is checked later, with an error that names the setting.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(source, formats=FORMATS)


def _has_several_images(source: str | io.BytesIO, image: ImageFile.ImageFile) -> bool:
    """Whether it is not clear which image of an open file is meant.

    A photograph that a camera's preview follows (MPO) is one image, and so is a TIFF's page with
    smaller copies or masks of itself.
    """
    if image.format not in ("GIF", "TIFF"):
        return image.format != "MPO" and getattr(image, "is_animated", False)
    # Another reader: one that has looked for more frames may have lost the first one's state.
    if isinstance(source, io.BytesIO):
        source = io.BytesIO(source.getvalue())
    with contextlib.suppress(Exception), _reader(source) as other:  # or damage behind the first
        if other.format == "GIF":
            return bool(getattr(other, "is_animated", False))
        for page in range(1, sys.maxsize):
            other.seek(page)
            tags: Mapping[int, int] = getattr(other, "tag_v2", {})
            if not (tags.get(_NEW_SUBFILE, 0) & 0b101 or tags.get(_SUBFILE) == 2):
                return True
    return False


def _unidentified(source: str | io.BytesIO) -> str:
    """Why no reader took a file."""
    head = source.getvalue()[:32] if isinstance(source, io.BytesIO) else b""
    if isinstance(source, str):
        with contextlib.suppress(OSError), open(source, "rb") as file:
            head = file.read(32)
    if not HAS_AVIF and head[4:8] == b"ftyp" and b"avi" in head[8:]:
        return "an AVIF image, which this Pillow can't read; run `pip install -U 'pillow>=11.3'`"
    if head[4:8] == b"ftyp" or head.startswith(b"\x1aE\xdf\xa3"):
        return "a video, where an image is named; name it in 'video', or by jaxvlm.video(FILE)"
    return "not an image that Pillow can read"


def _upright(image: Image.Image) -> Image.Image:
    ImageOps.exif_transpose(image, in_place=True)  # otherwise upright images are copied too
    return image


def rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB; transparency is composited over white.

    Raises:
        ImageError: its values have no known range.
    """
    if reason := _unknown_range(image):
        raise ImageError(reason)
    if image.mode.startswith("I"):
        # Pillow's own conversion clips at 255 instead of scaling.
        grey = np.rint(np.asarray(image) * (255 / 65535)).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _unknown_range(image: Image.Image) -> str:
    """Why no one knows which value of an image is white, or ""."""
    # Of 16 bits it is 65535; some versions of Pillow open such a PNG or PPM with mode I.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        return "32-bit grey values, of which none is known to be white; save it with 8 or 16 bits"
    return ""


def _fit(image: Image.Image, size: int, resize: str) -> Image.Image:
    """Resize to ``size`` by ``size`` pixels by one of ``RESIZE``."""
    if image.size == (size, size):
        return image
    if resize == "pad":
        # Not ImageOps.pad: it rounds the short side of a 1 x 40 image to 0.
        scale = size / max(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        canvas = Image.new("RGB", (size, size), (PAD, PAD, PAD))
        inner = image.resize((width, height), Image.Resampling.BICUBIC)
        canvas.paste(inner, ((size - width) // 2, (size - height) // 2))
        return canvas
    if resize == "crop":
        return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return image.resize((size, size), Image.Resampling.BICUBIC)
