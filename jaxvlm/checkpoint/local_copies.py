"""Local folders for what is in an object store: copies of runs, and checkpoints on their way.

Each is removed with its process. What a killed process left is removed by the next one: beside the
folder is a lock that nobody holds.
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
_locks: dict[pathlib.Path, tuple[int, pathlib.Path]] = {}
"""Folders of this process -> the descriptor of the lock, and its file."""


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
    descriptor, name = tempfile.mkstemp(".new", prefix, parent)
    lock = new = pathlib.Path(name)
    folder = new.with_suffix("")
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without locks: nobody can know whether it is left over
            pass
        else:
            lock = new.rename(new.with_suffix(_LOCK))  # held, so that no one takes it for left over
        folder.mkdir(mode=0o700)
    except OSError:
        os.close(descriptor)
        for path in (new, lock):
            path.unlink(missing_ok=True)
        raise
    _locks[folder] = descriptor, lock
    return folder


def remove(path: pathlib.Path) -> None:
    """Remove the folder of this process that ``path`` is or lies in; a second time does nothing."""
    for folder in [x for x in _locks if path.is_relative_to(x)]:
        descriptor, lock = _locks.pop(folder)
        _remove(folder, lock)
        os.close(descriptor)


def remove_all() -> None:
    """Remove the folders of this process."""
    for folder in list(_locks):
        remove(folder)


atexit.register(remove_all)
os.register_at_fork(after_in_child=_locks.clear)  # they are the parent's


def _remove(folder: pathlib.Path, lock: pathlib.Path) -> None:
    """Remove a folder, and its lock where nothing of it is left: a thread may still write to it."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        lock.unlink(missing_ok=True)


def _remove_left_over(parent: pathlib.Path, prefix: str) -> None:
    for lock in parent.glob(f"{prefix}*{_LOCK}"):
        if "-" in lock.name.removeprefix(prefix):
            continue  # of a host whose name begins like this one's
        with contextlib.suppress(OSError):  # it is another user's, or in use
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(lock.with_suffix(""), lock)
            finally:
                os.close(descriptor)
