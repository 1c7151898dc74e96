"""Object stores: files of a run's folder in a bucket, read and written within a deadline.

A store's errors are told apart: a file that is not there, an answer that may be another one in a
moment (asked for again, until the deadline), and a refusal.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import pathlib
import re
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from jaxvlm.checkpoint.errors import CheckpointError
from jaxvlm.config import ConfigError

SCHEME = "gs"
DEADLINE = 120.0
"""Seconds for which a request that fails for a while is tried again; gcsfs' own tries, of which the
last may begin before it, take half a minute."""
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between two tries, and so on with the last."""
FOR_NOW = re.compile(
    r"\b(408|429|50[0-4])\b|unavailable|deadline[ _]exceeded|aborted|connect|timed? ?out|"
    r"too many requests|slow ?down|reset by peer|broken pipe|checksum|truncated",
    re.IGNORECASE,
)
"""What libraries say of failures that pass; they agree on no type of error."""
T = TypeVar("T")


class StoreError(CheckpointError):
    """An object store refused, or did not answer in time; nothing that it holds was changed."""


def check_scheme(setting: str, url: str) -> None:
    """Refuse stores that runs can't be kept in.

    Raises:
        ConfigError: the URL is not of Google Cloud Storage, or gcsfs is missing.
    """
    scheme, _, rest = url.partition("://")
    if scheme != SCHEME or not rest.strip("/"):
        raise ConfigError(
            f"{setting}={url}: of object stores, gs://BUCKET/FOLDER (Google Cloud Storage) is "
            "supported; mount another one (a PersistentVolume, s3fs) and pass the mounted folder"
        )
    if importlib.util.find_spec("gcsfs") is None:
        raise ConfigError(f"{setting}={url}: gs:// needs pip install 'jaxvlm[gcs]'")


def for_now(error: BaseException) -> bool:
    """Whether a failure may pass, so that the same request can succeed later."""
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError)):
        return False
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    code = str(getattr(error, "code", ""))
    return type(error).__module__.startswith("aiohttp") or bool(
        FOR_NOW.search(f"{code} {type(error).__name__} {error}")
    )


def attempt(what: str, call: Callable[[], T], deadline: float | None = None) -> T:
    """Call until it succeeds.

    Args:
        what: is done, in the error's words: ``gs://bucket/run/config.json is read``.
        call: raises what its library does.
        deadline: seconds; :data:`DEADLINE` if not given.

    Raises:
        FileNotFoundError, FileExistsError: raised by ``call``.
        StoreError: it failed for good, or for as long as the deadline.
    """
    limit = DEADLINE if deadline is None else deadline
    begun, tries = time.monotonic(), 0
    while True:
        try:
            return call()
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:  # of several libraries, see FOR_NOW
            said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
            if not for_now(error):
                raise StoreError(f"{what}: {said}") from error
            pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
            if time.monotonic() + pause - begun > limit:
                raise StoreError(
                    f"{what}: the store has not done it for {limit:.0f} s ({said}); when it "
                    "answers again the same command goes on from the last complete checkpoint"
                ) from error
        tries += 1
        time.sleep(pause)


class RemoteFolder:
    """The files below a URL.

    Args:
        url: ``gs://bucket/folder``.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._fs = _filesystem()

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def files(self, folder: str = "", without: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """Files below a folder, at any depth: name from the URL on -> what the store says of it.

        Args:
            folder: from the URL on.
            without: names of folders in it that are left out.
        """
        root, skip = self._path(folder), len(self.url.partition("://")[2]) + 1

        def below(path: str) -> list[dict[str, Any]]:
            try:
                return list(attempt(f"{path} is listed", lambda: self._fs.ls(path, detail=True)))
            except FileNotFoundError:
                return []

        found: dict[str, dict[str, Any]] = {}
        folders = [root]
        while folders:
            for info in below(folders.pop()):
                name = info["name"].rstrip("/")[skip:]
                if info["type"] == "file":
                    found[name] = info
                elif name not in without:
                    folders.append(f"{self.url}/{name}")
        return found

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted."""
        root = self._path(folder)
        try:
            found = attempt(f"{root} is listed", lambda: self._fs.ls(root, detail=False))
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        path = self._path(name)
        return bool(attempt(f"{path} is looked up", lambda: self._fs.isfile(path)))

    def read(self, name: str, info: dict[str, Any] | None = None) -> bytes:
        """Read a whole file.

        Args:
            name: from the URL on.
            info: what :meth:`files` says of it; the bytes are compared with its size and MD5.

        Raises:
            FileNotFoundError: there is none.
            StoreError: what comes is not what the store says that it holds.
        """
        path = self._path(name)

        def whole() -> bytes:
            data = bytes(self._fs.cat_file(path))
            if info is not None and not _is_same(data, info):
                raise OSError("truncated: its bytes are not those that the store lists")
            return data

        return attempt(f"{path} is read", whole)

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file, in place of an older one."""
        path = self._path(name)
        attempt(f"{path} is written", lambda: self._fs.pipe_file(path, data))

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not exist yet; whether this call did, and nobody before it.

        Args:
            name: from the URL on.
            data: unlike anybody else's.
        """
        path = self._path(name)
        try:
            attempt(f"{path} is created", lambda: self._fs.pipe_file(path, data, mode="create"))
        except FileExistsError:
            # Perhaps an earlier try did it, whose answer was lost.
            with contextlib.suppress(FileNotFoundError):
                return self.read(name) == data
            return False
        return True

    def upload(self, file: pathlib.Path, name: str) -> None:
        """Write a local file, in place of an older one.

        Raises:
            FileNotFoundError: it is gone.
        """
        path = self._path(name)
        attempt(f"{path} is written", lambda: self._fs.put_file(str(file), path))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            attempt(f"{path} is removed", lambda: self._fs.rm_file(path))

    def move(self, source: str, target: str, mark: str = "") -> None:
        """Rename a folder: each file is copied within the store, then the old ones are removed.

        Args:
            source: name of the folder, from the URL on.
            target: its new name.
            mark: the file that says that the folder is complete: it goes first.
        """
        names = sorted(self.files(source), key=lambda name: name != f"{source}/{mark}")
        for name in names:
            old_path, new_path = self._path(name), self._path(target + name[len(source) :])
            copy = functools.partial(self._fs.cp_file, old_path, new_path)
            attempt(f"{old_path} is copied", copy)
        for name in names:
            self.remove(name)


def _filesystem() -> Any:
    """gcsfs, whose lists of files are never those of a moment ago."""
    import fsspec

    # Without it gcsfs asks by gRPC, with other credentials, what kind of bucket it has.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # failures are said by our own errors
    options: dict[str, Any] = {"use_listings_cache": False, "requests_timeout": 30}
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        options["token"] = "anon"  # else credentials are looked for on the network
    for scheme in ("gs", "gcs"):  # etils asks for the second one
        fsspec.config.conf.setdefault(scheme, {}).update(options)
    return fsspec.filesystem(SCHEME)


def _is_same(data: bytes, info: dict[str, Any]) -> bool:
    """Whether bytes are those that the store lists; some objects have no MD5."""
    if len(data) != info["size"]:
        return False
    known = info.get("md5Hash")
    return not known or base64.b64encode(hashlib.md5(data).digest()).decode() == known
