"""Files that may be compressed as a whole, by gzip or Zstandard."""

from __future__ import annotations

import gzip
import io
import pathlib
import zlib

import zstandard

from jaxvlm.config.unread import without_shard
from jaxvlm.data.errors import DataError

_SUFFIXES = (".gz", ".zst")
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
    data = path.read_bytes()
    try:
        if path.suffix.lower() == ".gz":
            return gzip.decompress(data)
        if path.suffix.lower() == ".zst":
            # Any number of frames, as `cat a.zst b.zst` writes them.
            with zstandard.ZstdDecompressor().stream_reader(
                io.BytesIO(data), read_across_frames=True
            ) as stream:
                return stream.read()
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: can't be decompressed ({error}); make the file again") from None
    return data
