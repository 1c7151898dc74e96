"""Read files of records with named fields: JSON, CSV, Parquet, Arrow, ArrayRecord, tar shards."""

from __future__ import annotations

import glob
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxvlm.config import DataConfig, json_text
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.sources import (
    array_records,
    columnar,
    delimited,
    json_files,
    mds,
    members,
    remote_files,
    webdataset,
)
from jaxvlm.data.sources.compressed import kind_of
from jaxvlm.data.sources.fields import BadItem, is_empty
from jaxvlm.data.sources.member_names import InFile, local_path, with_file
from jaxvlm.data.sources.remote_images import RemoteImages, is_bucket

DEFAULT = DataConfig()
IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif")
"""File extensions of images in a tar."""
VIDEOS = (
    *("mp4", "webm", "mkv", "mov", "avi", "m4v", "mpg", "mpeg", "ts", "flv", "ogv", "wmv"),
    *("3gp", "asf", "m2ts", "mts"),
)
"""File extensions of videos in a tar."""

PACKED = "packed.json"
"""File in the folder of a packed set that says what it holds; see `jaxvlm data pack`."""


Root = pathlib.Path | RemoteImages
"""What image names are relative to."""


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


class Reading(NamedTuple):
    """What the readers of files need beside a file."""

    config: DataConfig
    texts: Collection[str]
    """Fields that are text, also where a cell of a CSV looks like JSON."""
    same: dict[bytes, str]
    """Digest of an image's bytes -> the member that has them first, of all files."""

    def is_text(self, column: str) -> bool:
        """Whether a column is a field of text."""
        return dict(self.config.column_mapping).get(column, column) in self.texts


def each(
    spec: str,
    config: DataConfig = DEFAULT,
    named: Iterable[str] = (),
    texts: Collection[str] = (),
) -> Iterator[Raw | Problem]:
    """Read the records of a file, of all files that match a pattern in the order of their names, or
    of a folder that Hugging Face's ``save_to_disk`` or MosaicML Streaming wrote.

    Args:
        spec: ``FILE.jsonl``, ``.json``, ``.csv`` or ``.tsv``, each also with ``.gz`` or ``.zst``;
            ``.parquet``, ``.arrow``, ``.tar``, ``.mds`` or ``.array_record``; a pattern such as
            ``shards/*.tar``; or a folder. At URLs, files and patterns: see ``remote_files``.
        config: data settings; of these, ``image_root``, ``tsv_quoting``, ``column_mapping`` and
            ``download_dir`` are read.
        named: names of other sources, for messages.
        texts: fields that are text, also where a cell of a CSV looks like JSON.

    Yields:
        Records, one at a time where the file allows it, and a Problem for each that can't be read.

    Raises:
        DataError: a file as a whole can't be used.
    """
    own_root = ""
    if remote_files.is_files(spec):
        own_root, spec = spec.rpartition("/")[0], remote_files.local(spec, config)
    remote = _remote_images(own_root, config)
    paths = _paths(spec, named)
    base = pathlib.Path(os.path.commonpath([path.parent for path in paths]))
    is_set = paths[0].parent == pathlib.Path(spec).expanduser()  # its files are no tasks
    reading, is_empty_set = Reading(config, texts, {}), True
    for path in paths:
        root = remote or _root(path, config)
        name = str(path.relative_to(base)) if len(paths) > 1 and not is_set else ""
        # Files with the same name in several folders must not share their records' ids.
        prefix = f"{path.parent.relative_to(base)}/" if path.parent != base else ""
        for found in READERS[kind_of(path)](path, root, reading):
            is_empty_set = False
            if isinstance(found, Problem):
                yield found._replace(id=prefix + found.id)
            else:
                yield found._replace(where=prefix + found.where, task=name)
    if remote:
        remote.copy()
    if is_empty_set:
        raise DataError(f"{spec}: contains no record; give a file with at least one")


def _paths(spec: str, named: Iterable[str]) -> list[pathlib.Path]:
    path = local_path(spec)
    if "://" in spec and not spec.startswith("file://"):
        raise DataError(
            f"{spec}: of stores, files are read here, or patterns of them; a set that `jaxvlm data "
            "pack` made is read by training alone: name the file that it was packed from. Copy "
            "other data to this machine, or mount them (a PersistentVolume, a FUSE mount of the "
            "bucket)"
        )
    if path.name == PACKED:
        raise DataError(f"{spec}: name the folder of the packed set, {path.parent}")
    if spec and (path / PACKED).is_file():
        raise DataError(
            f"{spec} is packed, and holds what a run trains on, not its records; name the file "
            "that it was packed from"
        )
    if spec and path.is_dir():
        return mds.shards(path) if (path / mds.INDEX).is_file() else _saved_to_disk(path)
    paths = [path] if path.is_file() else [pathlib.Path(p) for p in sorted(glob.glob(str(path)))]
    known = ", ".join((*READERS, *named))
    if not spec or not paths:
        raise DataError(
            f"{spec or '(empty name)'}: no such file; give one of {known}, the first four also as "
            ".gz or .zst; a pattern such as shards/*.tar, in which [ is written [[]; or a folder "
            "of save_to_disk or MDS"
        )
    for path in paths:
        if kind_of(path) not in READERS or not path.is_file():
            raise DataError(f"{path}: not a file of records; give one of {known}")
    return paths


def _saved_to_disk(folder: pathlib.Path) -> list[pathlib.Path]:
    """Files of a data set of Hugging Face's, in their order. Source: its arrow_dataset.py."""
    if (folder / "dataset_dict.json").is_file():
        names = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise DataError(f"{folder} has a folder for each split; give one: {', '.join(names)}")
    try:
        state = json_text.parse((folder / "state.json").read_bytes())
        paths = [folder / str(file["filename"]) for file in state["_data_files"]]
    except FileNotFoundError:
        raise DataError(
            f"{folder} is a folder without the state.json of Hugging Face's save_to_disk, the "
            f"{mds.INDEX} of MDS or the {PACKED} of a packed set; give a file, or a pattern such "
            f"as {folder}/*.parquet"
        ) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder}: its state.json can't be read: {error}") from None
    for path in paths:
        if not path.is_file() or path.parent != folder or kind_of(path) != ".arrow":
            raise DataError(
                f"{folder}: state.json names {path.name}, which is no .arrow file there"
            )
    if not paths:
        raise DataError(f"{folder}: contains no record; give a data set with at least one")
    return paths


def renamed(
    fields: Mapping[str, Any], mapping: Mapping[str, str], of_tar: Mapping[str, str]
) -> dict[str, Any]:
    """Rename a record's fields, by the settings' mapping first.

    Raises:
        BadItem: two of them, that say different things, get one name; or the value of one can't be
            read.
    """
    out: dict[str, Any] = {}
    for column, value in fields.items():
        name = mapping.get(column, of_tar.get(column, column))
        if isinstance(value, BadItem):
            raise value
        if name in out and not is_empty(value) and not is_empty(out[name]) and out[name] != value:
            raise BadItem(f"two columns for '{name}'", column)
        out[name] = value if is_empty(out.get(name)) else out[name]
    return out


class Columns:
    """The settings' ``column_mapping``, and whether records have its columns.

    Args:
        spec: the file, or a pattern of files.
        config: data settings.
    """

    def __init__(self, spec: str, config: DataConfig):
        self.names = dict(config.column_mapping)
        """Column -> field."""
        self._spec, self._missing, self._first = spec, set(self.names), list[str]()

    def add(self, fields: Mapping[str, Any]) -> None:
        """Look at a record's columns."""
        self._missing -= fields.keys()
        self._first = self._first or sorted(fields)

    def check(self) -> None:
        """Refuse a column that no record has; raises DataError."""
        missing = [column for column in self.names if column in self._missing]
        if missing and self._first:
            raise DataError(
                f"{self._spec}: data.column_mapping names {missing[0]!r}, which no record has; the "
                f"columns are {', '.join(self._first)}"
            )


def _root(path: pathlib.Path, config: DataConfig) -> pathlib.Path:
    """Folder that the image names of the file ``path`` are relative to."""
    return pathlib.Path(config.image_root).expanduser() if config.image_root else path.parent


def _remote_images(own: str, config: DataConfig) -> RemoteImages | None:
    """The images in a bucket that names are relative to, if any.

    Args:
        own: folder of the files of records, or its URL.
        config: data settings.
    """
    url = config.image_root or own
    return RemoteImages(url, config) if is_bucket(url) else None


def _plain(root: Root) -> Callable[[str], str]:
    def path(name: str) -> str:
        if isinstance(root, RemoteImages):
            return name if os.path.isabs(name) else str(root.path(name))
        return str(root / name)

    return lambda name: str(name) if isinstance(name, InFile) else with_file(name, path)


def raw_records(items: Iterable[tuple[str, Any]], spec: str, config: DataConfig) -> Iterator[Raw]:
    """Records that a format of the user's own gave; images are relative as in :func:`each`."""
    remote = _remote_images(spec.rpartition("/")[0], config)
    locate = _plain(remote or _root(pathlib.Path(spec), config))
    for where, item in items:
        yield Raw(where, item, locate, "")
    if remote:
        remote.copy()


def _json(path: pathlib.Path, root: Root, reading: Reading) -> Iterator[Raw | Problem]:
    return _located(json_files.read(path), root)


def _csv(path: pathlib.Path, root: Root, reading: Reading) -> Iterator[Raw | Problem]:
    return _located(delimited.read(path, reading.config.tsv_quoting, reading.is_text), root)


def _located(items: Iterable[tuple[str, Any] | Problem], root: Root) -> Iterator[Raw | Problem]:
    locate = _plain(root)
    for item in items:
        yield item if isinstance(item, Problem) else Raw(*item, locate, "")


def _rows(path: pathlib.Path, root: Root, reading: Reading) -> Iterator[Raw | Problem]:
    return _records(path, root, columnar.rows(path, reading.same))


def _tar(path: pathlib.Path, root: Root, reading: Reading) -> Iterator[Raw | Problem]:
    """Read a tar shard: a sample's ``json`` has fields; other files are the field they name."""
    shard = webdataset.index(path)
    plain = _plain(root)
    mapping = dict(reading.config.column_mapping)

    def locate(name: str) -> str:
        return shard.members.get(name.removeprefix("./")) or plain(name)

    yield from shard.problems
    for key, of_sample in shard.samples:
        where = f"{path.name}:{key}"
        try:
            yield Raw(where, _sample(of_sample, mapping), locate, "")
        except BadItem as bad:
            yield Problem(where, bad.reason, bad.detail)


def _mds(path: pathlib.Path, root: Root, reading: Reading) -> Iterator[Raw | Problem]:
    return _records(path, root, mds.samples(path))


def _array_record(path: pathlib.Path, root: Root, reading: Reading) -> Iterator[Raw | Problem]:
    return _records(path, root, array_records.records(path, reading.same, reading.is_text))


def _records(
    path: pathlib.Path, root: Root, rows: Iterable[dict[str, Any] | BadItem]
) -> Iterator[Raw | Problem]:
    locate = _plain(root)
    for i, fields in enumerate(rows):
        if isinstance(fields, BadItem):
            yield Problem(f"{path.name}[{i}]", fields.reason, fields.detail)
        else:
            yield Raw(f"{path.name}[{i}]", fields, locate, "")


def _sample(of_sample: Mapping[str, str], mapping: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a sample; images stay in the tar."""
    fields: dict[str, Any] = {}
    if "json" in of_sample:
        try:
            fields = json_text.parse(members.read(of_sample["json"]))
        except (ValueError, OSError) as error:
            raise BadItem("not JSON", str(error)) from None
        if not isinstance(fields, dict):
            raise BadItem("not a JSON object")
    named = set(_images({mapping.get(name, name): value for name, value in fields.items()}))
    for extension, member in of_sample.items():
        name, _, kind = extension.rpartition(".")
        file = member.rsplit("::", 1)[1]
        if extension == "json" or file in named:
            continue
        field = name or extension
        if field in fields:
            raise BadItem("a field both in the sample's json and in a file", extension)
        if kind in IMAGES or kind in VIDEOS:
            fields[field] = InFile(member)
        elif kind == "txt":
            try:
                fields[field] = members.read(member).decode("utf-8")
            except (ValueError, OSError):
                raise BadItem("not UTF-8", file) from None
        else:
            fields[extension] = InFile(member)  # a text; others are refused, unless ignored
    return fields


def _images(value: Any, is_image: bool = False) -> Iterator[str]:
    """All strings of a sample that can name an image or a video, by their fields."""
    if isinstance(value, str) and is_image:
        yield value.removeprefix("./")
    elif isinstance(value, list):
        for one in value:
            yield from _images(one, is_image)
    elif isinstance(value, dict):
        part = is_image or value.get("type") in ("image", "image_url", "video", "video_url")
        for name, one in value.items():
            yield from _images(one, part or "image" in str(name) or "video" in str(name))


Reader = Callable[[pathlib.Path, Root, Reading], Iterator[Raw | Problem]]
READERS: dict[str, Reader] = {
    ".jsonl": _json,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".tar": _tar,
    ".mds": _mds,
    ".array_record": _array_record,
    ".parquet": _rows,
    ".arrow": _rows,
}
"""File extension -> reader."""
