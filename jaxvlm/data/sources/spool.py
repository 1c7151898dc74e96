"""Lists that lie in a temporary file once they are long: as Python's objects, the records of large
data would take gigabytes."""

from __future__ import annotations

import array
import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

from jaxvlm.data.errors import DataError
from jaxvlm.stores.store_requests import temporary_folder

IN_MEMORY = 50_000
"""Items that stay in memory; where there are more, all of them are written."""
T = TypeVar("T")


class Spool(Generic[T]):
    """Takes items one at a time.

    Args:
        written: (item) -> JSON of it.
        made: (JSON) -> the item.
    """

    def __init__(self, written: Callable[[T], Any], made: Callable[[Any], T]):
        self._written, self._made = written, made
        self._held: list[T] = []
        self._file: int | None = None
        self._ends = array.array("q", [0])

    def add(self, item: T) -> None:
        """Append an item.

        Raises:
            DataError: there is no room in the folder for temporary files.
        """
        self._held.append(item)
        if len(self._held) > IN_MEMORY:
            self._write()

    def items(self) -> Sequence[T]:
        """All of them, in order: a list if there are few. No item can be added any more."""
        if self._file is not None:
            self._write()
        found = self._held if self._file is None else _Stored(self._file, self._ends, self._made)
        del self._held
        return found

    def _write(self) -> None:
        folder = os.environ.get("TMPDIR", "the folder for temporary files")
        try:
            folder = temporary_folder()
            if self._file is None:
                self._file, name = tempfile.mkstemp(prefix="jaxvlm-records-")
                weakref.finalize(self, os.close, self._file)  # what is mapped stays
                os.unlink(name)  # so that none is left, however the process ends
            with os.fdopen(self._file, "wb", closefd=False) as file:
                for item in self._held:
                    text = json.dumps(
                        self._written(item), ensure_ascii=False, separators=(",", ":")
                    )
                    data = text.encode("utf-8", "surrogatepass")  # as json.loads reads it
                    file.write(data)
                    self._ends.append(self._ends[-1] + len(data))
        except OSError as error:
            raise DataError(
                f"{folder}: {error.strerror}, where the texts of many records are kept for as long "
                "as they are used; set TMPDIR to a folder with room for them"
            ) from None
        self._held = []


class _Stored(Sequence[T]):
    """Items in a file, parsed again each time; any thread may read."""

    def __init__(self, file: int, ends: array.array[int], made: Callable[[Any], T]):
        self._data = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        self._ends, self._made = ends, made

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]  # raises IndexError, as a list does
        return self._made(json.loads(self._data[self._ends[index] : self._ends[index + 1]]))
