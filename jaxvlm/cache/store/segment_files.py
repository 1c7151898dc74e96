"""File format of a token store: a sub-folder for each identity, with segment files of rows.

A row holds one image's tokens. A segment is a safetensors file with one U8 tensor per row, named by
the row's key in hex. It is written under a temporary name, synced, renamed, and never changed, so a
file with its final name is complete. A row ends in a checksum over its bytes, its key and its
identity, so that a row stored under a wrong name is detected too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import uuid
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from jaxvlm.cache.store import codec
from jaxvlm.checkpoint.run_record import write_whole

FORMAT = f"jaxvlm visual tokens {codec.VERSION}"
"""Part of an identity: rows of another format version are neither read nor removed."""
IDENTITY = "identity.json"

_OURS = re.compile(r"[0-9a-f]{32}\.(safetensors|tmp)")
_SUM = 8  # bytes of a row's checksum
_KEY = 16  # bytes of a key


class Identity(NamedTuple):
    """Identifies what computed a set of rows: equal facts have equal names."""

    name: str
    """Of the sub-folder: 32 hex digits, a hash of the facts."""
    text: str
    """Contents of ``identity.json``: the facts in readable form."""

    @classmethod
    def of(cls, facts: Mapping[str, Any], codec_name: str) -> Identity:
        """Return the identity of rows.

        Args:
            facts: JSON values that the tokens depend on.
            codec_name: codec that the rows are stored with.

        Raises:
            ValueError: a fact is not a JSON value.
        """
        record = {"format": FORMAT, "codec": codec_name, "facts": dict(facts)}
        try:
            text = json.dumps(record, indent=2, sort_keys=True, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise ValueError(f"an identity's facts must be JSON's values: {error}") from None
        return cls(_name(json.loads(text)), text)

    @property
    def digest(self) -> bytes:
        """The name as 16 bytes."""
        return bytes.fromhex(self.name)


class RowLocation(NamedTuple):
    """Byte range of a row in its segment file, its checksum included."""

    path: str
    begin: int
    end: int


class Segment(NamedTuple):
    """Header of a segment file."""

    path: str
    size: int
    """Bytes of the file."""
    raw_bytes: int
    """Bytes of its rows' tokens in memory."""
    rows: dict[bytes, RowLocation]
    """By key."""


class Index:
    """Locations of rows. Of duplicate rows, the latest is read first."""

    def __init__(self) -> None:
        self._locations: dict[bytes, RowLocation] = {}
        self._spare: dict[bytes, list[RowLocation]] = {}

    def __len__(self) -> int:
        return len(self._locations)

    def keys(self) -> Collection[bytes]:
        """Return the keys of its rows."""
        return self._locations.keys()

    def get(self, key: bytes) -> RowLocation | None:
        """Return the location that a row is to be read from."""
        return self._locations.get(key)

    def add(self, segment: Segment) -> None:
        """Add a segment's rows."""
        for key, location in segment.rows.items():
            if key in self._locations:
                self._spare.setdefault(key, []).append(self._locations[key])
            self._locations[key] = location

    def drop(self, key: bytes, location: RowLocation) -> bool:
        """Remove a location that can't be read, unless :meth:`get` returns another one already.

        Returns:
            Whether it was removed.
        """
        if self._locations.get(key) is not location:
            return False
        if others := self._spare.get(key):
            self._locations[key] = others.pop()
        else:
            del self._locations[key]
        return True


class Listing(NamedTuple):
    """The files of an identity, each list sorted from oldest to newest."""

    segments: list[pathlib.Path]
    temporary: list[pathlib.Path]
    """Being written, or left by a process that died."""
    others: list[pathlib.Path]
    """Not the store's own."""


def read_identity(folder: pathlib.Path) -> dict[str, Any] | None:
    """Read a sub-folder's ``identity.json``; ``None`` where it does not match the folder's name."""
    try:
        record = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_known = isinstance(record, dict) and record.get("format") == FORMAT
    return record if is_known and _name(record) == folder.name else None


def list_folder(folder: pathlib.Path) -> Listing:
    """List an identity's files; no files where there is no such folder. Raises OSError."""
    files: list[tuple[int, pathlib.Path]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                files.append((entry.stat().st_mtime_ns, pathlib.Path(entry.path)))
    listing = Listing([], [], [])
    for _, path in sorted(files):
        if not _OURS.fullmatch(path.name):
            if path.name != IDENTITY and not path.name.startswith("."):
                listing.others.append(path)
        elif path.suffix == ".tmp":
            listing.temporary.append(path)
        else:
            listing.segments.append(path)
    return listing


def read_segment(path: str | os.PathLike[str]) -> Segment:
    """Read a segment's header, but no rows.

    Raises:
        ValueError: the file is damaged or of another format; the message says why.
        OSError: it can't be read.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("truncated, or not a safetensors file")
        header = file.read(length)
    try:
        table = json.loads(header)
        about = table.pop("__metadata__")
        rows = _locations(table, os.fspath(path), 8 + length)
        file_format, raw_bytes = about["format"], int(about["raw_bytes"])
        lengths = {key: place.end - place.begin for key, place in rows.items()}
        is_intact = file_format != FORMAT or about["checksum"] == _header_sum(lengths, raw_bytes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("its header is damaged, or written by another program") from None
    if file_format != FORMAT:
        raise ValueError(f"it holds {file_format!r}, not {FORMAT!r}")
    if not is_intact:
        raise ValueError("its header is damaged: its checksum is wrong")
    if size != max((place.end for place in rows.values()), default=8 + length):
        raise ValueError("truncated, or longer than its header says")
    return Segment(os.fspath(path), size, raw_bytes, rows)


def read_row(place: RowLocation, key: bytes, identity: bytes) -> bytes:
    """Read a row and check it.

    Args:
        place: its location.
        key: 16 bytes.
        identity: digest of its identity.

    Raises:
        ValueError: it is damaged, or of another key or identity.
        OSError: it can't be read.
    """
    with open(place.path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), place.end - place.begin, place.begin)
    row = data[:-_SUM]
    if len(data) != place.end - place.begin or data[-_SUM:] != _checksum(row, key, identity):
        raise ValueError("a row in it is damaged: its checksum is wrong")
    return row


def write_segment(
    folder: pathlib.Path, identity: bytes, rows: Mapping[bytes, bytes], raw_bytes: int
) -> Segment:
    """Write rows to a new segment file, atomically; they are on disk when this returns.

    Args:
        folder: of the identity.
        identity: digest of the identity.
        rows: encoded tokens by key of 16 bytes.
        raw_bytes: bytes of their tokens in memory.

    Raises:
        OSError: the disk is full, the folder is read-only ...
    """
    checked = {key: row + _checksum(row, key, identity) for key, row in rows.items()}
    about = {"format": FORMAT, "raw_bytes": str(raw_bytes)}
    about["checksum"] = _header_sum({key: len(row) for key, row in checked.items()}, raw_bytes)
    tensors = {key.hex(): np.frombuffer(row, np.uint8) for key, row in checked.items()}
    path = folder / f"{uuid.uuid4().hex}.safetensors"
    write_whole(path, safetensors.numpy.save(tensors, about))
    return read_segment(path)


def reason(error: Exception) -> str:
    """Return a short description of an error."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _name(whole: Mapping[str, Any]) -> str:
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _checksum(row: bytes, key: bytes, identity: bytes) -> bytes:
    return hashlib.blake2b(row, digest_size=_SUM, key=identity + key).digest()


def _header_sum(lengths: Mapping[bytes, int], raw_bytes: int) -> str:
    text = json.dumps([raw_bytes, sorted((key.hex(), length) for key, length in lengths.items())])
    return hashlib.blake2b(text.encode(), digest_size=_SUM).hexdigest()


def _locations(table: dict[str, Any], path: str, at: int) -> dict[bytes, RowLocation]:
    """Read contiguous rows' locations, from ``at`` on. Raises ValueError and others."""
    rows: dict[bytes, RowLocation] = {}
    last = at
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (int(offset) + at for offset in entry["data_offsets"])
        key, length = bytes.fromhex(name), end - begin
        is_valid = begin == last and length >= _SUM and len(key) == _KEY
        if not is_valid or entry["dtype"] != "U8" or entry["shape"] != [length]:
            raise ValueError(name)
        rows[key], last = RowLocation(path, begin, end), end
    return rows
