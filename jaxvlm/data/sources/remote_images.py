"""Images in a bucket that records name relative to their file, or to ``data.image_root``.

They are copied to this machine as a whole, each version to a place of its own, and are ordinary
files from then on. Which there are, and their versions, is listed by the store, at each start.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import posixpath
import re
from typing import Any

from jaxvlm.config import DataConfig
from jaxvlm.data.sources import downloads
from jaxvlm.data.sources.remote_files import copy_file, version_of, written
from jaxvlm.stores.object_store import RemoteFolder
from jaxvlm.stores.store_requests import KINDS, each

_AT_ONCE = 512
"""Images that are asked for together."""
_ODD = re.compile(r"[#?*%\[\]\\\x00-\x1f]")
"""Characters of names that the stores' libraries read as something else."""


def is_bucket(url: str) -> bool:
    """Whether images are copied from there: web servers list no files."""
    return url.partition("://")[0] in KINDS and "://" in url


class RemoteImages:
    """Copies of images below a URL.

    Images that are asked for while records are read are copied together, by :meth:`copy` at the
    latest; after :meth:`end` each is copied when it is asked for.

    Args:
        url: the folder that names are relative to; ``..`` may lead out of it, not of the bucket.
        config: data settings, of which ``download_dir`` is read.
    """

    def __init__(self, url: str, config: DataConfig):
        self._scheme, _, self._root = url.rstrip("/").partition("://")
        hashed = hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
        self._folder = downloads.root(config) / f"images-{hashed}"
        self._listed: dict[tuple[str, bool], dict[str, dict[str, Any]]] = {}
        self._wanted: dict[pathlib.Path, tuple[str, dict[str, Any]]] = {}
        self._remote = RemoteFolder(f"{self._scheme}://{self._root.partition('/')[0]}")
        self._at_once = _AT_ONCE

    def path(self, name: str) -> pathlib.Path:
        """The file that an image is read from; there is none if the store has none.

        Raises:
            StoreError: the store does not list its files, or gives other bytes than it lists.
            DataError: there is no room for copies.
        """
        full = posixpath.normpath(f"{self._root}/{name}")
        bucket, _, key = full.partition("/")
        info = None
        if key and bucket == self._root.partition("/")[0] and not _ODD.search(name):
            info = self._info(key)
        if info is None:
            return self._folder / "missing" / name.lstrip("/")
        text = json.dumps([key, version_of(info)]).encode()
        version = hashlib.blake2b(text, digest_size=10).hexdigest()
        path = self._folder / version[:2] / version[2:] / posixpath.basename(key)
        if path not in self._wanted and not path.is_file():
            self._wanted[path] = key, info
            if len(self._wanted) >= self._at_once:
                self.copy()
        return path

    def _info(self, key: str) -> dict[str, Any] | None:
        """What the store says of a file of the bucket; ``None`` if there is none.

        Files of the root are listed once, and so are those below each folder in it, at any depth.
        """
        root, folder = self._root.split("/")[1:], key.split("/")[:-1]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(root, folder))
        first = sum(1 for _ in same) + 1
        where, is_deep = "/".join(folder[:first]), len(folder) >= first
        if (where, is_deep) not in self._listed:
            list_files = self._remote.files if is_deep else self._remote.files_in
            self._listed[where, is_deep] = list_files(where)
        return self._listed[where, is_deep].get(key)

    def copy(self) -> None:
        """Copy what was asked for."""
        wanted, self._wanted = self._wanted, {}
        if not wanted:
            return

        def one(path: pathlib.Path) -> None:
            key, info = wanted[path]
            path.parent.mkdir(parents=True, exist_ok=True)
            copy_file(self._remote, key, info, path)

        with written(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with downloads.alone(self._folder / "images"):  # another process finds them
                each(one, list(wanted))

    def end(self) -> None:
        """Copy what was asked for, and from now on each image at once."""
        self.copy()
        self._at_once = 1
