"""Data sets packed on disk, which a run opens without reading them: ``jaxvlm data pack``.

A folder holds ``packed.json`` (facts, what the set was packed for, and size and digest of every
file), arrays as ``.npy`` that are mapped into memory (token ids, loss masks, pieces, packed
sequences), images as they are in tar files, and the tokenizer. ``packed.json`` is written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import socket
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import DataConfig, json_text
from jaxvlm.data.conversations import packing, tokenize
from jaxvlm.data.conversations.content import (
    PACKED_TOKENIZER,
    Content,
    Facts,
    ModelInputs,
)
from jaxvlm.data.conversations.mapped_arrays import Groups, Named, Spans, Strings, flat
from jaxvlm.data.conversations.piece_checksums import Checksums, holds, of_sequence
from jaxvlm.data.conversations.tokenize import Corpus
from jaxvlm.data.errors import DataError, ImageError, Part, Problem
from jaxvlm.data.images import image_files
from jaxvlm.data.sources.member_names import Member, as_video, is_video, shown
from jaxvlm.data.sources.tables import PACKED
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.types import Span

FORMAT = 1
"""Of the folder; raised where an older jaxvlm could not read it."""
_PROBED = 16  # images, at most, whose tokens are counted again when a set is opened


def made_for(
    config: DataConfig, settings: ModelInputs, tokenizer: ChatTokenizer, has_videos: bool = False
) -> dict[str, Any]:
    """What the contents of a packed set are a function of, besides its records; JSON-able."""
    names = [
        *("max_length", "max_images_per_sequence", "packing", "share_images", "loss_turns"),
        *("max_pixels", "on_bad_record", "on_too_long"),
    ]
    if settings.patching:
        names.append("max_patches_per_sequence")
    count = settings.num_patches
    return {
        **{f"data.{name}": getattr(config, name) for name in names},
        "order_version": packing.ORDER_VERSION,
        "image_size": settings.image_size,
        "image_tokens": count if isinstance(count, int) else 0,
        "images": settings.prepare.fingerprint,
        "patches": list(settings.patching or ()),
        "visual_mask": settings.visual_mask,
        "tokenizer": tokenizer_digest(tokenizer),
    } | ({"videos": settings.prepare.video_fingerprint} if has_videos else {})


def tokenizer_digest(tokenizer: ChatTokenizer) -> str:
    """Hash of all that token ids follow from; it is the same for a copy that was saved and read."""
    backend = json.loads(tokenizer.backend.to_str())
    unread = ("truncation", "padding", "decoder", "version")  # for other calls than ours
    parts = {name: value for name, value in backend.items() if name not in unread}
    said = [parts, tokenizer.template, sorted(tokenizer.special.items()), list(tokenizer.style)]
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def new_folder(output: str) -> Iterator[pathlib.Path]:
    """A folder that is renamed to ``output`` when it is whole: there is never half a set.

    It is beside ``output``, with this host and process in its name. What a process of this host
    that was killed has left behind is removed.

    Raises:
        DataError: ``output`` exists, or the disk refuses.
    """
    target = pathlib.Path(output).expanduser().absolute()
    if not target.name or target.exists():
        raise DataError(f"{output} exists; name another folder, or remove it")
    host = socket.gethostname()
    partial = target.with_name(f"{target.name}.partial-{host}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(target, host)
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
        where = error.filename or output
        raise DataError(f"{where} can't be written: {error.strerror or error}") from None


def _remove_left_over(target: pathlib.Path, host: str) -> None:
    name = re.compile(re.escape(f"{target.name}.partial-{host}-") + r"(\d+)")
    for path in target.parent.iterdir():
        found = name.fullmatch(path.name)
        if found and not path.is_symlink() and not os.path.exists(f"/proc/{found[1]}"):
            shutil.rmtree(path, ignore_errors=True)


def _to_disk(path: pathlib.Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write(
    folder: pathlib.Path,
    content: Content,
    made: dict[str, Any],
    tokenizer: ChatTokenizer,
    config: DataConfig,
    shard_bytes: int,
) -> dict[str, Any]:
    """Write a set into an empty folder.

    Args:
        folder: exists, and is empty.
        content: what is packed.
        made: result of :func:`made_for`.
        tokenizer: that of the set's tokens.
        config: data settings.
        shard_bytes: size of a tar file of images, about.

    Returns:
        What ``packed.json`` says.

    Raises:
        DataError: an image can't be read any more, or has changed since its header was read.
        OSError: the disk is full, for instance.
    """
    sequences = packing.plan(content.pieces, config)
    used, corpus, pieces = _used(content, sequences), content.corpus, content.pieces
    paths = [""] * len(corpus.paths)  # those of records that are in no sequence have no file
    with _Shards(folder, shard_bytes) as shards:
        for number, image in enumerate(used):
            path = corpus.paths[image]
            try:
                paths[image] = shards.add(number, path)
            except ImageError as error:
                raise DataError(f"{shown(path)}: {error}; it could be read before") from None
    if tokenize.digest(corpus) != content.facts.digest:
        raise DataError("images changed while they were packed; pack the data again")
    ids = [content.records[i].id for i in corpus.source.tolist()]
    checksum = Checksums(corpus, pieces, paths)
    arrays = {
        **{name: getattr(corpus, name) for name in _OF_CORPUS},
        "source": np.arange(len(ids), dtype=np.int32),
        **flat("images_of_record", corpus.images),
        **flat("id", ids),
        **flat("path", paths),
        **Spans.arrays(corpus.spans),
        **{f"piece_{name}": getattr(pieces, name) for name in _OF_PIECE},
        **flat("images_of_piece", pieces.images),
        "piece_checksum": _u32(map(checksum.of_piece, range(len(pieces.num_tokens)))),
        "sequence_piece": sequences.piece,
        "sequence_start": sequences.start,
        "sequence_checksum": _u32(map(of_sequence, sequences)),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    tokenizer.save(folder / PACKED_TOKENIZER)
    index = {
        "format": FORMAT,
        "made_for": made,
        "facts": content.facts._asdict(),
        "records": len(ids),
        "total": sum(part.total for part in content.parts),
        "left_out": [list(problem) for part in content.parts for problem in part.problems],
        "images": len(used),
        "probes": _probes(corpus, used),
        "sequences": len(sequences),
        "tokens": int(pieces.num_tokens.sum()),
        "files": {
            str(path.relative_to(folder)): [path.stat().st_size, _digest(path)]
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }
    text = json.dumps({"digest": _digest_of(index), "index": index}, indent=1)
    (folder / PACKED).write_text(text)
    return index


_OF_CORPUS = ("tokens", "loss", "first", "last", "length")
"""Arrays of :class:`tokenize.Corpus`."""
_OF_PIECE = tuple(filter("images".__ne__, packing.Pieces._fields))
"""Arrays of :class:`packing.Pieces`."""


def open_set(
    spec: str, config: DataConfig, tokenizer: ChatTokenizer, settings: ModelInputs
) -> Content:
    """Open a packed set: its arrays stay on disk.

    Args:
        spec: its folder.
        config: data settings of the run.
        tokenizer: the run's.
        settings: what else the run's data depend on.

    Raises:
        DataError: it is damaged, or was packed for other settings.
    """
    folder = pathlib.Path(spec).expanduser()
    index = read_index(spec)
    has_videos = bool(index["facts"].get("has_videos"))
    wanted = made_for(config, settings, tokenizer, has_videos)
    _check_settings(spec, index["made_for"], wanted, config)
    for name, (size, _) in index["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is missing"
            raise DataError(
                f"{path} {found}, and {size:,} bytes were packed; copy the set again, or pack it "
                "again"
            )
    corpus, pieces, checksum = mapped(folder)
    known = _array(folder, "piece_checksum")

    def check(piece: int) -> None:
        if not holds(lambda: checksum.of_piece(piece), known, piece):
            raise DataError(_DAMAGED.format(what=f"piece {piece}", spec=spec))

    content = Content(
        records=Named(Strings(*_mapped(folder, "id_start", "id"))),
        corpus=corpus,
        pieces=pieces,
        facts=Facts(**index["facts"]),
        parts=[Part(spec, index["total"], [Problem(*x) for x in index["left_out"]])],
        sequences=_CheckedSequences(spec, folder),
        check=check,
    )
    _probe(spec, content, index["probes"], settings, tokenizer.image_id)
    return content


def mapped(folder: pathlib.Path) -> tuple[Corpus, packing.Pieces, Checksums]:
    """A set's corpus and pieces, on disk, and their checksums."""
    names = tuple(_mapped(folder, "path_start", "path"))
    corpus = Corpus(
        **{name: _array(folder, name) for name in (*_OF_CORPUS, "source")},
        images=Groups(*_mapped(folder, "images_of_record_start", "images_of_record")),
        paths=Strings(*names, prefix=f"{folder}/"),
        spans=Spans(lambda name: _array(folder, name)),
    )
    pieces = packing.Pieces(
        images=Groups(*_mapped(folder, "images_of_piece_start", "images_of_piece")),
        **{name: _array(folder, f"piece_{name}") for name in _OF_PIECE},
    )
    return corpus, pieces, Checksums(corpus, pieces, Strings(*names))


_DAMAGED = (
    "{spec}: {what} is not as it was packed; `jaxvlm data verify {spec}` lists the damaged files"
)


class _CheckedSequences(packing.Sequences):
    """Packed sequences of a set; raises DataError for one that is not as it was packed."""

    def __init__(self, spec: str, folder: pathlib.Path):
        super().__init__(*_mapped(folder, "sequence_piece", "sequence_start"))
        self._spec, self._checksum = spec, _array(folder, "sequence_checksum")

    def __getitem__(self, index: int) -> np.ndarray:
        own = super().__getitem__(index)
        if not holds(lambda: of_sequence(own), self._checksum, index):
            raise DataError(_DAMAGED.format(what=f"sequence {index}", spec=self._spec))
        return own


def _u32(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.uint32)


def read_index(spec: str) -> dict[str, Any]:
    """Read ``packed.json``.

    Raises:
        DataError: it is damaged, or of another format.
    """
    path = pathlib.Path(spec).expanduser() / PACKED
    try:
        document = json_text.read(path)
        index, digest = document["index"], document["digest"]
        if index["format"] != FORMAT:
            raise DataError(
                f"{path} is of format {index['format']}, and this jaxvlm reads {FORMAT}; pack the "
                "data again with it"
            )
        if digest != _digest_of(index):
            raise ValueError("its digest is another one")
    except DataError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}; pack the data again") from None
    return dict(index)


def damaged(spec: str) -> Iterator[tuple[str, str]]:
    """Read every byte of a set: (file, what is wrong) of those that are not as they were packed."""
    folder = pathlib.Path(spec).expanduser()
    for name, (size, digest) in read_index(spec)["files"].items():
        path = folder / name
        if not path.is_file():
            yield name, "missing"
        elif path.stat().st_size != size:
            yield name, f"{path.stat().st_size:,} bytes instead of {size:,}"
        elif _digest(path) != digest:
            yield name, "other bytes"


_DEFAULT = DataConfig()
_OF_READING = (
    *("image_root", "column_mapping", "ignored_fields", "literal_markers", "tsv_quoting"),
    "format",
)
"""Settings of how files are read; with a packed set they are for the evaluation data."""


def _check_settings(
    spec: str, packed: dict[str, Any], wanted: dict[str, Any], config: DataConfig
) -> None:
    for name in _OF_READING:
        if getattr(config, name) != getattr(_DEFAULT, name) and not config.eval:
            raise DataError(f"data.{name} is not read: {spec} is packed; leave it out")
    changed = [
        f"{name} {packed.get(name)!r} -> {wanted.get(name)!r}"
        for name in sorted(packed.keys() | wanted.keys())
        if packed.get(name) != wanted.get(name)
    ]
    if changed:
        raise DataError(
            f"{spec} was packed for other settings: {', '.join(changed)}; set them as they were, "
            "or pack the data again with this recipe"
            + _OTHER_TOKENIZER
            * (packed.get("tokenizer") != wanted["tokenizer"])
        )


_OTHER_TOKENIZER = (
    ". The tokenizer is that of the run's folder, config.tokenizer.path, the checkpoint or "
    "config.init_from: a run that was begun on other data keeps its own"
)


def _probes(corpus: Corpus, used: Sequence[int]) -> list[int]:
    """Some images of different spans, evenly chosen: what a run compares when it opens the set."""
    first: dict[int, int] = {}
    for image in used:
        first.setdefault(id(corpus.spans[image]), image)
    of_each = list(first.values())
    return of_each[:: -(-len(of_each) // _PROBED) or 1]


def _probe(
    spec: str, content: Content, images: Sequence[int], settings: ModelInputs, image_id: int
) -> None:
    """Refuse a set whose images have other tokens than the run's model gives them."""
    count = settings.num_patches
    for image in images:
        try:
            path, known = content.corpus.paths[image], content.corpus.spans[image]
        except (LookupError, ValueError):
            raise DataError(_DAMAGED.format(what=f"image {image}", spec=spec)) from None
        try:
            found = count if isinstance(count, int) else count(path)
        except ImageError:
            continue  # the run skips or refuses its records
        span = Span.of(image_id, found) if isinstance(found, int) else found
        if Checksums.of_span(span) != Checksums.of_span(known):
            raise DataError(
                f"{spec}: {shown(path)} has {len(known.ids)} tokens there, and in this model "
                f"{len(span.ids)}, or others; pack the data again with this recipe"
            )


def _used(content: Content, sequences: packing.Sequences) -> list[int]:
    """Images in the order in which packed sequences show them: they are read in runs."""
    images = (p for i in sequences.piece.tolist() for p in content.pieces.images[i])
    return list(dict.fromkeys(images))


class _Shards:
    """Tar files of about equal size, into which images are written one after another.

    Args:
        folder: where they are.
        size: of a file, about, in bytes.
    """

    def __init__(self, folder: pathlib.Path, size: int):
        self._folder, self._size = folder, size
        self._tar: tarfile.TarFile | None = None
        self._count = 0

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *error: object) -> None:
        if self._tar is not None:
            self._tar.close()

    def add(self, number: int, path: str) -> str:
        """Write an image as it is; returns its name (see ``member_names``), without the folder."""
        data, (own, _) = image_files.read_bytes(path), image_files.name_and_size(path)
        if self._tar is None or self._tar.offset > self._size:
            self.__exit__()
            self._name = f"images-{self._count:05d}.tar"
            self._tar = tarfile.TarFile(self._folder / self._name, "w", format=tarfile.PAX_FORMAT)
            self._count += 1
        info = tarfile.TarInfo(f"{number:09d}/{own}")
        info.size = len(data)
        place = self._tar.offset + len(
            info.tobuf(self._tar.format, self._tar.encoding or "utf-8", self._tar.errors)
        )
        self._tar.addfile(info, io.BytesIO(data))
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        name = str(Member(self._name, str(place), len(data), own, digest))
        return as_video(name) if is_video(path) else name


def _array(folder: pathlib.Path, name: str) -> np.ndarray:
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))


def _mapped(folder: pathlib.Path, *names: str) -> Iterator[np.ndarray]:
    return (_array(folder, name) for name in names)


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest_of(index: dict[str, Any]) -> str:
    text = json.dumps(index, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
