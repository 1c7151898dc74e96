"""Data sets packed on disk, which a run opens without reading them: ``jaxvlm data pack``.

A folder holds ``packed.json`` (facts, what the set was packed for, and size and digest of every
file), arrays as ``.npy`` that are mapped into memory (token ids, loss masks, pieces, packed
sequences), images as they are in tar files, and the tokenizer. ``packed.json`` is written last.
"""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations import packed_files, packing, tokenize
from jaxvlm.data.conversations.content import (
    PACKED_TOKENIZER,
    Content,
    Facts,
    ModelInputs,
    is_remote,
)
from jaxvlm.data.conversations.mapped_arrays import Groups, Named, Spans, Strings, flat
from jaxvlm.data.conversations.piece_checksums import Checksums, holds, of_sequence
from jaxvlm.data.conversations.tokenize import Corpus
from jaxvlm.data.errors import DataError, ImageError, Part, Problem
from jaxvlm.data.images import image_files
from jaxvlm.data.sources.downloads import digest_of_file
from jaxvlm.data.sources.member_names import Member, as_video, is_video, shown
from jaxvlm.data.sources.tables import PACKED
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.stores.store_requests import concurrently
from jaxvlm.types import Span

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
        "format": packed_files.FORMAT,
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
            str(path.relative_to(folder)): [path.stat().st_size, digest_of_file(path)]
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }
    text = json.dumps({"digest": packed_files.digest_of(index), "index": index}, indent=1)
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
        spec: its folder, or its URL.
        config: data settings of the run.
        tokenizer: the run's.
        settings: what else the run's data depend on.

    Raises:
        DataError: it is damaged, or was packed for other settings.
        StoreError: a store does not give its files.
    """
    folder, index, where = packed_files.opened(spec, config)
    has_videos = bool(index["facts"].get("has_videos"))
    wanted = made_for(config, settings, tokenizer, has_videos)
    _check_settings(spec, index["made_for"], wanted, config)
    corpus, pieces, checksum = mapped(folder, where)
    known = _array(folder, "piece_checksum")

    def check(piece: int) -> None:
        if not holds(lambda: checksum.of_piece(piece), known, piece):
            raise _damaged(f"piece {piece}", spec, folder)

    content = Content(
        records=Named(Strings(*_mapped(folder, "id_start", "id"))),
        corpus=corpus,
        pieces=pieces,
        facts=Facts(**index["facts"]),
        tokens=int(index["tokens"]),
        parts=[
            Part(
                spec,
                index["total"],
                [Problem(*x) for x in index["left_out"]],
                f"jaxvlm data verify {spec}",
            )
        ],
        sequences=_CheckedSequences(spec, folder),
        check=check,
        each=concurrently if is_remote(spec) else map,
    )
    _probe(spec, folder, content, index["probes"], settings, tokenizer.image_id)
    return content


def mapped(folder: pathlib.Path, where: str) -> tuple[Corpus, packing.Pieces, Checksums]:
    """A set's corpus and pieces, on disk, and their checksums.

    Args:
        folder: of its arrays.
        where: what the names of its images begin with.
    """
    names = tuple(_mapped(folder, "path_start", "path"))
    corpus = Corpus(
        **{name: _array(folder, name) for name in (*_OF_CORPUS, "source")},
        images=Groups(*_mapped(folder, "images_of_record_start", "images_of_record")),
        paths=Strings(*names, prefix=f"{where}/"),
        spans=Spans(lambda name: _array(folder, name)),
    )
    pieces = packing.Pieces(
        images=Groups(*_mapped(folder, "images_of_piece_start", "images_of_piece")),
        **{name: _array(folder, f"piece_{name}") for name in _OF_PIECE},
    )
    return corpus, pieces, Checksums(corpus, pieces, Strings(*names))


def _damaged(what: str, spec: str, folder: pathlib.Path) -> DataError:
    """The error of what is not as it was packed; a copy of it is downloaded again."""
    copied = f"remove {folder}, from where it is copied again; "
    return DataError(
        f"{spec}: {what} is not as it was packed; {copied * is_remote(spec)}`jaxvlm data verify "
        f"{spec}` lists the damaged files"
    )


class _CheckedSequences(packing.Sequences):
    """Packed sequences of a set; raises DataError for one that is not as it was packed."""

    def __init__(self, spec: str, folder: pathlib.Path):
        super().__init__(*_mapped(folder, "sequence_piece", "sequence_start"))
        self._spec, self._folder = spec, folder
        self._checksum = _array(folder, "sequence_checksum")

    def __getitem__(self, index: int) -> np.ndarray:
        own = super().__getitem__(index)
        if not holds(lambda: of_sequence(own), self._checksum, index):
            raise _damaged(f"sequence {index}", self._spec, self._folder)
        return own


def _u32(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.uint32)


_DEFAULT = DataConfig()
OF_READING = (
    *(
        "image_root",
        "fetched",
        "column_mapping",
        "ignored_fields",
        "literal_markers",
        "tsv_quoting",
    ),
    "format",
)
"""Settings of how files are read; with a packed set they are for the evaluation data."""


def _check_settings(
    spec: str, packed: dict[str, Any], wanted: dict[str, Any], config: DataConfig
) -> None:
    for name in OF_READING:
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
    spec: str,
    folder: pathlib.Path,
    content: Content,
    images: Sequence[int],
    settings: ModelInputs,
    image_id: int,
) -> None:
    """Refuse a set whose images have other tokens than the run's model gives them."""
    count = settings.num_patches
    for image in images:
        try:
            path, known = content.corpus.paths[image], content.corpus.spans[image]
        except (LookupError, ValueError):
            raise _damaged(f"image {image}", spec, folder) from None
        try:
            found = count if isinstance(count, int) else count(path)
        except ImageError:
            continue  # the run skips or refuses its records
        span = Span.of(image_id, found) if isinstance(found, int) else found
        if Checksums.of_span(span) != Checksums.of_span(known):
            raise DataError(
                f"{spec}: {shown(path)} has {len(known.ids)} tokens there, and in this model "
                f"{len(span.ids)}, or others; pack the data again with this recipe (`jaxvlm data "
                f"verify {spec}` tells whether the set is damaged)"
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
