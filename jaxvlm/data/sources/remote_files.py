"""Files of records at URLs, which are copied to this machine before they are read.

``hf://datasets/OWNER/NAME[@REVISION]/PATTERN`` names files of a data set on the Hugging Face hub,
whose client keeps them; ``gs://``, ``s3://``, ``http://`` and ``https://`` name files in stores.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import json
import os
import pathlib
import re
import socket
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from jaxvlm.config import ConfigError, DataConfig
from jaxvlm.config.unread import READ_BY
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import downloads
from jaxvlm.data.sources.compressed import kind_of
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder, check_scheme
from jaxvlm.stores.store_requests import READ_KINDS, each

_HUB = re.compile(r"hf://datasets/((?:[\w.-]+/)?[\w.-]+)(?:@([^/]+))?(?:/(.*))?")
_MANY = re.compile(r"[*?[]")
_VERSION = (
    *("size", "ETag", "etag", "md5Hash", "crc32c", "generation", "LastModified", "updated"),
    *("Last-Modified", "Content-MD5", "Digest"),
)
"""What stores say of a file that is another one when the file is."""


_TIMES = ("LastModified", "updated")


def is_files(spec: str) -> bool:
    """Whether a URL names files of records, and not the folder of a packed set."""
    if "://" not in spec or spec.startswith("file://"):
        return False
    name = _name(spec)
    is_pattern = not spec.startswith("http") and _MANY.search(name)
    return spec.startswith("hf://") or bool(is_pattern) or kind_of(pathlib.Path(name)) in READ_BY


def local(spec: str, config: DataConfig) -> str:
    """The pattern of the copies of files at a URL.

    Args:
        spec: of which :func:`is_files` holds.
        config: data settings, of which ``download_dir`` is read.

    Raises:
        DataError: there are no such files, they can't be had, or there is no room for them.
        StoreError: the store does not give them.
    """
    return _of_hub(spec) if spec.startswith("hf://") else _of_store(spec, config)


def _name(spec: str) -> str:
    """The last part of a URL, without a query of the web's."""
    path = urllib.parse.urlsplit(spec).path if spec.startswith("http") else spec
    return path.rstrip("/").rpartition("/")[2]


def _of_hub(spec: str) -> str:
    match = _HUB.fullmatch(spec)
    if match is None:
        raise DataError(f"{spec}: files on the hub are hf://datasets/OWNER/NAME[@REVISION]/PATTERN")
    from huggingface_hub import HfApi, snapshot_download

    repo, revision, pattern = match.groups()
    try:
        if pattern:
            folder = snapshot_download(
                repo, repo_type="dataset", revision=revision, allow_patterns=[pattern]
            )
            found = f"{glob.escape(folder)}/{pattern}"
            if glob.glob(found):
                return found
        there = HfApi().list_repo_files(repo, repo_type="dataset", revision=revision)
    except Exception as error:  # the hub's client raises many types
        short = "".join(str(error).strip().splitlines()[:1])
        raise DataError(
            f"{spec} can't be downloaded from the hub: {type(error).__name__}: {short}"
        ) from None
    names = [name for name in there if kind_of(pathlib.Path(name)) in READ_BY]
    more = ", …" if len(names) > 8 else ""
    known = f"it has {', '.join(names[:8])}{more}" if names else "it has no files of records"
    raise DataError(
        f"{spec}: no such file there; {known}: hf://datasets/{repo}/PATTERN names some of them"
    )


def _of_store(spec: str, config: DataConfig) -> str:
    base, _, last = spec.rpartition("/")
    try:
        check_scheme("data.train", base, READ_KINDS, root=True)
    except ConfigError as error:
        raise DataError(str(error)) from None
    remote, names = RemoteFolder(base), [last]
    if not spec.startswith("http") and _MANY.search(last):
        names = fnmatch.filter(remote.names(""), last)
    infos = {name: info for name in names if (info := remote.info(name)) is not None}
    if not infos:
        raise DataError(f"{spec}: no such file there; name a file, or a pattern of their names")
    known = {name: version_of(info) for name, info in sorted(infos.items())}
    root = downloads.root(config)
    if any(own.keys() <= {"size"} for own in known.values()):
        return _unversioned(remote, last, root)
    text = json.dumps([base, known])
    folder = root / f"files-{_hash(text.encode())}"  # other versions have other folders

    def copy(name: str) -> None:
        _copy(remote, name, infos[name], folder / _name(f"{base}/{name}"))

    with written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        each(copy, list(infos))
    return f"{glob.escape(str(folder))}/{_name(spec)}"


def _differ(one: Mapping[str, str], other: Mapping[str, Any]) -> bool:
    """Whether two answers are of different versions; lists have other times than single files."""
    kinds = [key for key in _VERSION if key not in _TIMES and key in one and key in other]
    return any(str(one[key]) != str(other[key]) for key in kinds)


def version_of(info: dict[str, Any]) -> dict[str, str]:
    """What a store says of a file that is another one when the file is."""
    return {key: str(info[key]) for key in _VERSION if info.get(key) is not None}


def _unversioned(remote: RemoteFolder, name: str, root: pathlib.Path) -> str:
    """Copy a file of which a web server says no more than its size, at each start: who knows."""
    data = remote.read(name)
    folder = root / f"files-{_hash(data)}"
    path = folder / _name(f"{remote.url}/{name}")
    with written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with downloads.alone(path) as partial:
            partial.write_bytes(data)
            os.replace(partial, path)  # with the same bytes, where it is there
    return glob.escape(str(path))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@contextlib.contextmanager
def written(folder: pathlib.Path) -> Iterator[None]:
    """Raise DataError where a file can't be written there."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or folder} can't be written: {error.strerror or error}; set "
            "data.download_dir"
        ) from None


def _copy(remote: RemoteFolder, name: str, info: dict[str, Any], path: pathlib.Path) -> None:
    """Copy a file that is not here yet, whole or not at all."""
    if path.is_file():
        return
    with downloads.alone(path) as partial:
        if not path.is_file():  # by another process, meanwhile
            _download(remote, name, info, path, partial)


def is_here(path: pathlib.Path, info: Mapping[str, Any]) -> bool:
    """Whether a copy is there, of the size that the store says."""
    return path.is_file() and path.stat().st_size == int(info["size"])


def copy_file(remote: RemoteFolder, name: str, info: Mapping[str, Any], path: pathlib.Path) -> None:
    """Copy a file that is not here yet, whole or not at all; one process of a host at a time.

    Raises:
        StoreError: the store does not give it, or gives another version.
        DataError: there is no room for it.
    """
    if not is_here(path, info):
        _download(remote, name, info, path, path.with_name(f"partial-{socket.gethostname()}"))


def _download(
    remote: RemoteFolder,
    name: str,
    info: Mapping[str, Any],
    path: pathlib.Path,
    partial: pathlib.Path,
) -> None:
    md5 = str(info.get("md5Hash") or "")
    try:
        if info.get("size") is None:  # a web server that does not say it
            partial.write_bytes(remote.read(name))
        else:
            remote.download(name, partial, int(info["size"]), "set data.download_dir", md5)
        now = None if md5 else remote.info(name)
    except FileNotFoundError:
        raise StoreError(f"{remote.url}/{name} is gone, and was there at the start") from None
    if not md5 and (now is None or _differ(version_of(now), info)):
        raise StoreError(f"{remote.url}/{name} was changed while it was copied; start again")
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
