"""The files of a packed set: whole or absent, in a folder of this machine or in a store.

Of a set in a store this machine keeps copies: :mod:`jaxvlm.data.sources.downloads`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError, DataConfig, json_text
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import downloads
from jaxvlm.data.sources.member_names import is_remote, local_path
from jaxvlm.data.sources.partial_files import is_alive, remove_left_over
from jaxvlm.data.sources.tables import PACKED
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder, check_scheme
from jaxvlm.stores.store_requests import READ_KINDS, concurrently, each

FORMAT = 1
"""Of the folder; raised where an older jaxvlm could not read it."""
CONVERSATIONS, PAIRS = "conversations", "pairs"
"""Kinds of sets; one that names none is of the first."""


class PackedFiles(NamedTuple):
    """A packed set whose arrays and tokenizer are on this machine."""

    folder: pathlib.Path
    """Where they are."""
    facts: dict[str, Any]
    """What ``packed.json`` says."""
    where: str
    """What the names of its images begin with: the folder, or the URL that they are read from."""


def opened(spec: str, config: DataConfig, kind: str) -> PackedFiles:
    """Find a set's files; those of a set in a store are copied to this machine first, but images.

    Args:
        spec: folder or URL.
        config: data settings, for the place of the copies.
        kind: conversations | pairs.

    Raises:
        DataError: a file is missing, damaged, or of another format; or the set is of another kind.
        StoreError: the store does not give them.
    """
    index, digest = _index(spec)
    if (found := index.get("kind", CONVERSATIONS)) != kind:
        raise DataError(
            f"{spec} was packed from {found}, and this run trains on {kind}: config.loss.name says "
            "which a run trains on"
        )
    if is_remote(spec):
        # Its name says which set it is of, and two sets are never in one.
        name = f"{spec.rstrip('/').rpartition('/')[2]}-{digest}"
        copies = downloads.of(spec.rstrip("/"), name, index["files"], config)
        copies.keep(name for name in index["files"] if not downloads.is_shard(name))
        return PackedFiles(copies.folder, index, copies.url)
    folder = local_path(spec)
    for name, (size, _) in index["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is missing"
            raise DataError(
                f"{path} {found}, and {size:,} bytes were packed; copy the set again, or pack it "
                "again"
            )
    return PackedFiles(folder, index, str(folder))


def refuse_existing(output: str) -> None:
    """Raise DataError where there is something at ``output``."""
    remote = is_remote(output)
    if RemoteFolder(output).exists(PACKED) if remote else local_path(output).exists():
        raise DataError(f"{output} exists; name another folder, or remove it")


@contextlib.contextmanager
def new_folder(output: str) -> Iterator[pathlib.Path]:
    """A folder whose files are at ``output`` when it is whole: there is never half a set.

    It is beside ``output``, with this host and process in its name. What a process of this host
    that was killed has left behind is removed. For a URL it is a temporary one, whose files are
    sent to the store: ``packed.json``, without which they are no set, last.

    Raises:
        DataError: ``output`` exists, or the disk refuses.
        StoreError: the store refuses.
    """
    if is_remote(output):
        with _new_in_store(output.rstrip("/")) as folder:
            yield folder
        return
    target = local_path(output).absolute()
    if not target.name or target.exists():
        raise DataError(f"{output} exists; name another folder, or remove it")
    host = socket.gethostname()
    partial = target.with_name(f"{target.name}.partial-{host}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_left_over(target.parent, f"{target.name}.partial-{host}-")
        partial.mkdir()
        try:
            yield partial
            for path in (*partial.rglob("*"), partial):
                _to_disk(path)
            os.rename(partial, target)
            _to_disk(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was first
            raise DataError(f"{output} exists; name another folder, or remove it") from None
        where = error.filename or output
        why = error.strerror or f"{error}; is there room?"  # NumPy's own error has no number
        raise DataError(f"{where} can't be written: {why}") from None


@contextlib.contextmanager
def _new_in_store(url: str) -> Iterator[pathlib.Path]:
    remote, host = RemoteFolder(url), socket.gethostname()
    remote.check_bucket()
    exists = DataError(f"{url} exists; name another folder, or remove it")
    if remote.exists(PACKED):
        raise exists
    started = f"{_PACKING}{host}-{os.getpid()}.txt"
    remote.write(started, b"jaxvlm data pack is making a set here\n")  # refused early, not late
    _refuse_others(remote, host, started)
    with tempfile.TemporaryDirectory(prefix="jaxvlm-pack-") as made:
        folder = pathlib.Path(made)
        try:
            yield folder
            names = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
            each(lambda name: remote.upload(folder / name, name), set(names) - {PACKED})
            sizes = {name: (folder / name).stat().st_size for name in names}
            found = {name: info["size"] for name, info in remote.files().items()}
            for name in set(names) - {PACKED}:
                if found.get(name) != sizes[name]:
                    raise DataError(f"{url}/{name} was not written as a whole; pack the data again")
            if not remote.create(PACKED, (folder / PACKED).read_bytes()):
                raise exists
        except OSError as error:
            where = error.filename or made
            raise DataError(
                f"{where} can't be written: {error.strerror or error}; TMPDIR names the folder "
                "that a set is made in before it is sent"
            ) from None
        finally:
            with contextlib.suppress(StoreError):  # it does not hide why nothing was packed
                remote.remove(started)


_PACKING = "packing-"


def _refuse_others(remote: RemoteFolder, host: str, started: str) -> None:
    """Refuse a folder where another process packs; marks of this host's dead ones are removed."""
    for name in remote.names(""):
        if not name.startswith(_PACKING) or name == started:
            continue
        of_here = re.fullmatch(re.escape(f"{_PACKING}{host}-") + r"(\d+)\.txt", name)
        if of_here and not is_alive(int(of_here[1])):
            remote.remove(name)
            continue
        remote.remove(started)
        raise DataError(
            f"{remote.url} is being packed by another process, or was by one that was killed; wait "
            f"for it, or remove {remote.url}/{name}"
        )


def _to_disk(path: pathlib.Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def seal(folder: pathlib.Path, index: dict[str, Any]) -> dict[str, Any]:
    """Write ``packed.json``, the last file of a set.

    Args:
        folder: holds all others.
        index: what it says besides the format, and size and digest of every file.

    Returns:
        What it says.
    """
    files = {
        str(path.relative_to(folder)): [path.stat().st_size, downloads.digest_of_file(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    index = {"format": FORMAT, **index, "files": files}
    text = json.dumps({"digest": digest_of(index), "index": index}, indent=1)
    (folder / PACKED).write_text(text)
    return index


def read_index(spec: str) -> dict[str, Any]:
    """Read ``packed.json``.

    Args:
        spec: folder or URL.

    Raises:
        DataError: it is missing, damaged, or of another format.
        StoreError: the store does not give it.
    """
    return _index(spec)[0]


def _index(spec: str) -> tuple[dict[str, Any], str]:
    """What ``packed.json`` says, and its digest."""
    where, tries = f"{spec.rstrip('/')}/{PACKED}", 1
    if is_remote(spec):
        tries += len(downloads.PAUSES)
    for left in reversed(range(tries)):
        try:
            document = json_text.parse(_bytes_of(spec))
            index, digest = document["index"], document["digest"]
            if index["format"] != FORMAT:
                raise DataError(
                    f"{where} is of format {index['format']}, and this jaxvlm reads {FORMAT}; pack "
                    "the data again with it"
                )
            if digest != digest_of(index):
                raise ValueError("its digest is another one")
            _check_files(index["files"])
            break
        except DataError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            if not left:
                raise DataError(
                    f"{where} is damaged: {type(error).__name__}: {error}; pack the data again"
                ) from None
            time.sleep(downloads.PAUSES[-left])
    return dict(index), str(digest)


_NAME = re.compile(r"[\w .+-]+(/[\w .+-]+)*")


def _check_files(files: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError where something is no file of a set's folder: stores are not ours."""
    for name, (size, digest) in dict(files).items():
        inside = _NAME.fullmatch(name) and not {".", ".."}.intersection(name.split("/"))
        if not inside or not isinstance(size, int) or size < 0 or not isinstance(digest, str):
            raise ValueError(f"it names the file {name!r} of {size!r} bytes")


def _bytes_of(spec: str) -> bytes:
    if not is_remote(spec):
        return (local_path(spec) / PACKED).read_bytes()

    try:
        check_scheme("data.train", spec, READ_KINDS)
        return RemoteFolder(spec).read(PACKED)
    except ConfigError as error:
        raise DataError(str(error)) from None
    except FileNotFoundError:
        raise DataError(
            f"{spec} has no {PACKED}: of stores, the sets that `jaxvlm data pack` makes are read, "
            f"and files of records by their names, such as {spec}/*.parquet"
        ) from None


def damaged(spec: str) -> Iterator[tuple[str, str]]:
    """Read every byte of a set: (file, what is wrong) of those that are not as they were packed."""
    files = read_index(spec)["files"]
    yield from _damaged_in_store(spec, files) if is_remote(spec) else _damaged_here(spec, files)


def _damaged_here(spec: str, files: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    folder = local_path(spec)
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            yield name, "missing"
        elif path.stat().st_size != size:
            yield name, f"{path.stat().st_size:,} bytes instead of {size:,}"
        elif downloads.digest_of_file(path) != digest:
            yield name, "other bytes"


def _damaged_in_store(spec: str, files: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    remote = RemoteFolder(spec)
    with tempfile.TemporaryDirectory(prefix="jaxvlm-verify-") as folder:

        def wrong(numbered: tuple[int, str]) -> str:
            number, name = numbered
            (size, digest), info = files[name], remote.info(name)
            if info is None:
                return "missing"
            if info["size"] not in (None, size):
                return f"{info['size']:,} bytes instead of {size:,}"
            copy = pathlib.Path(folder) / str(number)
            remote.download(name, copy, size, "set TMPDIR to a folder with room")
            found = downloads.digest_of_file(copy)
            copy.unlink()
            return "" if found == digest else "other bytes"

        every = list(enumerate(files))
        for (_, name), what in zip(every, concurrently(wrong, every), strict=True):
            if what:
                yield name, what


def digest_of(index: dict[str, Any]) -> str:
    """Hash of what ``packed.json`` says."""
    text = json.dumps(index, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
