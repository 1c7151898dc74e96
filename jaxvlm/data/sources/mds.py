"""Read shards of MosaicML Streaming (MDS); images and bytes stay in the shard.

A shard has, in little-endian u32: the number of samples, the offset of each sample and of the end.
A sample has the size of each column whose size is not fixed, and then the columns. ``index.json``
in its folder says which columns there are. Source: mosaicml/streaming,
streaming/base/format/mds/reader.py and encodings.py.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import json_text
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources.fields import BadItem
from jaxvlm.data.sources.member_names import InFile, Member

INDEX = "index.json"
_IN_PLACE = ("bytes", "jpeg", "png")
"""Encodings of whole files."""
_U32 = np.dtype("<u4")


class _Shard(NamedTuple):
    """What an index says of a shard."""

    names: list[str]
    encodings: list[str]
    sizes: list[int | None]
    """Bytes of each column; ``None``: each sample says it."""
    bytes: int
    """Size of the file."""


def shards(folder: pathlib.Path) -> list[pathlib.Path]:
    """List the shards of a folder in the order of its index.

    Raises:
        DataError: the index can't be read, or a shard is missing or compressed.
    """
    paths = [folder / name for name in _index(folder)]
    for path in paths:
        if not path.is_file():
            packed = sorted(x.name for x in folder.glob(f"{path.name}.*"))
            why = f"is compressed ({packed[0]}); decompress it there" if packed else "is missing"
            raise DataError(f"{folder}: the shard {path.name} that {INDEX} names {why}")
    if not paths:
        raise DataError(f"{folder}: contains no record; give a data set with at least one")
    return paths


def samples(path: pathlib.Path) -> Iterator[dict[str, Any] | BadItem]:
    """Read a shard's samples, with names of members (see ``member_names``) in place of bytes.

    Args:
        path: the shard, with its index in the same folder.

    Returns:
        Fields of each sample, or why it can't be read.

    Raises:
        DataError: the shard as a whole can't be read.
    """
    shard = _index(path.parent).get(path.name)
    if shard is None:
        raise DataError(f"{path}: not in {INDEX} of its folder")
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    offsets = _offsets(data) if len(data) == shard.bytes else None
    if offsets is None:
        raise DataError(f"{path}: truncated or changed: not the {shard.bytes:,} bytes of {INDEX}")
    for begin, end in itertools.pairwise(offsets.tolist()):
        try:
            yield _sample(shard, str(path), data[begin:end], begin)
        except BadItem as bad:
            yield bad


def _offsets(data: np.ndarray) -> np.ndarray | None:
    """Offsets of a shard's samples and of its end; ``None`` if they can't be."""
    if len(data) < 8:
        return None
    count = int(data[:4].view(_U32)[0])
    ends = data[4 : 8 + 4 * count]
    if len(ends) != 4 * (count + 1):
        return None
    offsets = ends.view(_U32).astype(np.int64)
    return None if offsets[-1] != len(data) or (np.diff(offsets) < 0).any() else offsets


def _sample(shard: _Shard, path: str, data: np.ndarray, begin: int) -> dict[str, Any]:
    unknown = sum(size is None for size in shard.sizes)
    own = iter(data[: 4 * unknown].view(_U32).tolist())
    sizes = [next(own, 0) if size is None else size for size in shard.sizes]
    at, fields = 4 * unknown, {}
    if at + sum(sizes) != len(data):
        raise BadItem("a sample that is damaged")
    for name, encoding, size in zip(shard.names, shard.encodings, sizes):
        kind = encoding.partition(":")[0]
        if kind in _IN_PLACE:
            fields[name] = InFile(Member(path, str(begin + at), size)) if size else ""
        else:
            fields[name] = _decoded(name, kind, data[at : at + size].tobytes())
        at += size
    return fields


def _decoded(name: str, encoding: str, data: bytes) -> Any:
    decode = _decoder(encoding)
    if decode is None:  # raw pixels, arrays, and pickles, which run code
        return BadItem(  # refused where the field is not ignored
            "a column of MDS in an encoding that jaxvlm does not read; write images as jpeg or png",
            f"{name}: {encoding}",
        )
    try:
        return decode(data)
    except (ValueError, IndexError) as error:
        raise BadItem("a sample that is damaged", f"{name}: {error}") from None


_ENCODINGS: Mapping[str, Callable[[bytes], Any]] = {
    "str": bytes.decode,
    "json": json_text.parse,
    "str_int": int,
    "str_float": float,
    "str_decimal": bytes.decode,
}
"""Encoding -> what it stands for, but for numbers."""
_NUMBERS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)


def _decoder(encoding: str) -> Callable[[bytes], Any] | None:
    """What reads values of an encoding; ``None`` if nothing does."""
    name = "int64" if encoding == "int" else encoding
    if name not in _NUMBERS:
        return _ENCODINGS.get(encoding)
    return lambda data: np.frombuffer(data, np.dtype(name).newbyteorder("<"))[0].item()


def _index(folder: pathlib.Path) -> dict[str, _Shard]:
    """Name of each shard, and what the index says of it."""
    try:
        index = json_text.parse((folder / INDEX).read_bytes())
        if index["version"] != 2 or any(one["format"] != "mds" for one in index["shards"]):
            raise DataError(f"{folder / INDEX}: not of MDS, version 2")
        return {
            str(one["raw_data"]["basename"]): _Shard(
                [str(name) for name in one["column_names"]],
                [str(encoding) for encoding in one["column_encodings"]],
                [None if size is None else int(size) for size in one["column_sizes"]],
                int(one["raw_data"]["bytes"]),
            )
            for one in index["shards"]
        }
    except DataError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder / INDEX}: can't be read as MDS's: {error}") from None
