"""Object stores and web servers: files below a URL, read and written within a deadline."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.stores.errors import OtherBytes, StoreError
from jaxvlm.stores.store_requests import (
    KINDS,
    READ_KINDS,
    Kind,
    answer_of,
    attempt,
    each,
    local_disk,
)

ODD = re.compile(r"[#?*%\[\]\\\x00-\x1f]")
"""Characters that the stores' libraries read as something else than a name's."""


def check_url(
    setting: str, url: str, kinds: Mapping[str, Kind] = KINDS, root: bool = False
) -> None:
    """Refuse URLs that runs can't be kept at.

    Args:
        setting: the setting's name, for messages.
        url: its value.
        kinds: those that will do: :data:`KINDS`, or :data:`READ_KINDS` for what is only read.
        root: whether a bucket or a host will do, without a folder.

    Raises:
        ConfigError: the URL is of no such kind, or names no folder that all libraries take for the
            same one.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in kinds:
        known = " and ".join(f"{key}://BUCKET/FOLDER ({x.name})" for key, x in kinds.items())
        raise ConfigError(
            f"{setting}={url}: of object stores, {known} are supported; mount another one (a "
            "PersistentVolume, a FUSE mount) and pass the mounted folder"
        )
    bucket, *folders = rest.rstrip("/").split("/")
    if not bucket or not (folders or root):
        raise ConfigError(f"{setting}={url}: name a folder in a bucket: {scheme}://BUCKET/FOLDER")
    why = "an empty name between two slashes, or one of dots"
    wrong = not all(folders) or not {".", ".."}.isdisjoint(folders)
    if odd := ODD.search(rest):
        wrong, why = True, f"the character {odd[0]!r}"
    if wrong:
        raise ConfigError(f"{setting}={url}: the folder has {why}; give it another name")


def check_scheme(
    setting: str, url: str, kinds: Mapping[str, Kind] = KINDS, root: bool = False
) -> None:
    """Refuse stores that runs can't be kept in; see :func:`check_url`.

    Raises:
        ConfigError: as there; or the package for the store is missing.
    """
    check_url(setting, url, kinds, root)
    scheme = url.partition("://")[0]
    kind = kinds[scheme]
    if importlib.util.find_spec(kind.package) is None:
        raise ConfigError(f"{setting}={url}: {scheme}:// needs pip install 'jaxvlm[{kind.extra}]'")


class RemoteFolder:
    """The files below a URL.

    Args:
        url: ``gs://bucket/folder`` or ``s3://bucket/folder``; to read files by their names, also
            ``http://host/folder`` or ``https://host/folder``.
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
                with _whole_answers():
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

    def files_in(self, folder: str) -> dict[str, dict[str, Any]]:
        """Files in a folder itself: name from the URL on -> what the store says of it."""
        root, skip = self._path(folder), len(self.url.partition("://")[2]) + 1

        def listed() -> list[dict[str, Any]]:
            with _whole_answers():
                return list(self._fs.ls(root, detail=True))

        try:
            found = attempt(f"{root} is listed", listed)
        except FileNotFoundError:
            return {}
        return {info["name"][skip:]: info for info in found if info["type"] == "file"}

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted."""
        root = self._path(folder)

        def listed() -> list[str]:
            with _whole_answers():
                return list(self._fs.ls(root, detail=False))

        try:
            found = attempt(f"{root} is listed", listed)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def info(self, name: str) -> dict[str, Any] | None:
        """What the store says of a file; ``None`` if there is none."""
        path = self._path(name)
        try:
            return attempt(f"{path} is looked up", lambda: self._info(path))
        except FileNotFoundError:
            return None

    def _info(self, path: str) -> dict[str, Any]:
        try:
            with _whole_answers():
                return dict(self._fs.info(path))
        except FileNotFoundError as error:  # what fsspec calls all failures of a web server, too
            if isinstance(error.__cause__, Exception) and answer_of(error.__cause__)[0] != 404:
                raise error.__cause__ from None
            raise

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
            with _whole_answers():
                data = bytes(self._fs.cat_file(path))
            info = self._info(path)  # after it: another process may write the file again
            if not _is_same(data, info):
                raise OtherBytes("its bytes are not those that the store lists")
            return data

        return attempt(f"{path} is read", whole)

    def check_ranges(self, name: str) -> None:
        """Ask for one byte of a small file.

        Raises:
            FileNotFoundError: there is none.
            StoreError: all of it comes, as it would of files of gigabytes.
        """
        path = self._path(name)
        if len(attempt(f"{path} is read", lambda: self._fs.cat_file(path, start=0, end=1))) > 1:
            raise StoreError(
                f"{self.url}: the web server gives whole files where a part is asked for (it "
                "ignores Range, as python's http.server does); use another one (nginx, Caddy)"
            )

    def read_range(self, name: str, first: int, size: int) -> bytes:
        """Read a part of a file: so many bytes from the first one on.

        Raises:
            FileNotFoundError: there is none.
            StoreError: another number of bytes comes.
        """
        path = self._path(name)

        def part() -> bytes:
            with _whole_answers():
                data = bytes(self._fs.cat_file(path, start=first, end=first + size))
            if len(data) > size:
                raise OtherBytes("more than the part that was asked for")
            if len(data) < size:
                raise OtherBytes(f"{len(data):,} of {size:,} bytes")
            return data

        return attempt(f"{path} is read", part) if size else b""

    def write(self, name: str, data: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Write a whole file, in place of an older one.

        Args:
            name: from the URL on.
            data: its bytes.
            check: called before each try; raises where it must not be written any more.
        """
        path = self._path(name)

        def once() -> None:
            check()
            self._fs.pipe_file(path, data)

        attempt(f"{path} is written", once)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not exist yet; whether this call did, and nobody before it.

        Args:
            name: from the URL on.
            data: unlike anybody else's.
        """
        path = self._path(name)

        def once() -> None:
            try:
                self._fs.pipe_file(path, data, mode="create")
            except OSError as error:
                if answer_of(error)[0] == 412:  # s3fs knows it by a field that not all stores send
                    raise FileExistsError(path) from error
                raise

        try:
            attempt(f"{path} is created", once)
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

    def download(
        self,
        name: str,
        file: pathlib.Path,
        size: int,
        advice: str = "set TMPDIR to a folder with room for a checkpoint",
        md5: str = "",
    ) -> None:
        """Write what the store holds to a local file.

        Args:
            name: from the URL on.
            file: in a folder that exists.
            size: bytes that the store lists.
            advice: see ``local_disk``.
            md5: in base64, of what comes; "": not known.

        Raises:
            FileNotFoundError: there is none.
            StoreError: what comes is not what the store lists, or this machine's disk is full.
        """
        path = self._path(name)

        def whole() -> None:
            with local_disk(file.parent, advice), _whole_answers():
                self._fs.get_file(path, str(file))
            if file.stat().st_size != size:
                raise OtherBytes("its bytes are not as many as the store lists")
            with file.open("rb") as opened:
                found = hashlib.file_digest(opened, "md5").digest() if md5 else b""
            if base64.b64encode(found).decode() != md5:
                raise OtherBytes("its bytes are not those that the store lists")

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
        if mark:
            self.remove(f"{folder}/{mark}")
        path = self._path(folder)
        if self._scheme == "s3":  # a thousand at a time; what fails is not said
            with contextlib.suppress(FileNotFoundError):
                attempt(f"{path} is removed", lambda: self._fs.rm(path, recursive=True))
        each(self.remove, self.files(folder))

    def move(self, source: str, target: str, mark: str = "") -> None:
        """Rename a folder: each file is copied within the store, then the old ones are removed.

        Args:
            source: name of the folder, from the URL on.
            target: its new name.
            mark: the file that says that the folder is complete: it goes first.
        """

        def copy(name: str) -> None:
            old, new = self._path(name), self._path(target + name[len(source) :])
            attempt(f"{old} is copied", lambda: self._fs.cp_file(old, new))

        each(copy, self.files(source))
        self.remove_folder(source, mark)


@contextlib.contextmanager
def _whole_answers() -> Iterator[None]:
    """Of what a store says of files: an answer that can't be read is asked for again."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise OtherBytes(f"its answer is damaged: {error}") from None


def _filesystem(scheme: str) -> Any:
    """fsspec's file system for a scheme, whose lists of files are never those of a moment ago."""
    import fsspec

    package = READ_KINDS[scheme].package
    logging.getLogger(package).setLevel(logging.CRITICAL)  # failures are said by our own errors
    if scheme not in KINDS:
        return fsspec.filesystem(scheme, **_web_options())
    # etils asks for "gcs" where it reads gs://.
    for name in ("gs", "gcs") if scheme == "gs" else (scheme,):
        if scheme == "gs":
            _use_plain_gcsfs(name)
        own = fsspec.config.conf.setdefault(name, {})
        own.update(_gcs_options() if scheme == "gs" else _s3_options(own))
        own["use_listings_cache"] = False
    found = fsspec.filesystem(scheme)
    if scheme == "s3":
        found.retries = 1  # attempt() tries again
    return found


def _use_plain_gcsfs(name: str) -> None:
    """Have gcsfs ask nothing by gRPC, with other credentials, also where it was imported before."""
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec
    import gcsfs.core

    fsspec.register_implementation(name, gcsfs.core.GCSFileSystem, clobber=True)


def _timeout() -> Any:
    """Of a connection and of what comes next, not of a whole large file."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)


def _web_options() -> dict[str, Any]:
    # ~/.netrc and proxies; bytes as they are, of which parts can be asked for.
    client = {"trust_env": True, "timeout": _timeout()}
    return {"client_kwargs": client, "headers": {"Accept-Encoding": "identity"}}


def _gcs_options() -> dict[str, Any]:
    options: dict[str, Any] = {"requests_timeout": _timeout()}
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        options["token"] = "anon"  # else credentials are looked for on the network
    return options


def _s3_options(own: dict[str, Any]) -> dict[str, Any]:
    # Of a connection and of what comes next; attempt() tries again.
    once = {"connect_timeout": 30, "read_timeout": 60, "retries": {"total_max_attempts": 1}}
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next((os.environ[name] for name in names if os.environ.get(name)), None)
    # botocore reads it by itself; here it is also the name of the connection that fsspec keeps.
    kept = own.get("config_kwargs", {}) | once
    return {"config_kwargs": kept} | ({"endpoint_url": endpoint} if endpoint else {})


def _is_same(data: bytes, info: dict[str, Any]) -> bool:
    """Whether bytes are those that the store lists.

    Some objects of Google's have no MD5. Of Amazon's the ETag is one or not, as they are encrypted;
    its library compares the checksums that an object has.
    """
    if info["size"] is not None and len(data) != info["size"]:
        return False
    known = info.get("md5Hash")
    return not known or base64.b64encode(hashlib.md5(data).digest()).decode() == known
