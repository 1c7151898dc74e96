"""Files that may be compressed as a whole, by gzip or Zstandard."""

from __future__ import annotations

import contextlib
import gzip
import io
import pathlib
import zlib
from collections.abc import Iterator
from typing import IO, Any

import zstandard

from jaxvlm.config.unread import without_shard
from jaxvlm.data.errors import DataError

_SUFFIXES = (".gz", ".zst")
_CHUNK = 1 << 17
_WINDOW = 1 << 31
"""Bytes that a frame may refer back to, as `zstd --long=31` writes it."""
_INSIDE = (".json", ".jsonl", ".csv", ".tsv", ".tar")
"""What may be compressed; of a tar an error says that it is to be decompressed."""


def kind_of(path: pathlib.Path) -> str:
    """Return a file's ending in lower case, without that of its compression: ``.jsonl``; and
    without the number of a shard, as TensorFlow Datasets ends names."""
    path = pathlib.Path(without_shard(str(path)))
    inside = path.with_suffix("").suffix.lower() if path.suffix.lower() in _SUFFIXES else ""
    return inside if inside in _INSIDE else path.suffix.lower()


def read(path: pathlib.Path) -> bytes:
    """Read a file, decompressed.

    Raises:
        DataError: the compressed file is damaged.
    """
    with opened(path) as stream:
        return bytes(stream.read())


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[Any]:
    """Open a file of bytes, which is decompressed as it is read.

    Raises:
        DataError: the compressed file is damaged; raised inside of the block, where it is read.
    """
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        if suffix not in _SUFFIXES:
            yield file
            return
        try:
            if suffix == ".gz":
                with gzip.GzipFile(fileobj=file) as stream:
                    yield stream
            else:
                with io.BufferedReader(_Frames(file)) as stream:
                    yield stream
        except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise DataError(
                f"{path}: can't be decompressed ({error}); make the file again"
            ) from None


class _Frames(io.RawIOBase):
    """Any number of Zstandard's frames, as `cat a.zst b.zst` writes them.

    zstandard's own reader ends without an error where a file was cut off.
    """

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._frame: Any = None
        self._rest = b""  # of the file, after a frame
        self._made = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._made:
            data = self._rest or self._file.read(_CHUNK)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame = (
                self._frame or zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
            )
            self._made, self._rest = memoryview(self._frame.decompress(data)), b""
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._made))
        buffer[:count], self._made = self._made[:count], self._made[count:]
        return count
