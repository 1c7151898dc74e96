"""Copies on this machine of a packed set's files in a store.

Arrays are copied as a whole when a set is opened. A tar of images is a local file of the same size
that has the images that were read so far, each at its place, and holes between them. An image is
there if its bytes have the digest that was packed; so a process that is killed leaves nothing wrong
behind, several processes share the copies, and what a store gives wrongly is never used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import pathlib
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources.member_names import Member, digest_of
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder
from jaxvlm.stores.store_requests import each

_log = logging.getLogger(__name__)
PAUSES = (0.5, 1.0, 2.0)
"""Seconds before bytes with another digest are asked for again."""
_MEASURED = 64 * 2**20
"""Bytes that are copied before the images' size on disk is looked up again."""
_A_WHILE = 60.0
"""Seconds after which a read of a file is written down again, in its time of change."""
_BLOCK = 256 * 2**10
"""Bytes of a tar that are asked for at once: images of sequences that are packed one after another
lie side by side, and small ones cost a request each otherwise."""
_OPEN: dict[tuple[str, str], Copies] = {}
_BY_URL: dict[str, Copies] = {}
"""Sets that this process has opened; the names of their images begin with these URLs."""


def of(url: str, name: str, files: Mapping[str, Sequence[Any]], config: DataConfig) -> Copies:
    """The copies of a set's files, and from now on the place that its images are read from.

    Args:
        url: of the set.
        name: of the folder of its copies.
        files: name -> (size, digest) of each file.
        config: data settings, of which ``download_dir`` and ``download_gb`` are read.

    Raises:
        DataError: a file of images is not as long as it was.
        StoreError: the store does not answer, or gives no parts of files.
    """
    folder = root(config) / name
    known = _OPEN.get((url, str(folder)))
    if known is None:
        known = Copies(url, folder, files)
        known.check_shards()
        _OPEN[url, str(folder)] = known
    known.limit = int(config.download_gb * 2**30)
    if known.limit:
        known.make_room()
    _BY_URL[url] = known
    return known


def root(config: DataConfig) -> pathlib.Path:
    """The folder of copies on this machine."""
    if config.download_dir:
        return pathlib.Path(config.download_dir).expanduser()
    kept = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(kept).expanduser() / "jaxvlm" / "sets"


def read(member: Member) -> bytes:
    """Read an image of a set that this process has opened.

    Raises:
        ValueError: the store has other bytes, or the set was not opened.
        StoreError: the store does not give them.
    """
    url, _, name = member.file.rpartition("/")
    if url not in _BY_URL:
        raise ValueError(f"{url} was not opened")
    return _BY_URL[url].read(name, member)


class Copies:
    """Copies of a set's files in a folder of this machine.

    Args:
        url: of the set.
        folder: of the copies; made when there is something to copy.
        files: name -> (size, digest) of each file.

    Attributes:
        limit: bytes of images on disk that are kept, about; 0: all.
    """

    def __init__(self, url: str, folder: pathlib.Path, files: Mapping[str, Sequence[Any]]):
        self.url, self.folder, self._files, self.limit = url, folder, files, 0
        self._remote = RemoteFolder(url)
        self._lock = threading.Lock()
        self._read_at: dict[str, float] = {}
        self._copied, self._full = 0, False
        self._images = sum(size for name, (size, _) in files.items() if is_shard(name))
        self._locks = [threading.Lock() for _ in range(256)]  # of blocks, by their hash
        self._asked: dict[str, bytearray] = {}

    def check_shards(self) -> None:
        """Look up the files of images.

        Raises:
            DataError: one is not as long as it was.
            StoreError: a web server does not give parts of files.
        """
        if self.url.startswith("http") and self._files:
            smallest = min(self._files, key=lambda name: int(self._files[name][0]))
            with self._present(smallest):
                self._remote.check_ranges(smallest)

        def check(name: str) -> None:
            info, size = self._remote.info(name), self._files[name][0]
            found = "is missing" if info is None else f"has {info['size']:,} bytes"
            if info is None or info["size"] not in (None, size):
                raise DataError(
                    f"{self.url}/{name} {found}, and {size:,} bytes were packed; copy the set "
                    "again, or pack it again"
                )

        each(check, list(filter(is_shard, self._files)))

    @contextlib.contextmanager
    def _present(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise DataError(
                f"{self.url}/{name} is missing; copy the set again, or pack it again"
            ) from None

    def keep(self, names: Iterable[str]) -> None:
        """Copy whole files that are not here yet, several at a time.

        Raises:
            DataError: the store has other bytes, or there is no room for them.
            StoreError: the store does not give them.
        """
        missing = [name for name in names if not self._is_here(name)]
        if not missing:
            return
        needed = sum(self._files[name][0] for name in missing)
        with self._local():
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise DataError(
                    f"{self.folder} has room for {free / 2**30:.1f} GiB, and {needed / 2**30:.1f} "
                    f"GiB of {self.url} are copied there; set data.download_dir"
                )
            _log.info("copying %.1f MiB of %s to %s", needed / 2**20, self.url, self.folder)
            each(self._copy, missing)

    def _is_here(self, name: str) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == self._files[name][0]

    def _copy(self, name: str) -> None:
        path, (size, digest) = self.folder / name, self._files[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(path) as partial:
            if self._is_here(name):
                return  # by another process, meanwhile
            for pause in (*PAUSES, None):
                with self._present(name):
                    self._remote.download(name, partial, size, "set data.download_dir")
                if digest_of_file(partial) == digest:
                    break
                if pause is None:
                    raise DataError(
                        f"{self.url}/{name} has other bytes than those that were packed; copy the "
                        "set again, or pack it again"
                    )
                time.sleep(pause)
            with open(partial, "rb") as file:
                os.fsync(file.fileno())  # what has its name and size is taken for whole
            os.replace(partial, path)

    def read(self, name: str, member: Member) -> bytes:
        """The bytes of an image, from its copy or from the store; see :func:`read`."""
        size, first = self._files.get(name, (0, ""))[0], int(member.place)
        if first + member.size > size:
            raise ValueError("the file was truncated since it was indexed")
        data = self._copied_part(name, first, member.size)
        if digest_of(data).hex() == member.digest:
            return data
        if self._keeps_all() and member.size < _BLOCK:
            data = self._of_blocks(name, first, member.size, size)
            if digest_of(data).hex() == member.digest:
                return data
        for pause in (0.0, *PAUSES):
            time.sleep(pause)
            data = self._part(name, first, member.size)
            if digest_of(data).hex() == member.digest:
                self._put(name, size, first, data)
                return data
        raise ValueError("its bytes are not those that were packed")

    def _keeps_all(self) -> bool:
        """Whether what is read besides an image is still here when it is asked for."""
        return not self._full and (not self.limit or self.limit >= self._images)

    def _of_blocks(self, name: str, first: int, count: int, size: int) -> bytes:
        """Copy the blocks that an image lies in, each once in this process; the image's bytes."""
        for number in range(first // _BLOCK, (first + count - 1) // _BLOCK + 1):
            with self._locks[hash((name, number)) % len(self._locks)]:
                asked = self._asked.setdefault(name, bytearray(-(-size // _BLOCK)))
                if not asked[number]:
                    begin = number * _BLOCK
                    block = self._part(name, begin, min(_BLOCK, size - begin))
                    self._put(name, size, begin, block)
                    asked[number] = 1
        return self._copied_part(name, first, count)

    def _part(self, name: str, first: int, size: int) -> bytes:
        try:
            return self._remote.read_range(name, first, size)
        except FileNotFoundError:  # no image's fault, by which its records were skipped
            raise StoreError(
                f"{self.url}/{name} is gone, and was there at the start; copy the set again"
            ) from None

    def _copied_part(self, name: str, first: int, size: int) -> bytes:
        path, now = self.folder / name, time.monotonic()
        try:
            if now - self._read_at.get(name, -math.inf) > _A_WHILE:
                self._read_at[name] = now
                os.utime(path)  # the processes that share the copies tell each other by it
            with path.open("rb") as file:
                return os.pread(file.fileno(), size, first)
        except OSError:
            return b""

    def _put(self, name: str, size: int, first: int, data: bytes) -> None:
        """Put an image into the copy of its file; a full disk is said once, and stops nothing."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            copy = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(copy).st_size != size:
                    os.ftruncate(copy, size)
                os.pwrite(copy, data, first)
            finally:
                os.close(copy)
        except OSError as error:
            if not self._full:
                self._full = True
                _log.warning(
                    "%s: %s; images of %s are read from there each time. Make room, lower "
                    "data.download_gb, or set data.download_dir",
                    *(self.folder, error.strerror or error, self.url),
                )
            return
        with self._lock:
            self._copied += len(data)
            if self.limit and self._copied >= min(_MEASURED, self.limit // 4):
                self._copied = 0
                self.make_room()

    def make_room(self) -> None:
        """Remove the copies of those files of images whose last read is longest ago."""
        on_disk = []
        for path in self.folder.glob("*.tar"):
            with contextlib.suppress(OSError):  # removed by another process
                found = path.stat()
                on_disk.append((found.st_mtime_ns, found.st_blocks * 512, path))
        total = sum(size for _, size, _ in on_disk)
        for _, size, path in sorted(on_disk):
            if total <= self.limit:
                break
            total -= size
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _local(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{error.filename or self.folder} can't be written: {error.strerror or error}; "
                "set data.download_dir"
            ) from None


@contextlib.contextmanager
def alone(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The file in which this process, alone on its host, writes what is renamed to ``path``.

    Other hosts, which locks may not reach, have files of their own.
    """
    host = socket.gethostname()
    with open(path.with_name(f"{path.name}.lock-{host}"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process of this host that copies %s", path)
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed when a process is killed
        except OSError:  # this disk has no locks
            host = f"{host}-{os.getpid()}"
        yield path.with_name(f"{path.name}.partial-{host}")


def is_shard(name: str) -> bool:
    """Whether a set's file has images: no start reads it, and steps read parts of it."""
    return name.endswith(".tar") and "/" not in name


def digest_of_file(path: pathlib.Path) -> str:
    """Hash of a file's bytes, as ``packed.json`` has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
