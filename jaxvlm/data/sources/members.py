"""Read images that lie inside of other files, or in their own name; see ``member_names``."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import pathlib

from jaxvlm.data.sources import array_records, columnar, downloads
from jaxvlm.data.sources.compressed import kind_of
from jaxvlm.data.sources.fields import BadItem
from jaxvlm.data.sources.member_names import DATA, Member, parse, shown


def read(path: str) -> bytes:
    """Read the bytes of a member, or of a ``data:`` URI.

    Raises:
        OSError: its file can't be read.
        ValueError: there is no such member, or its file changed since it was indexed.
    """
    if path.startswith(DATA):
        return _decoded(path)
    member = parse(path)
    if member is None:
        raise ValueError(f"{path!r} does not name an image inside of another file")
    if "://" in member.file:
        return downloads.read(member)
    if not os.path.isfile(member.file):
        raise ValueError(f"{member.file} is no regular file")
    kind = kind_of(pathlib.Path(member.file))
    read_from = {".parquet": columnar, ".arrow": columnar, ".array_record": array_records}.get(kind)
    return read_from.content(member) if read_from else _range(member)


def digest(path: str) -> bytes:
    """The hash that a member's name has of its bytes; b"" if it has none."""
    member = parse(path)
    return bytes.fromhex(member.digest) if member and len(member.digest) == 32 else b""


def text(name: str) -> str:
    """Read a member that is text.

    Raises:
        BadItem: it is not UTF-8, or can't be read.
    """
    try:
        return read(name).decode()
    except UnicodeDecodeError:
        raise BadItem("bytes that are not text in UTF-8", shown(name)) from None
    except (OSError, ValueError) as error:
        raise BadItem("can't be read", f"{shown(name)}: {error}") from None


def name_and_size(path: str) -> tuple[str, int]:
    """Return a member's name without folders, and its size in bytes; a ``data:`` URI's name is its
    digest."""
    if path.startswith(DATA):
        return hashlib.blake2b(path.encode(), digest_size=16).hexdigest(), len(path)
    member = parse(path)
    assert member is not None, path
    if member.digest:
        return f"{os.path.basename(member.name) or member.place}{member.digest}", member.size
    return os.path.basename(path), member.size


def _range(member: Member) -> bytes:
    """Bytes of a tar or an MDS shard, from an offset on."""
    first, data = int(member.place), b""
    with open(member.file, "rb") as file:
        # A name in a record may say any size; memory is only taken for what there is.
        if first + member.size <= os.fstat(file.fileno()).st_size:
            file.seek(first)
            data = file.read(member.size)
    if len(data) != member.size:
        raise ValueError("the file was truncated since it was indexed")
    if not member.holds(data):
        raise ValueError("its bytes are not those that were packed")
    return data


def _decoded(uri: str) -> bytes:
    head, comma, text = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError("a data: URI that is not base64")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a data: URI that is not base64: {error}") from None
