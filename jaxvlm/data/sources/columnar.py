"""Read tables of Parquet and Arrow files; images in their cells stay there.

A cell's place is ``GROUP.ROW/COLUMN/...``: the number of a row group (of a record batch in Arrow's
stream, as Hugging Face's ``save_to_disk`` writes it), the row in it, and the path to the value.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote, unquote

from jaxvlm.data.errors import DataError
from jaxvlm.data.sources.member_names import Member

_CACHED = 256 * 2**20
"""Bytes of columns that stay in memory, the last ones that were read."""
_KINDS = {".parquet": "Parquet", ".arrow": "an Arrow stream"}


def rows(path: pathlib.Path, same: dict[bytes, str]) -> Iterator[dict[str, Any]]:
    """Read a table's rows, with names of members (see ``member_names``) in place of bytes.

    Args:
        path: ``.parquet`` or ``.arrow``.
        same: digest of bytes -> the member that has them first, of all files that are read. Records
            of one image then name one member, and share it in a packed sequence.

    Raises:
        DataError: pyarrow is missing, or the file is not such a table.
    """
    kind = _KINDS[path.suffix.lower()]
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{path}: {kind} needs pyarrow; run `pip install 'jaxvlm[parquet]'`"
        ) from None
    try:
        table = _Table(str(path))
        for group in range(table.groups):
            for row, fields in enumerate(table.read(group).to_pylist()):
                find = functools.partial(_member, same, str(path), f"{group}.{row}")
                yield {name: _without_bytes(value, find, (name,)) for name, value in fields.items()}
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: can't be read as {kind}: {error}") from None


def content(member: Member) -> bytes:
    """Read the bytes of a cell.

    Raises:
        OSError: the file can't be read.
        ValueError: there is no such cell, or the file changed since it was indexed.
    """
    import pyarrow

    changed = "the table changed since it was indexed"
    place, *keys = member.place.split("/")
    try:
        group, _, row = place.partition(".")
        name, *inside = map(unquote, keys)
        value = _columns.read(member.file, int(group), name)[int(row)].as_py()
        for key in inside:
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (pyarrow.ArrowException, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{changed} ({error})") from None
    if not isinstance(value, bytes) or len(value) != member.size:
        raise ValueError(changed)
    return value


def _without_bytes(value: Any, find: Callable[..., str], keys: Sequence[str]) -> Any:
    """``value`` with the name of a member for each of its bytes.

    ``{"bytes": ..., "path": ...}``, as Hugging Face's data sets have images, becomes one name.
    """
    if isinstance(value, bytes):
        return find(value, keys) if value else ""
    if isinstance(value, list):
        return [_without_bytes(x, find, (*keys, str(i))) for i, x in enumerate(value)]
    if not isinstance(value, dict):
        return value
    data, name = value.get("bytes"), value.get("path")
    if isinstance(data, bytes) and data and value.keys() <= {"bytes", "path"}:
        return find(data, (*keys, "bytes"), name if isinstance(name, str) else "")
    return {k: _without_bytes(x, find, (*keys, str(k))) for k, x in value.items()}


def _member(
    same: dict[bytes, str], file: str, place: str, data: bytes, keys: Sequence[str], name: str = ""
) -> str:
    """The name of the member that has these bytes first."""
    digest = hashlib.blake2b(data, digest_size=16).digest()
    if digest not in same:
        where = "/".join([place, *(quote(key, safe="") for key in keys)])
        same[digest] = str(Member(file, where, len(data), name))
    return same[digest]


class _Table:
    """An open table, by groups of rows."""

    def __init__(self, path: str):
        import pyarrow
        import pyarrow.parquet

        self._batches: list[Any] = []
        self._file: Any = None
        if path.lower().endswith(".arrow"):
            # Mapped: a batch takes no memory of its own.
            with pyarrow.ipc.open_stream(pyarrow.memory_map(path)) as stream:
                self._batches = list(stream)
            self.groups = len(self._batches)
        else:
            self._file = pyarrow.parquet.ParquetFile(path)
            self.groups = self._file.num_row_groups

    def read(self, group: int, columns: list[str] | None = None) -> Any:
        """Read a group, or some of its columns."""
        if self._file is None:
            batch = self._batches[group]
            return batch.select(columns) if columns else batch
        return self._file.read_row_group(group, columns)


class _Columns:
    """Columns of groups that were read last; any thread may read."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[tuple[Any, ...], Any] = collections.OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, path: str, group: int, name: str) -> Any:
        """Read a column of a group."""
        status = os.stat(path)
        key = (path, status.st_size, status.st_mtime_ns, group, name)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        table = _open(*key[:3])
        # A reader of Parquet is of one thread at a time.
        with self._lock:
            column = table.read(group, [name]).column(name)
            if key not in self._kept:
                self._kept[key] = column
                self._bytes += column.nbytes
            while self._bytes > _CACHED and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return column


_columns = _Columns()


@functools.lru_cache(maxsize=64)
def _open(path: str, size: int, modified: int) -> _Table:
    """Open a table; ``size`` and ``modified`` tell a changed file from the one before."""
    return _Table(path)
