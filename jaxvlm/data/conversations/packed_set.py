"""Data sets packed on disk, which a run opens without reading them: ``jaxvlm data pack``.

A folder holds ``packed.json`` (facts, what the set was packed for, and size and digest of every
file), arrays as ``.npy`` that are mapped into memory (token ids, loss masks, pieces, packed
sequences), images as they are in tar files, and the tokenizer. ``packed.json`` is written last.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import pathlib
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxvlm.config import DataConfig, json_text
from jaxvlm.data.conversations import packing
from jaxvlm.data.conversations.content import (
    PACKED_TOKENIZER,
    Content,
    Facts,
    ModelInputs,
)
from jaxvlm.data.conversations.mapped_arrays import Groups, Named, Spans, Strings, flat
from jaxvlm.data.conversations.tokenize import Corpus
from jaxvlm.data.errors import DataError, ImageError, Part
from jaxvlm.data.images import image_files
from jaxvlm.data.sources.member_names import Member, shown
from jaxvlm.data.sources.tables import PACKED
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.types import Span

FORMAT = 1
"""Of the folder; raised where an older jaxvlm could not read it."""
_PROBED = 3  # images whose tokens are counted again when a set is opened


def made_for(config: DataConfig, settings: ModelInputs, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """What the contents of a packed set are a function of, besides its records; JSON-able."""
    names = ["max_length", "max_images_per_sequence", "packing", "share_images", "loss_turns"]
    if settings.patching:
        names.append("max_patches_per_sequence")
    return {
        **{f"data.{name}": getattr(config, name) for name in names},
        "order_version": packing.ORDER_VERSION,
        "image_size": settings.image_size,
        "images": settings.prepare.fingerprint,
        "visual_mask": settings.visual_mask,
        "tokenizer": tokenizer_digest(tokenizer),
    }


def tokenizer_digest(tokenizer: ChatTokenizer) -> str:
    """Hash of all that token ids follow from; it is the same for a copy that was saved and read."""
    backend = json.loads(tokenizer.backend.to_str())
    steps = {name: backend.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor")}
    vocabulary = sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items())
    ids = [tokenizer.image_id, tokenizer.pad_id, *tokenizer.stop_ids]
    merges = backend["model"].get("merges")
    text = json.dumps([steps, vocabulary, merges, tokenizer.template, ids], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def new_folder(output: str) -> Iterator[pathlib.Path]:
    """A folder beside ``output`` that is renamed to it when it is whole: there is never half a set.

    What another process left behind when it was killed is removed.

    Raises:
        DataError: ``output`` exists, another process packs to it, or the disk refuses.
    """
    target = pathlib.Path(output)
    partial = target.with_name(f"{target.name}.partial")
    if target.exists():
        raise DataError(f"{output} exists; name another folder, or remove it")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        held = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            raise DataError(f"another process packs to {output}; wait until it is done") from None
        try:
            _empty(partial)
            yield partial
            os.rename(partial, target)
        except BaseException:
            _empty(partial)
            partial.rmdir()
            raise
        finally:
            os.close(held)
    except OSError as error:
        where = error.filename or output
        raise DataError(f"{where} can't be written: {error.strerror or error}") from None


def _empty(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


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
        Numbers of what was packed, for people.

    Raises:
        DataError: an image changed since its header was read.
        OSError: the disk is full, for instance.
    """
    sequences = content.sequences or packing.plan(content.pieces, config)
    used, corpus, pieces = _used(content, sequences), content.corpus, content.pieces
    paths = [""] * len(corpus.paths)  # those of records that are in no sequence have no file
    with _Shards(folder, shard_bytes) as shards:
        for number, image in enumerate(used):
            paths[image] = shards.add(number, corpus.paths[image])
    ids = [content.records[i].id for i in corpus.source.tolist()]
    arrays = {
        "tokens": corpus.tokens,
        "loss": corpus.loss,
        "first": corpus.first,
        "last": corpus.last,
        "length": corpus.length,
        "checksum": np.asarray([_checksum(corpus, i) for i in range(len(ids))], np.uint32),
        "source": np.arange(len(ids)),
        **flat("images_of_record", corpus.images),
        **flat("id", ids),
        **flat("path", paths),
        **Spans.arrays(corpus.spans),
        **{f"piece_{name}": getattr(pieces, name) for name in _OF_PIECE},
        **flat("images_of_piece", pieces.images),
        "sequence_piece": sequences.piece,
        "sequence_start": sequences.start,
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    tokenizer.save(folder / PACKED_TOKENIZER)
    index = {
        "format": FORMAT,
        "made_for": made,
        "facts": content.facts._asdict(),
        "records": len(ids),
        "images": len(used),
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


_OF_PIECE = (
    *("start", "record", "first", "last", "length", "offset"),
    *("num_tokens", "num_images", "num_patches"),
)
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
    index = read_index(spec)
    _check_settings(spec, index["made_for"], made_for(config, settings, tokenizer), config)
    folder = pathlib.Path(spec)
    for name, (size, _) in index["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is missing"
            raise DataError(
                f"{path} {found}, and {size:,} bytes were packed; copy the set again, or pack it "
                "again"
            )
    corpus = _corpus(folder)
    pieces = packing.Pieces(
        images=Groups(*_mapped(folder, "images_of_piece_start", "images_of_piece")),
        **{name: _array(folder, f"piece_{name}") for name in _OF_PIECE},
    )
    sequences = packing.Sequences(*_mapped(folder, "sequence_piece", "sequence_start"))
    total = index["records"]
    part = Part(spec, total, [], f"jaxvlm data verify {spec}")
    checksum = _array(folder, "checksum")

    def check(record: int) -> None:
        if _checksum(corpus, record) != checksum[record]:
            raise DataError(
                f"{spec}: tokens of record {records[record].id} are not those that were packed; "
                f"`jaxvlm data verify {spec}` lists the damaged files"
            )

    records = Named(Strings(*_mapped(folder, "id_start", "id")))
    facts = Facts(**index["facts"])
    content = Content(records, corpus, pieces, facts, [part], sequences, check)
    _probe(spec, content, settings, tokenizer.image_id)
    return content


def read_index(spec: str) -> dict[str, Any]:
    """Read ``packed.json``.

    Raises:
        DataError: it is damaged, or of a newer jaxvlm.
    """
    path = pathlib.Path(spec) / PACKED
    try:
        document = json_text.read(path)
        index, digest = document["index"], document["digest"]
        if digest != _digest_of(index):
            raise ValueError("its digest is another one")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}; pack the data again") from None
    if index["format"] != FORMAT:
        raise DataError(
            f"{path} is of format {index['format']}, and this jaxvlm reads {FORMAT}; pack the data "
            "again with it"
        )
    return dict(index)


def damaged(spec: str) -> Iterator[tuple[str, str]]:
    """Read every byte of a set: (file, what is wrong) of those that are not as they were packed."""
    folder = pathlib.Path(spec)
    for name, (size, digest) in read_index(spec)["files"].items():
        path = folder / name
        if not path.is_file():
            yield name, "missing"
        elif path.stat().st_size != size:
            yield name, f"{path.stat().st_size:,} bytes instead of {size:,}"
        elif _digest(path) != digest:
            yield name, "other bytes"


def _check_settings(
    spec: str, packed: dict[str, Any], wanted: dict[str, Any], config: DataConfig
) -> None:
    for name in ("image_root", "column_mapping", "ignored_fields"):
        if getattr(config, name):
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
        )


def _probe(spec: str, content: Content, settings: ModelInputs, image_id: int) -> None:
    """Refuse a set whose images have other tokens than the run's model gives them."""
    corpus, pieces, count = content.corpus, content.pieces, settings.num_patches
    for piece in range(min(_PROBED, len(pieces.num_tokens))):
        for image in pieces.images[piece][:1]:
            path, known = corpus.paths[image], corpus.spans[image].ids
            try:
                found = count if isinstance(count, int) else count(path)
            except ImageError:
                continue  # the run skips or refuses its records
            ids = Span.of(image_id, found).ids if isinstance(found, int) else found.ids
            if not np.array_equal(ids, known):
                raise DataError(
                    f"{spec}: {shown(path)} has {len(known)} tokens there, and {len(ids)} in this "
                    "model; pack the data again with this recipe"
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
        return str(Member(self._name, str(place), len(data), own, digest))


def _corpus(folder: pathlib.Path) -> Corpus:
    return Corpus(
        **{name: _array(folder, name) for name in ("tokens", "loss", "first", "last", "length")},
        images=Groups(*_mapped(folder, "images_of_record_start", "images_of_record")),
        paths=Strings(*_mapped(folder, "path_start", "path"), prefix=f"{folder}/"),
        spans=Spans(lambda name: _array(folder, name)),
        source=_array(folder, "source"),
    )


def _array(folder: pathlib.Path, name: str) -> np.ndarray:
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))


def _mapped(folder: pathlib.Path, *names: str) -> Iterator[np.ndarray]:
    return (_array(folder, name) for name in names)


def _checksum(corpus: Corpus, record: int) -> int:
    own = slice(int(corpus.first[record]), int(corpus.last[record]))
    return zlib.crc32(corpus.loss[own].tobytes(), zlib.crc32(corpus.tokens[own].tobytes()))


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest_of(index: dict[str, Any]) -> str:
    text = json.dumps(index, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
