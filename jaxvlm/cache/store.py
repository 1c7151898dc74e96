"""Rows of visual tokens on disk, by key: kept from run to run, shared by processes and hosts.

A store never makes a run wrong or stops it. What can't be read is absent, and is made again; what
can't be written is dropped; both are said once.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxvlm.cache import codec as codecs
from jaxvlm.cache import files
from jaxvlm.cache.files import Identity, Index, Place, Segment

_WAITING = 4  # segments' worth of rows that may wait for the disk
_TOUCH = 3600.0  # seconds after which a store that is read says so anew

_log = logging.getLogger(__name__)


class Counts(NamedTuple):
    """What a store holds, and rows that this process asked for or gave it."""

    rows: int
    """On disk, or waiting for it."""
    bytes: int
    """Of segment files."""
    raw_bytes: int
    """Of their rows' tokens in memory."""
    found: int
    absent: int
    corrupt: int
    """Found damaged, or their file gone."""
    refused: int
    """Not kept because a number in them is not finite."""
    dropped: int
    """Not kept because the disk is full, read-only or too slow."""


class Store:
    """Visual tokens by key. All methods may be called from any thread.

    A process opens its own: a store does not survive a fork. Rows that others write meanwhile are
    seen when it is opened again.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        identity: Mapping[str, Any],
        codec: str = "exact",
        on_warning: Callable[[str], None] = _log.warning,
        segment_mb: int = 64,
        may_prune: bool = True,
        only: Collection[str] | None = None,
    ):
        """Open a store, or begin one; headers are read, no row is.

        Args:
            folder: of the store; it may hold rows of other identities too.
            identity: all that rows depend on beside their key, as JSON's values: a digest of the
                tower's weights, how pictures are prepared, versions, the platform.
            codec: of CODECS; rows of another one are not seen.
            on_warning: gets each warning, once, from any thread.
            segment_mb: tokens a segment file, in 2**20 bytes before they are encoded.
            may_prune: warnings advise ``jaxvlm cache prune``; not of what belongs to a run.
            only: names of segment files whose rows may be read; ``None``: all. The keys of other
                files' rows are ``unread``.

        Raises:
            ValueError: an unknown codec, or an identity that JSON can't say.
        """
        codecs.check_name(codec)
        self.codec = codec
        self.identity = Identity.of(identity, codec)
        self.folder = pathlib.Path(folder) / self.identity.name
        self.read_only, self.unread = False, set[bytes]()
        self._warn, self._warned = on_warning, set[str]()
        self._prune = f"`jaxvlm cache prune {pathlib.Path(folder)}`" if may_prune else ""
        self._room = segment_mb * 2**20
        self._index = Index()
        self._count: collections.Counter[str] = collections.Counter()
        self._changed = threading.Condition()
        self._waiting: dict[bytes, np.ndarray] = {}
        self._waiting_bytes = 0
        self._given = self._settled = self._due = 0  # rows: waited, wait no more, should not wait
        self._writer: threading.Thread | None = None
        self._closed = False
        self._open(only)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: bytes) -> Float[np.ndarray, "T D"] | None:
        """A row; ``None`` where it is absent or damaged.

        Args:
            key: 16 bytes.

        Returns:
            What :meth:`put` was given, as the codec keeps it: the same before and after it is on
            disk. The caller's own.
        """
        with self._changed:
            waiting, place = self._waiting.get(key), self._index.get(key)
        tokens = None if waiting is None else codecs.decode(codecs.encode(waiting, self.codec))
        while tokens is None and place is not None:
            try:
                tokens = codecs.decode(files.read_row(place, key, self.identity.digest))
            except (OSError, ValueError) as error:
                place = self._without(key, place, error)
        with self._changed:
            self._count["absent" if tokens is None else "found"] += 1
        if time.monotonic() - self._touched > _TOUCH:
            self._touch()
        return tokens

    def put(self, key: bytes, tokens: Float[np.ndarray, "T D"]) -> None:
        """Keep a row, unless it is there. It is copied; a thread writes it.

        Where rows come faster than the disk takes them, some are dropped: a run does not wait.
        One that wants all of them flushes now and then.

        Args:
            key: 16 bytes.
            tokens: float32 or bfloat16.

        Raises:
            ValueError: a key or tokens that no store takes, or the store is closed.
        """
        if len(key) != 16:
            raise ValueError(f"a key is 16 bytes, not {len(key)}")
        codecs.check(tokens, self.codec)
        if self.has(key):
            return
        if not codecs.is_finite(tokens):
            self._not_kept("refused", "tokens that are not finite are not kept")
            return
        tokens = np.array(tokens, order="C")
        with self._changed:
            if self._closed:
                raise ValueError(f"{self.folder}: the store is closed")
            full = self._waiting_bytes + tokens.nbytes > _WAITING * self._room
            keep = not self.read_only and not (full and self._waiting)
            if keep and not self.has(key):
                self._add(key, tokens)
        if not keep:
            self._not_kept("dropped", "tokens are made faster than the disk takes them")

    def flush(self) -> None:
        """Wait until all rows that were put are on disk, or a warning has said why not."""
        with self._changed:
            due = self._due = self._given
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._settled >= due)

    def close(self) -> None:
        """Flush, and take no more rows; those that are there can still be read."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join()
        self._touch()

    def counts(self) -> Counts:
        """What it holds now."""
        with self._changed:
            rows = len(self._index) + len(self._waiting)
            return Counts(rows, *(self._count[name] for name in Counts._fields[1:]))

    def _open(self, only: Collection[str] | None) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if files.read_identity(self.folder) is None:
                files.write_whole(self.folder / files.IDENTITY, self.identity.text.encode())
        except OSError as error:
            self._stop_writing(error)
        self._touch()
        try:
            segments, _, others = files.list_folder(self.folder)
        except OSError as error:
            self._say(self.folder, f"can't be listed: {files.reason(error)}")
            return
        for path in segments:
            try:
                segment = files.read_segment(path)
                if only is None or path.name in only:
                    self._know(segment)
                else:
                    self.unread.update(segment.rows)
            except FileNotFoundError:  # pruned meanwhile
                pass
            except (OSError, ValueError) as error:
                self._lost(str(path), error)
        for path in others:
            self._say(path, "no part of the store, and left alone")
        self.unread.difference_update(self._index.keys())

    def _know(self, segment: Segment) -> None:
        self._index.add(segment)
        self._count["bytes"] += segment.size
        self._count["raw_bytes"] += segment.raw_bytes

    def has(self, key: bytes) -> bool:
        """Whether a row is there, or waits for the disk; it is not read."""
        with self._changed:
            return self._index.get(key) is not None or key in self._waiting

    def _without(self, key: bytes, place: Place, error: Exception) -> Place | None:
        """Forget where a row that can't be read lies; returns where else it does."""
        with self._changed:
            self._count["corrupt"] += self._index.drop(key, place)
            left = self._index.get(key)
        self._lost(place.path, error)
        return left

    def _add(self, key: bytes, tokens: np.ndarray) -> None:
        self._waiting[key] = tokens
        self._waiting_bytes += tokens.nbytes
        self._given += 1
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="store", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    def _write(self) -> None:
        """The writer's thread: a segment at a time, until the end or a failure."""
        while rows := self._next():
            size = sum(tokens.nbytes for tokens in rows.values())
            try:
                coded = {key: codecs.encode(tokens, self.codec) for key, tokens in rows.items()}
                segment = files.write_segment(self.folder, self.identity.digest, coded, size)
            except Exception as error:  # whatever it is, the run goes on
                self._stop_writing(error)
                return
            with self._changed:
                self._know(segment)
                for key in rows:
                    del self._waiting[key]
                self._waiting_bytes -= size
                self._settled += len(rows)
                self._changed.notify_all()

    def _is_due(self) -> bool:
        enough = self._waiting_bytes >= self._room
        return enough or self._settled < self._due or self._closed

    def _next(self) -> dict[bytes, np.ndarray]:
        """The rows of the next segment, as soon as there are enough or someone waits for them."""
        rows: dict[bytes, np.ndarray] = {}
        size = 0
        with self._changed:
            self._changed.wait_for(self._is_due)
            for key, tokens in self._waiting.items():
                if size >= self._room:
                    break
                rows[key] = tokens
                size += tokens.nbytes
        return rows

    def _stop_writing(self, error: Exception) -> None:
        with self._changed:
            self.read_only = True
            self._count["dropped"] += len(self._waiting)
            self._waiting.clear()
            self._waiting_bytes, self._settled = 0, self._given
            self._changed.notify_all()
        why = f"visual tokens can't be written ({files.reason(error)})"
        room = f"room ({self._prune})" if self._prune else "room"
        advice = f"Make {room} or the folder writable"
        self._say(self.folder, f"{why}; the run goes on and reads what is there. {advice}", "write")

    def _not_kept(self, count: str, why: str) -> None:
        with self._changed:
            self._count[count] += 1
        if not self.read_only:  # else that was said
            self._say(self.folder, f"{why}; they are made again when they are needed", count)

    def _touch(self) -> None:
        """Say that the store is in use: ``prune`` goes by it."""
        self._touched = time.monotonic()
        with contextlib.suppress(OSError):
            os.utime(self.folder / files.IDENTITY)

    def _lost(self, path: str, error: Exception) -> None:
        prune = f". {self._prune} tidies up" if self._prune else ""
        self._say(path, f"{files.reason(error)}; rows that are lost are made again{prune}")

    def _say(self, where: str | os.PathLike[str], text: str, about: str = "") -> None:
        """Once about each thing, or each place."""
        about = about or str(where)
        with self._changed:
            if about in self._warned:
                return
            self._warned.add(about)
        self._warn(f"{where}: {text}")
