"""A run's folder, on a file system or in an object store.

All that a run writes but its checkpoints is small: of a run in a bucket it lies in a local folder,
which is fetched at the start and sent as it changes; so whatever reads or writes a run's folder
knows local files alone. Checkpoints go to the bucket directly (``run_record.checkpoints_of``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import shutil
import tempfile
import threading
from typing import Any

import jax

from jaxvlm.checkpoint.object_store import RemoteFolder, StoreError, check_scheme
from jaxvlm.checkpoint.run_lock import LOCKS, NumberedLock
from jaxvlm.checkpoint.run_record import CHECKPOINTS, URL_FILE, is_url
from jaxvlm.config import ConfigError

EVERY = 30.0
"""Seconds between two looks for files that changed."""
_NOT_COPIED = (CHECKPOINTS, LOCKS)
_mirrors: dict[pathlib.Path, Mirror] = {}
_read: dict[str, pathlib.Path] = {}


def copied(folder: str, setting: str) -> pathlib.Path:
    """A local copy of the folder of a run that is written to.

    Args:
        folder: ``gs://bucket/run``, which may hold nothing yet.
        setting: says in errors where the folder is from.

    Raises:
        ConfigError: an object store of another kind.
        StoreError: the store does not answer.
    """
    mirror = Mirror(folder, setting)
    _mirrors[mirror.local] = mirror
    return mirror.local


def local_to_read(folder: str | os.PathLike[str], setting: str) -> pathlib.Path:
    """The local folder of a run that is only read; a bucket's is copied once per process.

    Raises:
        ConfigError: an object store of another kind, or there is no run.
        StoreError: the store does not answer.
    """
    if not is_url(folder):
        return pathlib.Path(folder)
    if (url := str(folder)) not in _read:
        mirror = Mirror(url, setting)
        if not (mirror.local / "config.json").is_file():
            raise ConfigError(f"{setting}={url} holds no run: it has no config.json")
        _read[url] = mirror.local
    return _read[url]


def mirror_of(workdir: pathlib.Path) -> Mirror:
    """What keeps a run's folder in a bucket up to date, by its local copy."""
    return _mirrors[workdir]


class Mirror:
    """A local copy of a run's folder in a bucket; as a context it sends what changes.

    Args:
        url: the run's folder.
        setting: says in errors where it is from.

    Raises:
        ConfigError: an object store of another kind.
        StoreError: the store does not answer.
    """

    def __init__(self, url: str, setting: str):
        check_scheme(setting, url)
        self.remote = RemoteFolder(url)
        self.lock: NumberedLock | None = None
        """Of process 0, while it runs."""
        top = pathlib.Path(tempfile.mkdtemp(prefix="jaxvlm-run-"))
        atexit.register(shutil.rmtree, top, ignore_errors=True)
        # In messages the folder is recognised by the end of its name.
        self.local = top / self.remote.url.replace("://", "/")
        self.local.mkdir(parents=True)
        self._known: dict[str, tuple[int, int]] = {}
        """Name -> time of change and size of what the bucket holds, of files that were copied."""
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send_often, daemon=True, name="run-folder")
        self._fetch()
        (self.local / URL_FILE).write_text(self.remote.url)

    def _fetch(self) -> None:
        files = self.remote.files(without=_NOT_COPIED)
        self._fetched = _versions(files)
        for name, info in files.items():
            if _is_partial(name):
                continue
            path = self.local / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.remote.read(name, info))
            self._known[name] = _stamp(path)

    def check_fetched(self) -> None:
        """Once the folder is locked.

        Raises:
            ConfigError: another run wrote to it after it was fetched.
        """
        if _versions(self.remote.files(without=_NOT_COPIED)) != self._fetched:
            raise ConfigError(
                f"--workdir={self.remote.url}: another run wrote to it while this one was being "
                "set up; start again"
            )

    def send(self) -> None:
        """Send the files that changed, and remove those that are gone.

        Raises:
            StoreError: the store does not answer, or another run has taken over the folder.
        """
        with self._sending:
            if self.lock is not None:
                self.lock.check()
            there = {}
            for folder, _, files in os.walk(self.local):
                for file in files:
                    path = pathlib.Path(folder, file)
                    name = path.relative_to(self.local).as_posix()
                    if name != URL_FILE and not _is_partial(name):
                        with contextlib.suppress(FileNotFoundError):
                            there[name] = _stamp(path)
            for name, stamp in there.items():
                if self._known.get(name) != stamp:
                    self._send_file(name)
                    self._known[name] = stamp
            for name in self._known.keys() - there.keys():
                self.remote.remove(name)
                del self._known[name]

    def _send_file(self, name: str) -> None:
        path = self.local / name
        with contextlib.suppress(FileNotFoundError):
            if path.suffix != ".jsonl":
                self.remote.upload(path, name)
                return
            data = path.read_bytes()  # another thread may be writing a line
            self.remote.write(name, data[: data.rfind(b"\n") + 1])

    def _send_often(self) -> None:
        while not self._ended.wait(EVERY):
            with contextlib.suppress(StoreError, OSError):  # the end says so, if it lasts
                self.send()

    def check(self) -> None:
        """Before a checkpoint is written.

        Raises:
            StoreError: another run has taken over the folder.
        """
        if self.lock is not None:
            self.lock.check()

    def __enter__(self) -> Mirror:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Send what is left; after an error that error is raised."""
        self._ended.set()
        self._thread.join()
        try:
            self.send()
        except StoreError as second:
            if error is None:
                raise
            error.add_note(str(second))


def open_for_run(workdir: pathlib.Path, stack: contextlib.ExitStack) -> Mirror:
    """Lock a run's folder in a bucket, and send what changes there until ``stack`` ends.

    Args:
        workdir: its local copy.
        stack: of the run.

    Raises:
        ConfigError: another run is writing to it.
        StoreError: the store does not answer.
    """
    mirror = mirror_of(workdir)
    if jax.process_index() == 0:
        mirror.lock = stack.enter_context(NumberedLock(mirror.remote, mirror.remote.url))
        mirror.check_fetched()
    return stack.enter_context(mirror)


def _is_partial(name: str) -> bool:
    """Whether a file is still being written, or its folder."""
    return any(part.endswith(".tmp") for part in name.split("/"))


def _versions(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Name -> what changes whenever a file in a bucket is written."""
    return {name: info.get("generation", info.get("updated")) for name, info in files.items()}


def _stamp(path: pathlib.Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size
