"""Names of images that lie inside of other files, or in their own name.

A member of a tar or MDS shard, a cell of a Parquet or Arrow table, or a value of an ArrayRecord is
named by one string, ``FILE::PLACE+SIZE::NAME``, the last two with ``@DIGEST`` after its size. A
``data:`` URI is its own content. Both can be used wherever the name of an image file can, and any
thread or process reads them without the file's index. A name that ends in ``::video`` is read as a
video.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from jaxvlm.data.errors import printable

_FILE = r".+?\.(?i:tar|mds|parquet|arrow|array_record(?:-\d+-of-\d+)?)"
_MEMBER = re.compile(rf"({_FILE})::([^:+@]+)\+(\d{{1,18}})(?:@([0-9a-f]+))?::(.*)", re.DOTALL)
DATA = "data:"
_VIDEO = "::video"
_LONGEST = 1_000
"""Characters of a name in a message."""


class Member(NamedTuple):
    """An image inside of another file."""

    file: str
    place: str
    """Where it is: the offset in a shard, ``GROUP.ROW/COLUMN/...`` in a table."""
    size: int
    """Bytes."""
    name: str = ""
    """What it is called there; "" has none."""
    digest: str = ""
    """Hash of its bytes, by which another image in its place is found; "" if not known."""

    def holds(self, data: bytes) -> bool:
        """Whether these are its bytes, as far as its name says."""
        known = not self.digest or digest_of(data).hex() == self.digest
        return len(data) == self.size and known

    def __str__(self) -> str:
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.file}::{self.place}+{self.size}{digest}::{self.name}"


def digest_of(data: bytes) -> bytes:
    """Hash of bytes, 16 bytes, by which equal ones are told from others."""
    return hashlib.blake2b(data, digest_size=16).digest()


class InFile(str):
    """A member's name in a record of the file that it lies in: an image, or bytes of a text.

    Its file's name is whole, and it is no text itself.
    """

    __slots__ = ()


def named_in(
    same: dict[bytes, str], file: str, place: str, data: bytes, keys: Sequence[str], name: str = ""
) -> str:
    """The name of the member that has some bytes first.

    Args:
        same: digest of bytes -> the member that has them first.
        file: that they are in.
        place: of the record in it.
        data: the bytes.
        keys: the path to them in the record.
        name: what they are called there.
    """
    digest = digest_of(data)
    if digest not in same:
        where = "/".join([place, *(quote(key, safe="") for key in keys)])
        same[digest] = InFile(Member(file, where, len(data), name, digest.hex()))
    return same[digest]


def as_video(path: str) -> str:
    """The name by which what ``path`` names is read as a video, and not as an image."""
    return path if is_video(path) else type(path)(path + _VIDEO)


def is_video(path: str) -> bool:
    """Whether a name says that a video is read; see :func:`as_video`."""
    return path.endswith(_VIDEO)


def bare(path: str) -> str:
    """A name without the mark of a video: a file's can be opened."""
    return type(path)(path.removesuffix(_VIDEO))


def parse(path: str) -> Member | None:
    """Return what the name of a member says; ``None`` if it names a file or is a ``data:`` URI."""
    path = bare(path)
    match = _MEMBER.fullmatch(path) if "::" in path else None
    return Member(match[1], match[2], int(match[3]), match[5], match[4] or "") if match else None


def local_path(spec: str) -> pathlib.Path:
    """Path of a file or folder of this machine, which may be given as ``file:///path``."""
    return pathlib.Path(spec.removeprefix("file://")).expanduser()


def is_remote(spec: str) -> bool:
    """Whether the name of data is a URL of something that is not on this machine."""
    return "://" in spec and not spec.startswith("file://")


def is_file(path: str) -> bool:
    """Whether a name is neither a member's nor a ``data:`` URI."""
    return not path.startswith(DATA) and parse(path) is None


def with_file(path: str, change: Callable[[str], str]) -> str:
    """A name with ``change`` of its file's; a ``data:`` URI has none."""
    end = path[len(bare(path)) :]
    if member := parse(path):
        return str(member._replace(file=change(member.file))) + end
    return change(bare(path)) + end if is_file(path) else path


def shown(path: str) -> str:
    """A name for messages: a ``data:`` URI, or what no file system would take, is cut."""
    path = bare(path)
    most = 40 if path.startswith(DATA) else _LONGEST
    return printable(f"{path[:40]}… ({len(path):,} characters)" if len(path) > most else path)
