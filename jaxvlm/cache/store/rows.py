"""Store of visual tokens on disk, one row per image: persistent, shared by processes and hosts.

A store never corrupts or stops a run. A row that can't be read is a cache miss and is recomputed; a
row that can't be written is dropped. Both are warned of once.
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

from jaxvlm.cache.store import codec as codecs
from jaxvlm.cache.store import segment_files
from jaxvlm.cache.store.segment_files import Identity, Index, RowLocation, Segment
from jaxvlm.checkpoint.run_record import write_whole

_WAITING = 4  # size of the rows that may wait for the disk, in segments
_TOUCH = 3600.0  # seconds after which a read updates the store's time of last use

_log = logging.getLogger(__name__)


class Counts(NamedTuple):
    """Contents of a store, and this process's reads and writes."""

    rows: int
    """Number of rows on disk or waiting to be written."""
    bytes: int
    """Size of segment files."""
    raw_bytes: int
    """Size of their rows' tokens in memory."""
    hits: int
    """Reads of rows that were there."""
    misses: int
    """Reads of rows that were not there or could not be read."""
    corrupt: int
    """Rows that were damaged, or whose file was missing."""
    refused: int
    """Rows not written because a number in them is not finite."""
    dropped: int
    """Rows not written because the disk is full, read-only or too slow."""


class Store:
    """Visual tokens by key. All methods may be called from any thread.

    Each process opens its own: a store does not survive a fork. Rows that other processes write
    meanwhile become visible when it is opened again.
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
        """Open or create a store; reads headers, but no rows.

        Args:
            folder: of the store; it may hold rows of other identities too.
            identity: everything that rows depend on in addition to their key, as JSON values: a
                digest of the vision encoder's weights, image preparation, versions, the platform.
            codec: one of CODECS; rows of another codec are not read.
            on_warning: called with each warning once, from any thread.
            segment_mb: size of a segment file, in 2**20 bytes of tokens before encoding.
            may_prune: whether warnings advise ``jaxvlm cache prune``; False for a store in a run's
                workdir.
            only: names of the segment files whose rows may be read; ``None``: all. The keys of the
                other files' rows are in ``unread``.

        Raises:
            ValueError: an unknown codec, or an identity that is not JSON.
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
        self._given = self._settled = self._due = 0  # number of rows put, done with, wanted
        self._writer: threading.Thread | None = None
        self._closed = False
        self._open(only)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: bytes) -> Float[np.ndarray, "T D"] | None:
        """Read a row.

        Args:
            key: 16 bytes.

        Returns:
            The tokens given to :meth:`put`, encoded and decoded by the codec: the same bits before
            and after they are on disk; the caller may write to them. ``None`` where the row is
            missing or damaged.
        """
        with self._changed:
            waiting, place = self._waiting.get(key), self._index.get(key)
        tokens = None if waiting is None else codecs.decode(codecs.encode(waiting, self.codec))
        while tokens is None and place is not None:
            try:
                tokens = codecs.decode(segment_files.read_row(place, key, self.identity.digest))
            except (OSError, ValueError) as error:
                place = self._drop_damaged(key, place, error)
        with self._changed:
            self._count["misses" if tokens is None else "hits"] += 1
        if time.monotonic() - self._touched > _TOUCH:
            self._touch()
        return tokens

    def put(self, key: bytes, tokens: Float[np.ndarray, "T D"]) -> None:
        """Write a row, unless it is there already. It is copied, and a thread writes it.

        Where rows come faster than the disk writes them, some are dropped: a run does not wait. A
        caller that needs all of them must flush from time to time.

        Args:
            key: 16 bytes.
            tokens: float32 or bfloat16.

        Raises:
            ValueError: the key is not 16 bytes, the codec can't encode the tokens, or the store is
                closed.
        """
        if len(key) != 16:
            raise ValueError(f"a key must have 16 bytes, not {len(key)}")
        codecs.check(tokens, self.codec)
        if self.has(key):
            return
        if not codecs.is_finite(tokens):
            self._not_written("refused", "tokens that are not finite are not stored")
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
            self._not_written("dropped", "tokens are encoded faster than the disk can write them")

    def flush(self) -> None:
        """Wait until all rows that were put are on disk, or were dropped with a warning."""
        with self._changed:
            due = self._due = self._given
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._settled >= due)

    def close(self) -> None:
        """Flush, and accept no more rows; existing ones can still be read."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join()
        self._touch()

    def counts(self) -> Counts:
        """Return the present counts."""
        with self._changed:
            rows = len(self._index) + len(self._waiting)
            return Counts(rows, *(self._count[name] for name in Counts._fields[1:]))

    def _open(self, only: Collection[str] | None) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if segment_files.read_identity(self.folder) is None:
                write_whole(self.folder / segment_files.IDENTITY, self.identity.text.encode())
        except OSError as error:
            self._stop_writing(error)
        self._touch()
        try:
            segments, _, others = segment_files.list_folder(self.folder)
        except OSError as error:
            self._report(self.folder, f"the folder can't be listed: {segment_files.reason(error)}")
            return
        for path in segments:
            try:
                segment = segment_files.read_segment(path)
                if only is None or path.name in only:
                    self._add_segment(segment)
                else:
                    self.unread.update(segment.rows)
            except FileNotFoundError:  # pruned meanwhile
                pass
            except (OSError, ValueError) as error:
                self._lost(str(path), error)
        for path in others:
            self._report(path, "not part of the store, and ignored")
        self.unread.difference_update(self._index.keys())

    def _add_segment(self, segment: Segment) -> None:
        self._index.add(segment)
        self._count["bytes"] += segment.size
        self._count["raw_bytes"] += segment.raw_bytes

    def has(self, key: bytes) -> bool:
        """Whether a row is on disk or waits to be written; it is not read."""
        with self._changed:
            return self._index.get(key) is not None or key in self._waiting

    def _drop_damaged(self, key: bytes, place: RowLocation, error: Exception) -> RowLocation | None:
        """Remove an unreadable row from the index; returns the location of a duplicate, if any."""
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
        """Run the writer's thread: write one segment at a time, until the end or a failure."""
        while rows := self._next():
            size = sum(tokens.nbytes for tokens in rows.values())
            try:
                coded = {key: codecs.encode(tokens, self.codec) for key, tokens in rows.items()}
                digest = self.identity.digest
                segment = segment_files.write_segment(self.folder, digest, coded, size)
            except Exception as error:  # whatever it is, training goes on
                self._stop_writing(error)
                return
            with self._changed:
                self._add_segment(segment)
                for key in rows:
                    del self._waiting[key]
                self._waiting_bytes -= size
                self._settled += len(rows)
                self._changed.notify_all()

    def _is_due(self) -> bool:
        enough = self._waiting_bytes >= self._room
        return enough or self._settled < self._due or self._closed

    def _next(self) -> dict[bytes, np.ndarray]:
        """Wait for enough rows for a segment, or for a flush, and return them."""
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
        why = f"visual tokens can't be written ({segment_files.reason(error)})"
        space = f"Free disk space ({self._prune})" if self._prune else "Free disk space"
        text = (
            f"{why}; the run goes on and reads existing tokens. {space} or make the folder writable"
        )
        self._report(self.folder, text, "write")

    def _not_written(self, count: str, why: str) -> None:
        with self._changed:
            self._count[count] += 1
        if not self.read_only:  # otherwise that was warned of
            self._report(self.folder, f"{why}; they are recomputed when they are needed", count)

    def _touch(self) -> None:
        """Update the store's time of last use, by which ``prune`` decides."""
        self._touched = time.monotonic()
        with contextlib.suppress(OSError):
            os.utime(self.folder / segment_files.IDENTITY)

    def _lost(self, path: str, error: Exception) -> None:
        prune = f". {self._prune} removes them" if self._prune else ""
        self._report(path, f"{segment_files.reason(error)}; damaged rows are recomputed{prune}")

    def _report(self, where: str | os.PathLike[str], text: str, about: str = "") -> None:
        """Warn once about each subject ``about``, or about each path ``where``."""
        about = about or str(where)
        with self._changed:
            if about in self._warned:
                return
            self._warned.add(about)
        self._warn(f"{where}: {text}")
