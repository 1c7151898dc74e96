"""What lies in a store's folder: a sub-folder for each identity, in it segment files of rows.

A segment is a safetensors file with a U8 tensor a row, named by the row's key in hex. It is written
under another name, synced and renamed, and never changed: what has its name is whole. A row ends in
a checksum over its bytes, its key and its identity, so that one that lies under another's name is
found out too.
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

from jaxvlm.cache import codec

FORMAT = f"jaxvlm visual tokens {codec.VERSION}"
"""Part of an identity: another version's rows are not seen, nor removed."""
TOKENS_VERSION = 1
"""Of what is computed as visual tokens; part of an identity, so rows of another one are not found.

Raise it together with a change after which a tower makes other tokens of the same image, weights
and settings: another formula, another block whose output is taken, another dtype that a norm is
computed in, another order, another decoding or resizing of images. Leave it where tokens differ by
rounding alone. ``tests/cache/test_golden_tokens.py`` fails until it is raised, but it computes on
the machine's own backend: of a kernel for GPUs or TPUs, and of JPEG files, it sees nothing.
"""
IDENTITY = "identity.json"

_OURS = re.compile(r"[0-9a-f]{32}\.(safetensors|tmp)")
_SUM = 8  # bytes of a row's checksum
_KEY = 16  # bytes of a key


class Identity(NamedTuple):
    """What rows were made by: equal facts, equal names."""

    name: str
    """Of the sub-folder: 32 hex digits, a hash of the facts."""
    text: str
    """``identity.json``: the facts for people."""

    @classmethod
    def of(cls, facts: Mapping[str, Any], kept_by: str) -> Identity:
        """The identity of rows.

        Args:
            facts: JSON's values.
            kept_by: their codec.

        Raises:
            ValueError: a fact that JSON has no value for.
        """
        whole = {"format": FORMAT, "codec": kept_by, "facts": dict(facts)}
        try:
            text = json.dumps(whole, indent=2, sort_keys=True, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise ValueError(f"an identity is of JSON's values: {error}") from None
        return cls(_name(json.loads(text)), text)

    @property
    def digest(self) -> bytes:
        """16 bytes."""
        return bytes.fromhex(self.name)


class Place(NamedTuple):
    """Where a row lies, its checksum included."""

    path: str
    begin: int
    end: int


class Segment(NamedTuple):
    """What a segment file's header says."""

    path: str
    size: int
    """Bytes of the file."""
    raw_bytes: int
    """Of its rows' tokens in memory."""
    rows: dict[bytes, Place]


class Index:
    """Where rows lie. Of rows that are there more than once, the latest is read first."""

    def __init__(self) -> None:
        self._places: dict[bytes, Place] = {}
        self._spare: dict[bytes, list[Place]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def keys(self) -> Collection[bytes]:
        """Of its rows."""
        return self._places.keys()

    def get(self, key: bytes) -> Place | None:
        """Where a row is to be read."""
        return self._places.get(key)

    def add(self, segment: Segment) -> None:
        """Take a segment's rows up."""
        for key, place in segment.rows.items():
            if key in self._places:
                self._spare.setdefault(key, []).append(self._places[key])
            self._places[key] = place

    def drop(self, key: bytes, place: Place) -> bool:
        """Forget a place that can't be read; whether it was the one that :meth:`get` gives."""
        if self._places.get(key) is not place:
            return False
        if others := self._spare.get(key):
            self._places[key] = others.pop()
        else:
            del self._places[key]
        return True


class Listing(NamedTuple):
    """The files of an identity; each oldest first."""

    segments: list[pathlib.Path]
    temporary: list[pathlib.Path]
    """Of writers, at work or dead."""
    others: list[pathlib.Path]
    """Not the store's own."""


def read_identity(folder: pathlib.Path) -> dict[str, Any] | None:
    """The words of a store's sub-folder; ``None`` where they don't prove that it is one."""
    try:
        whole = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(whole, dict) and whole.get("format") == FORMAT
    return whole if known and _name(whole) == folder.name else None


def list_folder(folder: pathlib.Path) -> Listing:
    """An identity's files; none where there is no such folder. Raises OSError."""
    found: list[tuple[int, pathlib.Path]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found.append((entry.stat().st_mtime_ns, pathlib.Path(entry.path)))
    listing = Listing([], [], [])
    for _, path in sorted(found):
        if not _OURS.fullmatch(path.name):
            if path.name != IDENTITY and not path.name.startswith("."):
                listing.others.append(path)
        elif path.suffix == ".tmp":
            listing.temporary.append(path)
        else:
            listing.segments.append(path)
    return listing


def read_segment(path: str | os.PathLike[str]) -> Segment:
    """A segment's header; no row is read.

    Raises:
        ValueError: why it is none, or not whole.
        OSError: it can't be read.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("cut short, or no safetensors file")
        header = file.read(length)
    try:
        table = json.loads(header)
        about = table.pop("__metadata__")
        rows = _places(table, os.fspath(path), 8 + length)
        found, raw_bytes = about["format"], int(about["raw_bytes"])
        lengths = {key: place.end - place.begin for key, place in rows.items()}
        whole = found != FORMAT or about["checksum"] == _header_sum(lengths, raw_bytes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("its header is damaged, or another program's") from None
    if found != FORMAT:
        raise ValueError(f"it holds {found!r}, not {FORMAT!r}")
    if not whole:
        raise ValueError("its header is damaged: its checksum is wrong")
    if size != max((place.end for place in rows.values()), default=8 + length):
        raise ValueError("cut short, or longer than its header says")
    return Segment(os.fspath(path), size, raw_bytes, rows)


def read_row(place: Place, key: bytes, identity: bytes) -> bytes:
    """A row as it was written.

    Raises:
        ValueError: it is damaged, another key's or another identity's.
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
    """Write rows, whole or not at all; they are on the disk when this returns.

    Args:
        folder: the identity's.
        identity: its digest.
        rows: by key of 16 bytes.
        raw_bytes: of their tokens in memory.

    Raises:
        OSError: the disk is full, the folder is read-only ...
    """
    whole = {key: row + _checksum(row, key, identity) for key, row in rows.items()}
    about = {"format": FORMAT, "raw_bytes": str(raw_bytes)}
    about["checksum"] = _header_sum({key: len(row) for key, row in whole.items()}, raw_bytes)
    tensors = {key.hex(): np.frombuffer(row, np.uint8) for key, row in whole.items()}
    path = folder / f"{uuid.uuid4().hex}.safetensors"
    write_whole(path, safetensors.numpy.save(tensors, about))
    return read_segment(path)


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Write a file so that it is never seen in part, whatever dies meanwhile. Raises OSError."""
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems sync no folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def reason(error: Exception) -> str:
    """An error in a few words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _name(whole: Mapping[str, Any]) -> str:
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _checksum(row: bytes, key: bytes, identity: bytes) -> bytes:
    return hashlib.blake2b(row, digest_size=_SUM, key=identity + key).digest()


def _header_sum(lengths: Mapping[bytes, int], raw_bytes: int) -> str:
    text = json.dumps([raw_bytes, sorted((key.hex(), length) for key, length in lengths.items())])
    return hashlib.blake2b(text.encode(), digest_size=_SUM).hexdigest()


def _places(table: dict[str, Any], path: str, at: int) -> dict[bytes, Place]:
    """Rows as a header lists them, one behind another from ``at``. Raises ValueError and others."""
    rows: dict[bytes, Place] = {}
    last = at
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (int(offset) + at for offset in entry["data_offsets"])
        key, length = bytes.fromhex(name), end - begin
        good = begin == last and length >= _SUM and len(key) == _KEY
        if not good or entry["dtype"] != "U8" or entry["shape"] != [length]:
            raise ValueError(name)
        rows[key], last = Place(path, begin, end), end
    return rows
