"""A run's folder, on a file system or in an object store.

All that a run in a bucket writes but its checkpoints lies in a local folder, which is fetched at
the start and sent as it changes; so whatever reads or writes a run's folder knows local files
alone. Checkpoints go to the bucket directly (``run_record.checkpoints_of``).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import jax

from jaxvlm.checkpoint import local_copies
from jaxvlm.checkpoint.run_lock import LOCKS, NumberedLock
from jaxvlm.checkpoint.run_record import CHECKPOINTS, CONFIG, URL_FILE, is_url
from jaxvlm.config import ConfigError
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder, check_scheme

EVERY = 30.0
"""Seconds between two looks for files that changed."""
_APART = (CHECKPOINTS, LOCKS, "profile", "tensorboard")
"""Folders that are not copied: they are read where they are, or only written."""
_LARGE = ("host_cache", "federate")
"""Folders that only the run itself reads."""
_REMOVED = ("host_cache", "source", "vision", "text", "tokenizer")
"""Folders in which a run removes files; that another file is gone locally means nothing."""
_mirrors: dict[pathlib.Path, Mirror] = {}
_read: dict[str, Mirror] = {}


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
    url = str(folder).rstrip("/")
    if url not in _read or not _read[url].is_same_run():
        mirror = Mirror(url, setting, to_read=True)
        if not (mirror.local / CONFIG).is_file():
            raise ConfigError(f"{setting}={url} holds no run: it has no {CONFIG}")
        _read[url] = mirror
    return _read[url].local


@contextlib.contextmanager
def sent(folder: str, setting: str) -> Iterator[pathlib.Path]:
    """A folder to write to, whose files are sent at the end where it is in an object store.

    Args:
        folder: a new one, of a file system or ``gs://bucket/folder``.
        setting: says in errors where it is from.

    Yields:
        ``folder`` itself, or a local one that does not exist yet and is removed at the end. Nothing
        is sent after an error.

    Raises:
        ConfigError: an object store of another kind, there is no such bucket, or the folder there
            is not empty.
        StoreError: the store does not answer.
    """
    if not is_url(folder):
        yield pathlib.Path(folder).absolute()
        return
    check_scheme(setting, folder)
    remote = RemoteFolder(folder)
    if remote.files():
        raise ConfigError(f"{setting}={remote.url} is not empty; give a new folder")
    _check_bucket(remote, setting)
    local = _local_copy(remote)
    try:
        yield local
        files = [path for path in local.rglob("*") if path.is_file()]
        # What says that a model is there (config.json, modules.json, …) goes last.
        for path in sorted(files, key=lambda x: (x.parent == local and x.suffix == ".json", x)):
            remote.upload(path, path.relative_to(local).as_posix())
    finally:
        local_copies.remove(local)


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

    def __init__(self, url: str, setting: str, to_read: bool = False):
        check_scheme(setting, url)
        self.remote = RemoteFolder(url)
        self.lock: NumberedLock | None = None
        """Of process 0, while it runs."""
        self._without = (*_APART, *_LARGE * to_read)
        files = self.remote.files(without=self._without)
        if not files:
            _check_bucket(self.remote, setting)
        elif CONFIG not in files:
            raise ConfigError(
                f"{setting}={url} holds no run: it has no {CONFIG}, and other files, such as "
                f"{min(files)}; name a run's folder, or one that holds nothing"
            )
        self.local = _local_copy(self.remote)
        self.local.mkdir(parents=True)
        self._known: dict[str, tuple[int, int]] = {}
        """Name -> time of change and size of what the bucket holds, of files that were copied."""
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._fetched = _versions(files)
        for name in files:
            self._fetch(name)
        (self.local / URL_FILE).write_text(self.remote.url)

    def _fetch(self, name: str) -> None:
        parts = pathlib.PurePosixPath(name).parts
        if _is_partial(name) or ".." in parts or "\\" in name:
            return
        path = self.local.joinpath(*parts)
        with contextlib.suppress(FileNotFoundError):  # it is gone meanwhile
            data = self.remote.read(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            self._known[name] = _stamp(path)

    def is_same_run(self) -> bool:
        """Whether the bucket's run is still the one that was copied."""
        info = self.remote.info(CONFIG)
        return info is not None and _versions({CONFIG: info})[CONFIG] == self._fetched.get(CONFIG)

    def check_fetched(self) -> None:
        """Once the folder is locked.

        Raises:
            ConfigError: another run wrote to it after it was fetched.
        """
        if _versions(self.remote.files(without=self._without)) != self._fetched:
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
            if not (self.local / URL_FILE).is_file():  # or all its files would count as removed
                raise StoreError(f"{self.local}: the local copy of {self.remote.url} is gone")
            there: dict[str, tuple[int, int]] = {}
            for folder, _, files in os.walk(self.local):
                for file in files:
                    path = pathlib.Path(folder, file)
                    name = path.relative_to(self.local).as_posix()
                    if name != URL_FILE and not _is_partial(name):
                        with contextlib.suppress(FileNotFoundError):
                            there[name] = _stamp(path)
            for name in sorted(there, key=lambda name: name != CONFIG):
                if self._known.get(name) != there[name]:
                    self._send_file(name)
                    self._known[name] = there[name]
            for name in self._known.keys() - there.keys():
                if name.split("/")[0] in _REMOVED:
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

    def __enter__(self) -> Mirror:
        self._ended.clear()
        self._thread = threading.Thread(target=self._send_often, daemon=True, name="run-folder")
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Send what is left; after an error that error is raised, after Ctrl-C nothing is sent."""
        self._ended.set()
        if isinstance(error, KeyboardInterrupt):
            return
        self._thread.join()
        try:
            self.send()
            self._fetched = _versions(self.remote.files(without=self._without))
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


def _check_bucket(remote: RemoteFolder, setting: str) -> None:
    try:
        remote.check_bucket()
    except FileNotFoundError:
        raise ConfigError(f"{setting}={remote.url}: there is no such bucket") from None


def _local_copy(remote: RemoteFolder) -> pathlib.Path:
    """Where the local copy of a folder is to lie; it is removed with the process."""
    # Messages recognise it by the end of its name.
    return local_copies.make("run", _room()) / remote.url.replace("://", "/")


def _room() -> str:
    """Where copies lie: the user's cache, since systems clean the folder of temporary files."""
    folder = pathlib.Path.home() / ".cache" / "jaxvlm" / "runs"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return str(folder) if os.access(folder, os.W_OK) else tempfile.gettempdir()


def _is_partial(name: str) -> bool:
    """Whether a file is still being written, or its folder."""
    return any(part.endswith(".tmp") for part in name.split("/"))


def _versions(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Name -> what changes whenever another file is written in its place in a bucket."""
    marks = ("generation", "updated", "ETag")
    return {
        name: next((info[mark] for mark in marks if info.get(mark)), None)
        for name, info in files.items()
    }


def _stamp(path: pathlib.Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size
