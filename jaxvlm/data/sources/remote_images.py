"""Images in a bucket that records name relative to their file, or to ``data.image_root``.

They are copied to this machine as a whole, each version to a place of its own, and are ordinary
files from then on. Which there are, and their versions, is listed by the store, at each start.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import pathlib
import posixpath

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import downloads
from jaxvlm.data.sources.remote_files import copy_file, is_here, version_of, written
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import ODD, RemoteFolder
from jaxvlm.stores.store_requests import KINDS, each

_log = logging.getLogger("jaxvlm.data")
_AT_ONCE = 512
"""Images that are asked for together."""
_FOLDERS = 32
"""Folders that are listed by themselves, before all of the root is."""
_LONGEST = 255
"""Bytes of a file's name."""


def is_bucket(url: str) -> bool:
    """Whether images are copied from there: web servers list no files."""
    return url.partition("://")[0] in KINDS and "://" in url


class RemoteImages:
    """Copies of images below a URL.

    Images that are asked for are copied many at a time; the last ones by :meth:`copy`.

    Args:
        url: the folder that names are relative to; ``..`` may lead out of it, not of the bucket.
        config: data settings, of which ``download_dir`` is read.
    """

    def __init__(self, url: str, config: DataConfig):
        self._scheme, _, self._root = url.rstrip("/").partition("://")
        hashed = hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
        self._folder = downloads.root(config) / f"images-{hashed}"
        self._listed: dict[tuple[str, bool], dict[str, dict[str, str]]] = {}
        self._wanted: dict[pathlib.Path, tuple[str, dict[str, str]]] = {}
        self._remote = RemoteFolder(f"{self._scheme}://{self._root.partition('/')[0]}")
        self._asked = 0

    def path(self, name: str) -> pathlib.Path:
        """The file that an image is read from; there is none if the store has none.

        Raises:
            StoreError: the store does not list its files, or gives other bytes than it lists.
            DataError: there is no such bucket, or no room for copies.
        """
        full = posixpath.normpath(f"{self._root}/{name}")
        bucket, _, key = full.partition("/")
        info = None
        own = posixpath.basename(key)
        if bucket == self._root.partition("/")[0] and own and not ODD.search(name):
            info = self._info(key) if len(own.encode("utf-8", "replace")) <= _LONGEST else None
        if info is None:
            return self._folder / "missing" / full.replace("../", "")
        text = json.dumps([key, info]).encode()
        version = hashlib.blake2b(text, digest_size=10).hexdigest()
        path = self._folder / version[:2] / version[2:] / own
        if path not in self._wanted and not is_here(path, info):
            self._wanted[path] = key, info
            if len(self._wanted) >= _AT_ONCE:
                self.copy()
        return path

    def _info(self, key: str) -> dict[str, str] | None:
        """What the store says of a file of the bucket; ``None`` if there is none.

        Files of the root are listed once, and so are those below each folder in it, at any depth;
        of many folders, all of the root.
        """
        root, folder = self._root.split("/")[1:], key.split("/")[:-1]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(root, folder))
        first = sum(1 for _ in same) + 1
        where, is_deep = "/".join(folder[:first]), len(folder) >= first
        whole = "/".join(root), True
        if folder[: len(root)] == root and (whole in self._listed or len(self._listed) > _FOLDERS):
            where, is_deep = whole
        if (where, is_deep) not in self._listed:
            list_files = self._remote.files if is_deep else self._remote.files_in
            found = list_files(where)
            if not found:
                self._check_bucket()
            self._listed[where, is_deep] = {name: version_of(found[name]) for name in found}
        return self._listed[where, is_deep].get(key)

    def _check_bucket(self) -> None:
        """Refuse a bucket that is not there, which lists as empty; raises DataError."""
        try:
            with contextlib.suppress(StoreError):  # a part of it may be all that is to be seen
                self._remote.check_bucket()
        except FileNotFoundError:
            raise DataError(f"{self._remote.url}: no such bucket; images are named in it") from None

    def copy(self) -> None:
        """Copy what was asked for."""
        wanted, self._wanted = self._wanted, {}
        if not wanted:
            return
        self._asked += len(wanted)
        where = f"{self._scheme}://{self._root}"
        _log.info("copying images of %s to %s: %d so far", where, self._folder, self._asked)

        def one(path: pathlib.Path) -> None:
            key, info = wanted[path]
            path.parent.mkdir(parents=True, exist_ok=True)
            copy_file(self._remote, key, info, path)

        with written(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with downloads.alone(self._folder / "images"):  # another process finds them
                each(one, list(wanted))
