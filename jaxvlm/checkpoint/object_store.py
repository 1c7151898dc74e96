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

from jaxvlm.checkpoint.errors import CheckpointError, error_line
from jaxvlm.config import ConfigError

SCHEME = "gs"
DEADLINE = 120.0
"""Seconds for which a request that fails for a while is tried again; gcsfs' own tries, of which the
last may begin before it, take half a minute."""
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between two tries, and so on with the last."""
_PASSES = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|timed? ?out|broken pipe|"
    r"connection (reset|refused|closed|aborted)|(status|response) code:? (408|429|5\d\d)",
    re.IGNORECASE,
)
_REFUSES = re.compile(
    r"UNAUTHENTICATED|PERMISSION_DENIED|(status|response) code:? (401|403)|"
    r"OSError Forbidden|anonymous caller|invalid credentials",
    re.IGNORECASE,
)
"""What TensorStore and gcsfs say, where no type and no code does."""
_NETWORK = ("aiohttp", "requests", "urllib3", "google.auth")
T = TypeVar("T")


class StoreError(CheckpointError):
    """An object store refused, or did not answer in time; nothing that it holds was changed.

    Args:
        message: says what, where, and what to do.
        passes: whether the same request may succeed later.
    """

    def __init__(self, message: str, passes: bool = False):
        super().__init__(message)
        self.passes = passes


class _OtherBytes(Exception):
    """What came is not what the store lists."""


def check_scheme(setting: str, url: str) -> None:
    """Refuse stores that runs can't be kept in.

    Raises:
        ConfigError: the URL is not of Google Cloud Storage, or gcsfs is missing.
    """
    scheme, _, rest = url.partition("://")
    if scheme != SCHEME or not all(rest.rstrip("/").partition("/")):
        raise ConfigError(
            f"{setting}={url}: of object stores, gs://BUCKET/FOLDER (Google Cloud Storage) is "
            "supported; mount another one (a PersistentVolume, s3fs) and pass the mounted folder"
        )
    if importlib.util.find_spec("gcsfs") is None:
        raise ConfigError(f"{setting}={url}: gs:// needs pip install 'jaxvlm[gcs]'")


def passes(error: BaseException) -> bool:
    """Whether a failure may pass, so that the same request can succeed later."""
    if isinstance(error, (FileNotFoundError, FileExistsError)) or refuses(error):
        return False
    if isinstance(error, (TimeoutError, ConnectionError, _OtherBytes)):
        return True
    if isinstance(error, StoreError):
        return error.passes
    code = _code(error)
    if code:
        return code in (408, 429) or code >= 500
    return type(error).__module__.startswith(_NETWORK) or bool(_PASSES.search(_words(error)))


def refuses(error: BaseException) -> bool:
    """Whether a store refuses, as it does without credentials or a role."""
    if isinstance(error, PermissionError) or _code(error) in (401, 403):
        return True
    return bool(_REFUSES.search(_words(error)))


def _code(error: BaseException) -> int:
    """An HTTP status; 0 if an error has none."""
    code = str(getattr(error, "code", getattr(error, "status", "")))
    return int(code) if code.isdigit() else 0


def _words(error: BaseException) -> str:
    """An error's text without names of files, in which anything may be."""
    text = f"{type(error).__name__} {' '.join(str(error).split())}"
    return re.sub(r"\S*/\S*", "", text)


def attempt(what: str, call: Callable[[], T]) -> T:
    """Call until it succeeds, for :data:`DEADLINE`.

    Args:
        what: is done, in the error's words: ``gs://bucket/run/config.json is read``.
        call: raises what its library does.

    Raises:
        FileNotFoundError, FileExistsError: raised by ``call``.
        StoreError: it failed for good, or for as long as the deadline.
    """
    begun, tries = time.monotonic(), 0
    while True:
        try:
            return call()
        except (FileNotFoundError, FileExistsError, StoreError):
            raise
        except Exception as error:  # of several libraries
            if refuses(error):
                raise StoreError(
                    f"{what}: the store refuses ({error_line(error, whole=True)}); check the "
                    "credentials (gcloud auth application-default login, "
                    "GOOGLE_APPLICATION_CREDENTIALS, or the machine's service account) and their "
                    "role, Storage Object User of the bucket"
                ) from error
            if not passes(error):
                raise StoreError(f"{what}: {error_line(error)}") from error
            pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
            if time.monotonic() + pause - begun > DEADLINE:
                raise StoreError(
                    f"{what}: the store has not done it for {DEADLINE:.0f} s "
                    f"({error_line(error)}); when it answers again the same command goes on from "
                    "the last complete checkpoint",
                    passes=True,
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
            folder = folders.pop()
            for info in below(folder):
                name = info["name"][skip:]
                if not all(name.split("/")) or f"{self.url}/{name}" == folder:
                    continue  # "run/", by which consoles mark a folder, or a name with "//"
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

    def info(self, name: str) -> dict[str, Any] | None:
        """What the store says of a file; ``None`` if there is none."""
        path = self._path(name)
        try:
            return dict(attempt(f"{path} is looked up", lambda: self._fs.info(path)))
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        found = self.info(name)
        return found is not None and found["type"] == "file"

    def check_bucket(self) -> None:
        """Look the bucket up, which lists as empty where there is none.

        Raises:
            FileNotFoundError: there is none.
        """
        bucket = self.url.partition("://")[2].partition("/")[0]
        attempt(f"{SCHEME}://{bucket} is listed", lambda: self._fs.ls(bucket, detail=False))

    def read(self, name: str) -> bytes:
        """Read a whole file; its size and MD5 are compared with what the store says.

        Raises:
            FileNotFoundError: there is none.
            StoreError: what comes is not what the store says that it holds.
        """
        path = self._path(name)

        def whole() -> bytes:
            data = bytes(self._fs.cat_file(path))
            info = self._fs.info(path)  # after it: another process may write the file again
            if not _is_same(data, info):
                raise _OtherBytes("its bytes are not those that the store lists")
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

    def remove_folder(self, folder: str, mark: str = "") -> None:
        """Remove the files below a folder.

        Args:
            folder: its name, from the URL on.
            mark: the file that says that the folder is complete: it goes first.
        """
        for name in self._marked_first(folder, mark):
            self.remove(name)

    def _marked_first(self, folder: str, mark: str) -> list[str]:
        return sorted(self.files(folder), key=lambda name: name != f"{folder}/{mark}")

    def move(self, source: str, target: str, mark: str = "") -> None:
        """Rename a folder: each file is copied within the store, then the old ones are removed.

        Args:
            source: name of the folder, from the URL on.
            target: its new name.
            mark: the file that says that the folder is complete: it goes first.
        """
        names = self._marked_first(source, mark)
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
    import aiohttp

    # Of a connection and of what comes next, not of a whole large file.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    options: dict[str, Any] = {"use_listings_cache": False, "requests_timeout": timeout}
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
