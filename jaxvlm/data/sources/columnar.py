"""Read tables of Parquet and Arrow files; images in their cells stay there.

A cell's place is ``GROUP.ROW/COLUMN/...``: the number of a row group (of a record batch in Arrow's
stream, as Hugging Face's ``save_to_disk`` writes it), the row in it, and the path to the value.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

from jaxvlm.data.errors import DataError
from jaxvlm.data.sources.fields import BadItem
from jaxvlm.data.sources.member_names import Member, named_in

_CACHED = 256 * 2**20
"""Bytes of columns that stay in memory, the last ones that were read."""
_ROWS = 64
"""Rows that are in memory at once while a table is indexed."""
_MARK = b"\xff\xff\xff\xff"
_END = _MARK + bytes(4)
"""Beginning of a message, and end, of a stream. Source: arrow.apache.org/docs/format/Columnar.html
"""
_KINDS = {".parquet": "Parquet", ".arrow": "Arrow"}


def rows(path: pathlib.Path, same: dict[bytes, str]) -> Iterator[dict[str, Any] | BadItem]:
    """Read a table's rows, with names of members (see ``member_names``) in place of bytes.

    Args:
        path: ``.parquet`` or ``.arrow``.
        same: digest of bytes -> the member that has them first, of all files that are read. Records
            of one image then name one member, and share it in a packed sequence.

    Returns:
        Fields of each row, or why it can't be read.

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
        names = table.schema.names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{path}: two columns of the name {twice[0]!r}; rename one")
        features = _features(table.schema)
        for group in range(table.groups):
            each = itertools.chain.from_iterable(map(_rows, table.batches(group)))
            for row, fields in enumerate(each):
                if isinstance(fields, BadItem):
                    yield fields
                    continue
                find = functools.partial(named_in, same, str(path), f"{group}.{row}")
                yield {
                    name: _without_bytes(_named(value, features.get(name)), find, (name,))
                    for name, value in fields.items()
                }
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, OverflowError, ValueError, ImportError) as error:
        raise DataError(f"{path}: can't be read as {kind}: {error}") from None


def _rows(batch: Any) -> Iterator[dict[str, Any] | BadItem]:
    import pyarrow

    def written(column: Any) -> Any:
        """Times as text: some have no value in Python."""
        if not pyarrow.types.is_temporal(column.type):
            return column
        try:
            return column.cast(pyarrow.string())
        except pyarrow.ArrowException:  # durations
            return column.cast(pyarrow.int64())

    names = batch.schema.names
    batch = pyarrow.RecordBatch.from_arrays([written(c) for c in batch.columns], names=names)
    try:
        found = batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(len(batch)):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield BadItem("not UTF-8")
        return
    yield from found


def _features(schema: Any) -> dict[str, Any]:
    """Types of columns, where Hugging Face's datasets wrote them into the file."""
    try:
        written = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (LookupError, ValueError, TypeError):
        return {}
    return written if isinstance(written, dict) else {}


def _named(value: Any, feature: Any) -> Any:
    """``value`` with the names of classes in place of their numbers."""
    if isinstance(feature, list):
        feature = {"_type": "List", "feature": feature[0]} if feature else None
    if value is None or not isinstance(feature, dict):
        return value
    kind = feature.get("_type")
    if kind == "ClassLabel":
        if isinstance(value, list):  # of objects that are stored by columns
            return [_named(one, feature) for one in value]
        names = feature.get("names") or []
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else value
    inside = feature.get("feature") if isinstance(kind, str) else feature
    if isinstance(value, list):
        return [_named(one, inside) for one in value]
    if isinstance(value, dict) and isinstance(inside, dict):
        return {name: _named(one, inside.get(name)) for name, one in value.items()}
    return value


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
        value = _columns().read(member.file, int(group), name)[int(row)].as_py()
        for key in inside:
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (pyarrow.ArrowException, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{changed} ({error})") from None
    if not isinstance(value, bytes) or not member.holds(value):
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
    if value and value.keys() <= {"bytes", "path"}:
        if isinstance(data, bytes) and data:
            return find(data, (*keys, "bytes"), name if isinstance(name, str) else "")
        if not data and not name:  # an empty cell, whose parts are written
            return ""
    return {k: _without_bytes(x, find, (*keys, str(k))) for k, x in value.items()}


class _Table:
    """An open table, by groups of rows."""

    def __init__(self, path: str):
        import pyarrow
        import pyarrow.parquet

        self._batches: list[Any] = []
        self._file: Any = None
        if path.lower().endswith(".arrow"):
            # Mapped: a batch takes no memory of its own.
            source = pyarrow.memory_map(path)
            start = source.read(6)  # of Feather, else of a stream, as datasets writes
            if start[:4] == _MARK:  # not of before Arrow 0.15
                source.seek(max(source.size() - 8, 0))
                if source.read(8) != _END:  # pyarrow takes a file that ends at a batch for whole
                    raise DataError(
                        f"{path}: the stream has no end: its writer was stopped, or the file was "
                        "cut off; make it again"
                    )
            source.seek(0)
            if start == b"ARROW1":
                file = pyarrow.ipc.open_file(source)
                self._batches = [file.get_batch(i) for i in range(file.num_record_batches)]
                self.schema = file.schema
            else:
                with pyarrow.ipc.open_stream(source) as stream:
                    self.schema, self._batches = stream.schema, list(stream)
            self.groups = len(self._batches)
        else:
            self._file = pyarrow.parquet.ParquetFile(path)
            self.schema, self.groups = self._file.schema_arrow, self._file.num_row_groups

    def batches(self, group: int) -> Iterator[Any]:
        """Read a group, some rows at a time."""
        if self._file is None:
            batch = self._batches[group]
            return (batch.slice(i, _ROWS) for i in range(0, len(batch), _ROWS))
        return iter(self._file.iter_batches(_ROWS, row_groups=[group]))

    def column(self, group: int, name: str) -> Any:
        """Read a column of a group."""
        if self._file is None:
            return self._batches[group].column(name)
        return self._file.read_row_group(group, [name]).column(name)


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
            if key in self._kept:  # another thread has read it meanwhile
                return self._kept[key]
            column = self._kept[key] = table.column(group, name)
            self._bytes += column.nbytes
            while self._bytes > _CACHED and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return column


@functools.cache
def _columns() -> _Columns:
    return _Columns()


@functools.lru_cache(maxsize=64)
def _open(path: str, size: int, modified: int) -> _Table:
    """Open a table; ``size`` and ``modified`` tell a changed file from the one before."""
    return _Table(path)
