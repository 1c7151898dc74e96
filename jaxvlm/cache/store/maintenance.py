"""Maintenance of a token store on disk: usage, verification, and removal of what is not needed."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxvlm.cache.store import codec, segment_files
from jaxvlm.cache.store.segment_files import RowLocation, Segment

_DAY = 86_400.0
_STALE = _DAY
"""Seconds after which a temporary file is taken to be left by a process that died."""


class Usage(NamedTuple):
    """Disk usage of one identity."""

    name: str
    """Of its sub-folder."""
    codec: str
    facts: Mapping[str, Any]
    """What its tokens depend on, as JSON values."""
    rows: int
    """Number of distinct rows (images)."""
    bytes: int
    """Size of its files."""
    raw_bytes: int
    """Size of its rows' tokens in memory."""
    segments: int
    """Number of segment files."""
    bad: list[str]
    """Segment files that can't be read, and why."""
    used: float
    """When a run last had it open; seconds since 1970."""


class Verified(NamedTuple):
    """Result of reading every row of an identity."""

    name: str
    """Of its sub-folder."""
    rows: int
    """Number of good rows; duplicates count."""
    bytes: int
    """Size of the files read."""
    bad: list[str]
    """Segment files and rows that can't be read, and why."""


class Pruned(NamedTuple):
    """What was removed, or would be in a dry run."""

    identities: list[str]
    """Names of identities removed completely."""
    temporary: int
    """Temporary files left by processes that died."""
    segments: int
    """Segment files that can't be read."""
    bad_rows: int
    """Damaged rows."""
    double_rows: int
    """Duplicate rows."""
    bytes: int
    """Bytes freed."""
    left: int
    """Bytes left."""


def stat(folder: str | os.PathLike[str]) -> list[Usage]:
    """List a store's identities, the most recently used first; reads headers, but no rows.

    Raises:
        FileNotFoundError: the folder is not a store.
        OSError: it can't be read.
    """
    usages = [_usage(path, record) for path, record in _identities(folder)]
    return sorted(usages, key=lambda usage: -usage.used)


def verify(folder: str | os.PathLike[str]) -> Iterator[Verified]:
    """Read and check every row of a store, one identity at a time. Raises as :func:`stat` does."""
    for path, _ in _identities(folder):
        rows, size, bad = 0, 0, list[str]()
        for file in segment_files.list_folder(path).segments:
            try:
                segment = segment_files.read_segment(file)
            except (OSError, ValueError) as error:
                bad.append(f"{file}: {segment_files.reason(error)}")
                continue
            size += segment.size
            for key, place in segment.rows.items():
                fault = _fault(path, key, place)
                rows += not fault
                bad += [f"{file}: row {key.hex()}: {fault}"] if fault else []
        yield Verified(path.name, rows, size, bad)


def prune(
    folder: str | os.PathLike[str],
    unused_days: float = 0.0,
    keep_gb: float = 0.0,
    dry_run: bool = False,
) -> Pruned:
    """Remove damaged, duplicate and unused data from a store. Runs that have it open continue.

    Reads every row. Removes rows and segment files that can't be read, duplicate rows, temporary
    files that processes which died left more than a day ago, and identities as the arguments say.
    Files that are not the store's own stay.

    Args:
        folder: of the store.
        unused_days: remove identities that no run has had open for this many days; 0: none.
        keep_gb: remove identities, the least recently used first, until this many 10**9 bytes are
            left; the most recently used one always stays. 0: no limit.
        dry_run: remove nothing, only report.

    Raises:
        FileNotFoundError: the folder is not a store.
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
    """List the sub-folders with a valid ``identity.json``, and what it records."""
    root = pathlib.Path(folder)
    if segment_files.read_identity(root.resolve()) is not None:
        raise FileNotFoundError(f"{folder} is one identity of a store; give the folder above it")
    identities = []
    if root.is_dir():
        records = [(path, segment_files.read_identity(path)) for path in sorted(root.iterdir())]
        identities = [(path, record) for path, record in records if record is not None]
    if not identities:
        raise FileNotFoundError(
            f"{folder}: no store of visual tokens is there; give the folder that a run's "
            "config.cache.store named"
        )
    return identities


def _usage(path: pathlib.Path, record: Mapping[str, Any]) -> Usage:
    """Sum up an identity's files."""
    listing = segment_files.list_folder(path)
    keys, raw_bytes, bad = set[bytes](), 0, []
    for file in listing.segments:
        try:
            segment = segment_files.read_segment(file)
        except (OSError, ValueError) as error:
            bad.append(f"{file}: {segment_files.reason(error)}")
        else:
            keys.update(segment.rows)
            raw_bytes += segment.raw_bytes
    identity = path / segment_files.IDENTITY
    own = [*listing.segments, *listing.temporary, identity]
    return Usage(
        path.name,
        record["codec"],
        record["facts"],
        len(keys),
        sum(map(_size, own)),
        raw_bytes,
        len(listing.segments),
        bad,
        identity.stat().st_mtime,
    )


def _tidy(path: pathlib.Path, dry_run: bool) -> collections.Counter[str]:
    """Remove damaged and duplicate data of an identity; counts it by :class:`Pruned`'s fields."""
    listing = segment_files.list_folder(path)
    gone = [file for file in listing.temporary if time.time() - _time(file) > _STALE]
    went = collections.Counter(temporary=len(gone))
    seen = set[bytes]()
    for file in reversed(listing.segments):  # as a store does, which reads the latest first
        try:
            segment = segment_files.read_segment(file)
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


def _rewrite(path: pathlib.Path, segment: Segment, good: Mapping[bytes, RowLocation]) -> None:
    """Write a segment's good rows to a new file, then remove the old one."""
    digest = bytes.fromhex(path.name)
    rows = {key: segment_files.read_row(place, key, digest) for key, place in good.items()}
    if rows:
        raw_bytes = sum(codec.read_header(row).nbytes for row in rows.values())
        segment_files.write_segment(path, digest, rows, raw_bytes)
    pathlib.Path(segment.path).unlink(missing_ok=True)


def _remove(path: pathlib.Path) -> None:
    """Remove an identity's files, and its folder if nothing else is in it."""
    listing = segment_files.list_folder(path)
    for file in [*listing.segments, *listing.temporary]:
        file.unlink(missing_ok=True)
    # Last: it proves that the others are the store's.
    (path / segment_files.IDENTITY).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def _fault(path: pathlib.Path, key: bytes, place: RowLocation) -> str:
    """Return why a row can't be read; "" where it can."""
    try:
        codec.decode(segment_files.read_row(place, key, bytes.fromhex(path.name)))
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
