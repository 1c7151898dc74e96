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
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeVar

from jaxvlm.checkpoint.errors import CheckpointError, error_line
from jaxvlm.config import ConfigError


class _Kind(NamedTuple):
    """What is known of a kind of store."""

    name: str
    package: str
    """Gives fsspec its file system, and is named as the extra's package."""
    extra: str
    credentials: str
    """Where they are looked for, and the role that they need; for errors."""


KINDS = {
    "gs": _Kind(
        "Google Cloud Storage",
        "gcsfs",
        "gcs",
        "gcloud auth application-default login, GOOGLE_APPLICATION_CREDENTIALS, or the machine's "
        "service account; their role: Storage Object User of the bucket",
    ),
    "s3": _Kind(
        "Amazon S3 and what speaks its protocol",
        "s3fs",
        "s3",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the machine's role; "
        "AWS_ENDPOINT_URL for another store than Amazon's; their policy: s3:ListBucket, GetObject, "
        "PutObject and DeleteObject",
    ),
}
"""Scheme of a URL -> the store that it is of."""
DEADLINE = 120.0
"""Seconds for which a request that fails for a while is tried again; the libraries' own tries, of
which the last may begin before it, take up to half a minute."""
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between two tries, and so on with the last."""
_PASSES = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|timed? ?out|broken pipe|"
    r"SlowDown|InternalError|RequestTimeout|Please try again|reduce your request rate|"
    r"connection (reset|refused|closed|aborted)|(status|response) code:? (408|429|5\d\d)",
    re.IGNORECASE,
)
_REFUSES = re.compile(
    r"UNAUTHENTICATED|PERMISSION_DENIED|(status|response) code:? (401|403)|"
    r"OSError Forbidden|anonymous caller|invalid credentials|NoCredentials|AccessDenied|"
    r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|TokenRefreshRequired",
    re.IGNORECASE,
)
"""What the stores' libraries say, where no type and no code does."""
_NETWORK = ("aiohttp", "requests", "urllib3", "google.auth", "botocore", "aiobotocore")
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
        ConfigError: the URL is of no kind of :data:`KINDS`, or the kind's package is missing.
    """
    scheme, _, rest = url.partition("://")
    kind = KINDS.get(scheme)
    if kind is None or not all(rest.rstrip("/").partition("/")):
        known = " and ".join(f"{key}://BUCKET/FOLDER ({x.name})" for key, x in KINDS.items())
        raise ConfigError(
            f"{setting}={url}: of object stores, {known} are supported; mount another one (a "
            "PersistentVolume, a FUSE mount) and pass the mounted folder"
        )
    if importlib.util.find_spec(kind.package) is None:
        raise ConfigError(f"{setting}={url}: {scheme}:// needs pip install 'jaxvlm[{kind.extra}]'")


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
        what: is done, in the error's words, which begin with a URL:
            ``gs://bucket/run/config.json is read``.
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
                kind = KINDS.get(what.partition("://")[0])
                raise StoreError(
                    f"{what}: the store refuses ({error_line(error, whole=True)}); check the "
                    f"credentials{f' ({kind.credentials})' if kind else ''}"
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
        url: ``gs://bucket/folder`` or ``s3://bucket/folder``.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._scheme = self.url.partition("://")[0]
        self._fs = _filesystem(self._scheme)

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def files(self, folder: str = "", without: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """Files below a folder, at any depth: name from the URL on -> what the store says of it.

        Args:
            folder: from the URL on.
            without: names of folders in it that are left out.
        """
        root, skip = self._path(folder), len(self.url.partition("://")[2]) + 1

        def below(path: str, deep: bool) -> Iterable[dict[str, Any]]:
            def listed() -> list[dict[str, Any]]:
                if deep:
                    return list(self._fs.find(path, detail=True).values())
                return list(self._fs.ls(path, detail=True))

            try:
                return attempt(f"{path} is listed", listed)
            except FileNotFoundError:
                return []

        found: dict[str, dict[str, Any]] = {}
        folders = [root]
        while folders:
            folder = folders.pop()
            # One request for thousands of files, but where some folders are left out.
            for info in below(folder, deep=not (without and folder == root)):
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
        attempt(f"{self._scheme}://{bucket} is listed", lambda: self._fs.ls(bucket, detail=False))

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

    def download(self, name: str, file: pathlib.Path, size: int) -> None:
        """Write what the store holds to a local file.

        Args:
            name: from the URL on.
            file: in a folder that exists.
            size: bytes that the store lists.

        Raises:
            FileNotFoundError: there is none.
            StoreError: what comes is not as long as the store says.
        """
        path = self._path(name)

        def whole() -> None:
            self._fs.get_file(path, str(file))
            if file.stat().st_size != size:
                raise _OtherBytes("its bytes are not as many as the store lists")

        attempt(f"{path} is read", whole)

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


def _filesystem(scheme: str) -> Any:
    """fsspec's file system for a scheme, whose lists of files are never those of a moment ago."""
    import fsspec

    package = KINDS[scheme].package
    logging.getLogger(package).setLevel(logging.CRITICAL)  # failures are said by our own errors
    options = {"gs": _gcs_options, "s3": _s3_options}[scheme]()
    # etils asks for "gcs" where it reads gs://.
    for name in ("gs", "gcs") if scheme == "gs" else (scheme,):
        fsspec.config.conf.setdefault(name, {}).update(options, use_listings_cache=False)
    return fsspec.filesystem(scheme)


def _gcs_options() -> dict[str, Any]:
    import aiohttp

    # Without it gcsfs asks by gRPC, with other credentials, what kind of bucket it has.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    # Of a connection and of what comes next, not of a whole large file.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    options: dict[str, Any] = {"requests_timeout": timeout}
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        options["token"] = "anon"  # else credentials are looked for on the network
    return options


def _s3_options() -> dict[str, Any]:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    return {
        # Also the name of the connection, which fsspec keeps.
        "endpoint_url": next((os.environ[name] for name in names if os.environ.get(name)), None),
        "config_kwargs": {"connect_timeout": 30, "read_timeout": 60},
    }


def _is_same(data: bytes, info: dict[str, Any]) -> bool:
    """Whether bytes are those that the store lists.

    Some objects of Google's have no MD5. Of Amazon's the ETag is one or not, as they are encrypted;
    its library compares the checksums that an object has.
    """
    if len(data) != info["size"]:
        return False
    known = info.get("md5Hash")
    return not known or base64.b64encode(hashlib.md5(data).digest()).decode() == known
