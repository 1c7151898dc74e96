"""Local folders for what is in an object store: copies of runs, and checkpoints on their way.

Each is removed with its process. What a killed process left is removed by the next one: its folder
has a lock that nobody holds.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import pathlib
import platform
import shutil
import tempfile

_LOCK = ".lock"
_locks: dict[pathlib.Path, int] = {}
"""Folders of this process -> the descriptors of their locks."""


def make(kind: str, parent: str) -> pathlib.Path:
    """Make a folder of this process, and remove those that killed processes of this host left.

    Args:
        kind: of folder; the beginning of its name.
        parent: the folder that it is made in.

    Raises:
        OSError: it can't be written, or is full.
    """
    # Folders that several hosts see may not have their locks: each host looks at its own.
    prefix = f"jaxvlm-{kind}-{platform.node()}-"
    _remove_left_over(pathlib.Path(parent), prefix)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    new = folder / f"{_LOCK}.new"
    _locks[folder] = lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / _LOCK)  # so that one that is not locked is of a process that ended
    return folder


def remove(folder: pathlib.Path) -> None:
    """Remove a folder that :func:`make` has made; a second time it does nothing."""
    lock = _locks.pop(folder, None)
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def remove_all() -> None:
    """Remove the folders of this process."""
    for folder in list(_locks):
        remove(folder)


atexit.register(remove_all)


def _remove_left_over(parent: pathlib.Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is another user's, or in use
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
