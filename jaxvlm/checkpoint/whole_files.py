"""Files that are written whole or not at all, whatever fails, and when."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a file for writing that is never seen in part; it replaces an older one at the end.

    Raises:
        OSError: it can't be written; then an older file is unchanged.
    """
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems can't sync folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: pathlib.Path, data: bytes | str) -> None:
    """Write a file as :func:`whole_file` does; text becomes UTF-8."""
    with whole_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)
