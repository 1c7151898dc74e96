"""A store's folder looked after: what it holds, what is bad in it, what may go."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxvlm.cache import codec, files
from jaxvlm.cache.files import Place, Segment

_DAY = 86_400.0
_STALE = _DAY
"""Seconds after which no writer is at work on a temporary file any more."""


class Usage(NamedTuple):
    """What one identity takes."""

    name: str
    """Of its sub-folder."""
    codec: str
    facts: Mapping[str, Any]
    rows: int
    """Different ones."""
    bytes: int
    """Of its files."""
    raw_bytes: int
    """Of its rows' tokens in memory."""
    segments: int
    bad: list[str]
    """Segment files that can't be read, and why."""
    used: float
    """When a run had it open the last time; seconds since 1970."""


class Checked(NamedTuple):
    """What reading each row of an identity found."""

    name: str
    rows: int
    """Good ones, counted as often as they are there."""
    bytes: int
    """Read."""
    bad: list[str]
    """Segment files and rows that can't be read, and why."""


class Pruned(NamedTuple):
    """What went, or would."""

    identities: list[str]
    temporary: int
    """Files of writers that died."""
    segments: int
    """Files that can't be read."""
    bad_rows: int
    double_rows: int
    bytes: int
    """Freed."""
    left: int
    """Bytes."""


def stat(folder: str | os.PathLike[str]) -> list[Usage]:
    """The identities of a store, the one used last first; headers are read, no row is.

    Raises:
        FileNotFoundError: there is no store.
        OSError: it can't be read.
    """
    found = [_usage(path, whole) for path, whole in _identities(folder)]
    return sorted(found, key=lambda usage: -usage.used)


def verify(folder: str | os.PathLike[str]) -> Iterator[Checked]:
    """Read every row of a store. Raises as :func:`stat` does."""
    for path, _ in _identities(folder):
        rows, size, bad = 0, 0, list[str]()
        for file in files.list_folder(path).segments:
            try:
                segment = files.read_segment(file)
            except (OSError, ValueError) as error:
                bad.append(f"{file}: {files.reason(error)}")
                continue
            size += segment.size
            for key, place in segment.rows.items():
                fault = _fault(path, key, place)
                rows += not fault
                bad += [f"{file}: row {key.hex()}: {fault}"] if fault else []
        yield Checked(path.name, rows, size, bad)


def prune(
    folder: str | os.PathLike[str],
    unused_days: float = 0.0,
    keep_gb: float = 0.0,
    dry_run: bool = False,
) -> Pruned:
    """Remove what is of no use; each row is read. Runs that have the store open go on.

    What goes: rows and segment files that can't be read, rows that are there twice, files of
    writers that died more than a day ago, and identities as the arguments say. Files that are not
    the store's own stay.

    Args:
        folder: of the store.
        unused_days: identities that no run has had open for so long go; 0: none do.
        keep_gb: identities go, those used least lately first, until so many 10**9 bytes are left;
            the one used last stays. 0: none do.
        dry_run: only say what would go.

    Raises:
        FileNotFoundError: there is no store.
        OSError: it can't be read or changed.
    """
    usages = stat(folder)
    before = sum(usage.bytes for usage in usages)
    last = time.time() - unused_days * _DAY
    gone = [usage for usage in usages if unused_days and usage.used < last]
    kept = [usage for usage in usages if usage not in gone]
    while keep_gb and len(kept) > 1 and sum(usage.bytes for usage in kept) > keep_gb * 1e9:
        gone.append(kept.pop())
    went: collections.Counter[str] = collections.Counter()
    for usage in gone:
        went["bytes"] += usage.bytes
        if not dry_run:
            _remove(pathlib.Path(folder) / usage.name)
    for usage in kept:
        went += _tidy(pathlib.Path(folder) / usage.name, dry_run)
    counts = {name: went[name] for name in Pruned._fields[1:-1]}
    return Pruned([usage.name for usage in gone], **counts, left=before - went["bytes"])


def _identities(folder: str | os.PathLike[str]) -> list[tuple[pathlib.Path, dict[str, Any]]]:
    """Sub-folders that prove to be a store's, with their words."""
    root = pathlib.Path(folder)
    if files.read_identity(root.resolve()) is not None:
        raise FileNotFoundError(f"{folder} is a part of a store; give the folder that it lies in")
    found = []
    if root.is_dir():
        whole = [(path, files.read_identity(path)) for path in sorted(root.iterdir())]
        found = [(path, words) for path, words in whole if words is not None]
    if not found:
        raise FileNotFoundError(
            f"{folder}: no store of visual tokens is there; give the folder that a run kept them in"
        )
    return found


def _usage(path: pathlib.Path, whole: Mapping[str, Any]) -> Usage:
    listing = files.list_folder(path)
    keys, raw_bytes, bad = set[bytes](), 0, []
    for file in listing.segments:
        try:
            segment = files.read_segment(file)
        except (OSError, ValueError) as error:
            bad.append(f"{file}: {files.reason(error)}")
        else:
            keys.update(segment.rows)
            raw_bytes += segment.raw_bytes
    identity = path / files.IDENTITY
    own = [*listing.segments, *listing.temporary, identity]
    return Usage(
        path.name,
        whole["codec"],
        whole["facts"],
        len(keys),
        sum(map(_size, own)),
        raw_bytes,
        len(listing.segments),
        bad,
        identity.stat().st_mtime,
    )


def _tidy(path: pathlib.Path, dry_run: bool) -> collections.Counter[str]:
    """An identity without what is bad or double; counts what went, by :class:`Pruned`'s fields."""
    listing = files.list_folder(path)
    gone = [file for file in listing.temporary if time.time() - _time(file) > _STALE]
    went = collections.Counter(temporary=len(gone))
    seen = set[bytes]()
    for file in reversed(listing.segments):  # a store reads the latest first, too
        try:
            segment = files.read_segment(file)
        except ValueError:
            gone.append(file)
            went["segments"] += 1
            continue
        new = {key: place for key, place in segment.rows.items() if key not in seen}
        good = {key: place for key, place in new.items() if not _fault(path, key, place)}
        seen.update(good)
        went["double_rows"] += len(segment.rows) - len(new)
        went["bad_rows"] += len(new) - len(good)
        if len(good) < len(segment.rows):
            went["bytes"] += segment.size - sum(end - begin for _, begin, end in good.values())
            if not dry_run:
                _rewrite(path, segment, good)
    went["bytes"] += sum(map(_size, gone))
    if not dry_run:
        for file in gone:
            file.unlink(missing_ok=True)
    return went


def _rewrite(path: pathlib.Path, segment: Segment, good: Mapping[bytes, Place]) -> None:
    """A segment's good rows in a new one; then the old one goes."""
    digest = bytes.fromhex(path.name)
    rows = {key: files.read_row(place, key, digest) for key, place in good.items()}
    if rows:
        raw_bytes = sum(codec.read_header(row).nbytes for row in rows.values())
        files.write_segment(path, digest, rows, raw_bytes)
    pathlib.Path(segment.path).unlink(missing_ok=True)


def _remove(path: pathlib.Path) -> None:
    """An identity's own files, and its folder if nothing else is in it."""
    listing = files.list_folder(path)
    for file in [*listing.segments, *listing.temporary]:
        file.unlink(missing_ok=True)
    (path / files.IDENTITY).unlink(missing_ok=True)  # last: it proves whose the others are
    with contextlib.suppress(OSError):
        path.rmdir()


def _fault(path: pathlib.Path, key: bytes, place: Place) -> str:
    """Why a row can't be read; "" where it can."""
    try:
        codec.decode(files.read_row(place, key, bytes.fromhex(path.name)))
    except ValueError as error:
        return str(error)
    return ""


def _size(file: pathlib.Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        return file.stat().st_size
    return 0


def _time(file: pathlib.Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_mtime
    return time.time()
