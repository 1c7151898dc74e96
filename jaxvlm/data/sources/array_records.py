"""Read ArrayRecord files, as Grain, MaxText and TensorFlow Datasets have them.

A record is a ``tf.train.Example`` or a JSON object; images in an Example stay in the file. Their
place is ``RECORD/FEATURE/INDEX``. Source: tensorflow/core/example/feature.proto and example.proto.
"""

from __future__ import annotations

import functools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from jaxvlm.config import json_text
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources.fields import BadItem
from jaxvlm.data.sources.member_names import Member, named_in

_AT_ONCE = 256
"""Records that are in memory at once while a file is indexed."""


def records(
    path: pathlib.Path, same: dict[bytes, str], is_text: Callable[[str], bool] = lambda name: False
) -> Iterator[dict[str, Any] | BadItem]:
    """Read a file's records, with names of members (see ``member_names``) in place of bytes.

    Args:
        path: the file.
        same: digest of bytes -> the member that has them first, of all files that are read.
        is_text: whether a feature is text, also where it looks like JSON.

    Returns:
        Fields of each record, or why it can't be read.

    Raises:
        DataError: array_record is missing, or the file is damaged.
    """
    try:
        from array_record.python import array_record_module

        _example()
    except ImportError:
        raise DataError(f"{path}: run `pip install array_record protobuf` to read it") from None
    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        if not reader.ok():
            raise ValueError("it is none, or damaged")
        count = reader.num_records()
        for first in range(0, count, _AT_ONCE):
            for i, data in enumerate(reader.read(first, min(first + _AT_ONCE, count)), first):
                try:
                    yield _fields(data, _File(str(path), i, same, is_text))
                except BadItem as bad:
                    yield bad
    except (RuntimeError, ValueError, IndexError, OSError) as error:
        raise DataError(f"{path}: can't be read as ArrayRecord: {_short(error)}") from None


def content(member: Member) -> bytes:
    """Read the bytes of an image.

    Raises:
        OSError: the file can't be read.
        ValueError: there is no such image, or the file changed since it was indexed.
    """
    changed = "the file changed since it was indexed"
    number, *keys = member.place.split("/")
    try:
        name, index = unquote(keys[0]), int(keys[1])
        example = _parsed(_readers().read(member.file, int(number)))
        value = bytes(example.features.feature[name].bytes_list.value[index])
    except (RuntimeError, LookupError, ValueError) as error:
        raise ValueError(f"{changed} ({_short(error)})") from None
    if not member.holds(value):
        raise ValueError(changed)
    return value


class _File(NamedTuple):
    """Where a record is, and how it is read."""

    path: str
    number: int
    same: dict[bytes, str]
    is_text: Callable[[str], bool]


def _fields(data: bytes, of: _File) -> dict[str, Any]:
    if data[:1] == b"{":
        try:
            fields = json_text.parse(data)
            if isinstance(fields, dict):
                return fields
        except ValueError as error:
            raise BadItem("not JSON", str(error)) from None
    try:
        features = _parsed(data).features.feature
    except ValueError:
        raise BadItem("a record that is neither JSON nor a tf.train.Example") from None
    out = {}
    for name, feature in sorted(features.items()):
        kind = feature.WhichOneof("kind")
        values = list(getattr(feature, kind).value) if kind else []
        if kind == "bytes_list":
            values = [_text_or_member(x, of, name, i) for i, x in enumerate(values)]
        if values:
            out[name] = values if len(values) > 1 else values[0]
    return out


def _text_or_member(data: bytes, of: _File, name: str, index: int) -> Any:
    """Text, the JSON that it is, or the name of the member that has these bytes first."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" not in text:
        is_json = (text[:1], text[-1:]) in (("[", "]"), ("{", "}"))
        if is_json and not of.is_text(name):
            try:
                return json_text.parse(text)
            except ValueError:
                return text
        return text
    return named_in(of.same, of.path, str(of.number), data, (name, str(index)))


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


@functools.cache
def _example() -> Any:
    """The class of ``tf.train.Example``, in a pool of its own: TensorFlow's has it too."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="jaxvlm_example.proto", syntax="proto3")
    file.package = "jaxvlm"
    kinds = descriptor_pb2.FieldDescriptorProto
    lists = {"BytesList": kinds.TYPE_BYTES, "FloatList": kinds.TYPE_FLOAT}
    lists["Int64List"] = kinds.TYPE_INT64
    for name, kind in lists.items():
        values = file.message_type.add(name=name)
        values.field.add(name="value", number=1, type=kind, label=kinds.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    fields = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}
    for number, (name, of) in enumerate(fields.items(), 1):
        own = feature.field.add(name=name, number=number, type=kinds.TYPE_MESSAGE)
        own.type_name, own.label, own.oneof_index = f".jaxvlm.{of}", kinds.LABEL_OPTIONAL, 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    value = entry.field.add(name="value", number=2, type=kinds.TYPE_MESSAGE)
    value.type_name, value.label = ".jaxvlm.Feature", kinds.LABEL_OPTIONAL
    every = features.field.add(name="feature", number=1, type=kinds.TYPE_MESSAGE)
    every.type_name, every.label = ".jaxvlm.Features.FeatureEntry", kinds.LABEL_REPEATED
    example = file.message_type.add(name="Example")
    only = example.field.add(name="features", number=1, type=kinds.TYPE_MESSAGE)
    only.type_name, only.label = ".jaxvlm.Features", kinds.LABEL_OPTIONAL
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("jaxvlm.Example"))


def _parsed(data: bytes) -> Any:
    """A record as a ``tf.train.Example``; raises ValueError."""
    from google.protobuf.message import DecodeError

    try:
        example = _example().FromString(data)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    if not example.features.feature:
        raise ValueError("no features")
    return example


class _Readers:
    """Open files; any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def read(self, path: str, number: int) -> bytes:
        """Read a record."""
        status = os.stat(path)
        with self._lock:  # a reader is of one thread at a time
            reader = _open(path, status.st_size, status.st_mtime_ns)
            return bytes(reader.read([number])[0])


@functools.cache
def _readers() -> _Readers:
    return _Readers()


@functools.lru_cache(maxsize=64)
def _open(path: str, size: int, modified: int) -> Any:
    """Open a file; ``size`` and ``modified`` tell a changed file from the one before."""
    from array_record.python import array_record_module

    options = "readahead_buffer_size:0,max_parallelism:0"
    return array_record_module.ArrayRecordReader(path, options)
