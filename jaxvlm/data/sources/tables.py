"""Read files of records with named fields: JSON, JSON lines, CSV, Parquet, and tar shards."""

from __future__ import annotations

import glob
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxvlm.config import DataConfig, json_text
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.sources import conversation_formats, delimited, webdataset
from jaxvlm.data.sources.conversation_formats import DEFAULT
from jaxvlm.data.sources.fields import BadItem

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif")
"""File extensions of images in a tar."""


class Raw(NamedTuple):
    """A record as read from its file."""

    where: str
    """``file:line``, or a sample's key in a tar."""
    fields: Any
    """Dict of names and values, if the record is well-formed."""
    locate: Callable[[str], str]
    """Function of an image's name in the record that returns its file."""
    task: str
    """The file's name if several files are read; else ""."""


def read(spec: str, config: DataConfig = DEFAULT) -> tuple[list[Raw], list[Problem]]:
    """Read the records of a file, or of all files that match a pattern, in the order of names.

    Args:
        spec: ``FILE.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet`` or ``.tar``; or a pattern
            such as ``shards/*.tar``.
        config: data settings; of these, ``image_root`` and ``pairs.tsv_quoting`` are read.

    Returns:
        Records, and a Problem for each that can't be read.

    Raises:
        DataError: a file as a whole can't be used.
    """
    paths = _paths(spec)
    base = pathlib.Path(os.path.commonpath([path.parent for path in paths]))
    records: list[Raw] = []
    problems: list[Problem] = []
    for path in paths:
        root = _root(path, config)
        name = str(path.relative_to(base)) if len(paths) > 1 else ""
        kind = path.suffix.lower()
        reader = _quoted_tsv if kind == ".tsv" and config.pairs.tsv_quoting else READERS[kind]
        raw, bad = reader(path, root)
        # Files with the same name in several folders must not share their records' ids.
        prefix = f"{path.parent.relative_to(base)}/" if path.parent != base else ""
        records += [r._replace(where=prefix + r.where, task=name) for r in raw]
        problems += [p._replace(id=prefix + p.id) for p in bad]
    if not records and not problems:
        raise DataError(f"{spec}: contains no record; give a file with at least one example")
    return records, problems


def _paths(spec: str) -> list[pathlib.Path]:
    path = pathlib.Path(spec).expanduser()
    paths = [path] if path.is_file() else [pathlib.Path(p) for p in sorted(glob.glob(str(path)))]
    known = ", ".join(READERS)
    if not spec or not paths:
        raise DataError(f"{spec or '(empty name)'}: no such file; give one of {known}")
    for path in paths:
        if path.suffix.lower() not in READERS or not path.is_file():
            raise DataError(f"{path}: not a file of examples; give one of {known}")
    return paths


def _root(path: pathlib.Path, config: DataConfig) -> pathlib.Path:
    """Folder that the image names of the file ``path`` are relative to."""
    return pathlib.Path(config.image_root).expanduser() if config.image_root else path.parent


def _plain(root: pathlib.Path) -> Callable[[str], str]:
    return lambda name: str(root / name)


def raw_records(items: list[tuple[str, Any]], spec: str, config: DataConfig) -> list[Raw]:
    """Records that a format of the user's own gave; images are relative as in :func:`read`."""
    locate = _plain(_root(pathlib.Path(spec), config))
    return [Raw(where, item, locate, "") for where, item in items]


def _json(path: pathlib.Path, root: pathlib.Path) -> tuple[list[Raw], list[Problem]]:
    items, problems = conversation_formats.items_of(path)
    locate = _plain(root)
    return [Raw(where, item, locate, "") for where, item in items], problems


def _csv(path: pathlib.Path, root: pathlib.Path) -> tuple[list[Raw], list[Problem]]:
    items, problems = delimited.read(path)
    return [Raw(where, item, _plain(root), "") for where, item in items], problems


def _quoted_tsv(path: pathlib.Path, root: pathlib.Path) -> tuple[list[Raw], list[Problem]]:
    items, problems = delimited.read(path, tsv_quoting=True)
    return [Raw(where, item, _plain(root), "") for where, item in items], problems


def _parquet(path: pathlib.Path, root: pathlib.Path) -> tuple[list[Raw], list[Problem]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path}: Parquet needs pyarrow; run `pip install 'jaxvlm[parquet]'`"
        ) from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: can't be read as Parquet: {error}") from None
    locate = _plain(root)
    return [Raw(f"{path.name}[{i}]", row, locate, "") for i, row in enumerate(rows)], []


def _tar(path: pathlib.Path, root: pathlib.Path) -> tuple[list[Raw], list[Problem]]:
    """Read a tar shard: a sample's ``json`` has fields; other files are the field they name."""
    shard = webdataset.index(path)
    problems = list(shard.problems)

    def locate(name: str) -> str:
        member = name if webdataset.is_member(name) else shard.members.get(name.removeprefix("./"))
        return member or str(root / name)

    records = []
    for key, members in shard.samples:
        where = f"{path.name}:{key}"
        try:
            records.append(Raw(where, _sample(members), locate, ""))
        except BadItem as bad:
            problems.append(Problem(where, bad.reason, bad.detail))
    return records, problems


def _sample(members: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a sample; images stay in the tar."""
    fields: dict[str, Any] = {}
    if "json" in members:
        try:
            fields = json_text.parse(webdataset.read(members["json"]))
        except (ValueError, OSError) as error:
            raise BadItem("not JSON", str(error)) from None
        if not isinstance(fields, dict):
            raise BadItem("not a JSON object")
    named = {text for value in fields.values() for text in _strings(value)}
    for extension, member in members.items():
        name, _, kind = extension.rpartition(".")
        file = member.rsplit("::", 1)[1]
        if extension == "json" or file in named:
            continue
        field = name or extension
        if field in fields:
            raise BadItem("a field both in the sample's json and in a file", extension)
        if kind in IMAGES:
            fields[field] = member
        elif kind == "txt":
            try:
                fields[field] = webdataset.read(member).decode("utf-8")
            except (ValueError, OSError):
                raise BadItem("not UTF-8", file) from None
        else:
            fields[extension] = member  # refused, unless it is among the ignored fields
    return fields


def _strings(value: Any) -> list[str]:
    """List all strings in a field's value."""
    if isinstance(value, str):
        return [value.removeprefix("./")]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [text for v in value for text in _strings(v)] if isinstance(value, list) else []


READERS: dict[str, Callable[[pathlib.Path, pathlib.Path], tuple[list[Raw], list[Problem]]]] = {
    ".jsonl": _json,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".tar": _tar,
}
"""File extension -> reader."""
