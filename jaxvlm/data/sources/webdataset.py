"""Read members of tar shards, as webdataset writes them, in place: with one seek."""

from __future__ import annotations

import pathlib
import re
import tarfile
from typing import IO, NamedTuple

from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.sources.member_names import Member

_CHUNK = 1 << 20
_PARTS = re.compile(r"((?:.*/)?[^./][^.]*)\.([^/]+)", re.DOTALL)
"""A sample's key and its member's extension, split at the first dot of the file's name as in
webdataset."""


class TarShard(NamedTuple):
    """Index of a tar shard."""

    samples: list[tuple[str, dict[str, str]]]
    """Key of each sample, and its members by extension ("jpg", "query_image.png")."""
    members: dict[str, str]
    """A member's name in the tar -> its name as an image, see ``member_names``."""
    problems: list[Problem]
    """Members that can't be used."""


def index(path: pathlib.Path) -> TarShard:
    """Index the samples of a tar; only its headers are read.

    Args:
        path: an uncompressed tar; the members of a sample are adjacent.

    Raises:
        DataError: the file is not an uncompressed tar, or not a whole one.
    """
    shard = TarShard([], {}, [])
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                _add(shard, path, info)
            end = tar.offset
        with path.open("rb") as file:
            _check_end(path, file, end)
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path}: can't be read as an uncompressed tar ({error}); decompress a compressed one, "
            "since images are read from the middle of it"
        ) from None
    return shard


def _check_end(path: pathlib.Path, file: IO[bytes], end: int) -> None:
    """Refuse a tar in which Python's reader found no more headers before the end: it takes anything
    that is no header, and the end of the file, for the end."""
    file.seek(end)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise DataError(f"{path}: the tar has no end: it was cut off; make the file again")
    while block:
        if block.strip(b"\0"):
            raise DataError(
                f"{path}: from byte {end:,} on there is neither a header nor the tar's end: it is "
                "damaged, or several were joined by `cat`; make the file again, or name several "
                "tars by a pattern"
            )
        block = file.read(_CHUNK)


def _add(shard: TarShard, path: pathlib.Path, info: tarfile.TarInfo) -> None:
    if info.isdir():
        return
    name = info.name.removeprefix("./")
    parts = _PARTS.fullmatch(name)
    reason = ""
    if not info.isreg() or info.issparse() or parts is None:
        reason = "a tar member that is not a regular file with an extension"
    else:
        key, extension = parts[1], parts[2].lower()
        if not shard.samples or shard.samples[-1][0] != key:
            shard.samples.append((key, {}))
        if extension in shard.samples[-1][1]:
            reason = "a tar member that occurs twice"
    if reason:
        shard.problems.append(Problem(f"{path.name}:{name}", reason))
        return
    member = str(Member(str(path), str(info.offset_data), info.size, name))
    shard.samples[-1][1][extension] = shard.members[name] = member
