"""Files inside of a tar, read where they lie: shards as webdataset writes them.

A member is named by one string, ``SHARD.tar::OFFSET+SIZE::NAME``, so that it can stand wherever a
picture's file can, and any thread or process reads it with one seek, without the archive's index.
"""

from __future__ import annotations

import pathlib
import re
import tarfile
from typing import NamedTuple

from jaxvlm.data.errors import DataError, Problem

_MEMBER = re.compile(r"(.+\.tar)::(\d+)\+(\d+)::.*", re.DOTALL)
_PARTS = re.compile(r"((?:.*/)?[^./][^.]*)\.([^/]+)", re.DOTALL)
"""A sample's key and its member's extension: at the first dot of the file's name, as webdataset."""


class Shard(NamedTuple):
    """What a tar holds."""

    samples: list[tuple[str, dict[str, str]]]
    """A sample's key, and by extension ("jpg", "query_image.png") its members."""
    members: dict[str, str]
    """A member's name in the tar -> the string that names it outside."""
    problems: list[Problem]


def is_member(path: str) -> bool:
    """Whether ``path`` names a file inside of a tar."""
    return "::" in path and _MEMBER.fullmatch(path) is not None


def size(path: str) -> int:
    """Bytes of a member."""
    found = _MEMBER.fullmatch(path)
    return int(found[3]) if found else 0


def read(path: str) -> bytes:
    """The bytes of a member.

    Raises:
        OSError: the tar can't be read.
        ValueError: it is shorter than it was.
    """
    found = _MEMBER.fullmatch(path)
    if found is None:
        raise ValueError(f"{path!r} names no file inside of a tar")
    first, size = int(found[2]), int(found[3])
    with open(found[1], "rb") as file:
        file.seek(first)
        data = file.read(size)
    if len(data) != size:
        raise ValueError("the tar is shorter than it was")
    return data


def index(path: pathlib.Path) -> Shard:
    """The samples of a tar; only its headers are read.

    Args:
        path: an uncompressed tar; members of one sample follow each other.

    Raises:
        DataError: the file is none.
    """
    shard = Shard([], {}, [])
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                _add(shard, path, info)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(
            f"{path}: not an uncompressed tar that can be read ({error}); a compressed one must be "
            "unpacked, since pictures are read from the middle of it"
        ) from None
    return shard


def _add(shard: Shard, path: pathlib.Path, info: tarfile.TarInfo) -> None:
    if info.isdir():
        return
    name = info.name.removeprefix("./")
    parts = _PARTS.fullmatch(name)
    reason = ""
    if not info.isreg() or info.issparse() or parts is None:
        reason = "a tar's member that is no plain file with an extension"
    else:
        key, extension = parts[1], parts[2].lower()
        if not shard.samples or shard.samples[-1][0] != key:
            shard.samples.append((key, {}))
        if extension in shard.samples[-1][1]:
            reason = "a tar's member that is there twice"
    if reason:
        shard.problems.append(Problem(f"{path.name}:{name}", reason))
        return
    member = f"{path}::{info.offset_data}+{info.size}::{name}"
    shard.samples[-1][1][extension] = shard.members[name] = member
