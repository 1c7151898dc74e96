"""Data sets packed on disk, which a run opens without reading them: ``jaxvlm data pack``.

A folder holds ``packed.json`` (facts, what the set was packed for, and size and digest of every
file), arrays as ``.npy`` that are mapped into memory (token ids, loss masks, pieces, packed
sequences), images as they are in tar files, and the tokenizer. ``packed.json`` is written last.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations import packing, tokenize
from jaxvlm.data.conversations.content import (
    PACKED_TOKENIZER,
    Content,
    Facts,
    ModelInputs,
    is_remote,
)
from jaxvlm.data.conversations.piece_checksums import Checksums, of_sequence
from jaxvlm.data.conversations.tokenize import Corpus
from jaxvlm.data.errors import DataError, Part, Problem
from jaxvlm.data.packed import checks, image_shards, packed_files
from jaxvlm.data.packed.checks import holds
from jaxvlm.data.packed.mapped_arrays import ArrayFiles, Spans, flat, save
from jaxvlm.data.sources.conversation_formats import Record
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.stores.store_requests import concurrently
from jaxvlm.types import Span


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
        "tokenizer": checks.tokenizer_digest(tokenizer),
    } | ({"videos": settings.prepare.video_fingerprint} if has_videos else {})


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
    paths = image_shards.write(folder, corpus.paths, used, shard_bytes)
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
    save(folder, arrays)
    tokenizer.save(folder / PACKED_TOKENIZER)
    index = {
        "made_for": made,
        "facts": content.facts._asdict(),
        "records": len(ids),
        "total": sum(part.total for part in content.parts),
        "left_out": [list(problem) for part in content.parts for problem in part.problems],
        "images": len(used),
        "probes": checks.probes(corpus.spans, used),
        "sequences": len(sequences),
        "tokens": int(pieces.num_tokens.sum()),
    }
    return packed_files.seal(folder, index)


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
    folder, index, where = packed_files.opened(spec, config, packed_files.CONVERSATIONS)
    has_videos = bool(index["facts"].get("has_videos"))
    wanted = made_for(config, settings, tokenizer, has_videos)
    checks.check_settings(spec, index["made_for"], wanted, config)
    corpus, pieces, checksum = mapped(spec, folder, where)
    known = ArrayFiles(spec, folder)["piece_checksum"]

    def check(piece: int) -> None:
        if not holds(lambda: checksum.of_piece(piece), known, piece):
            raise checks.damaged(f"piece {piece}", spec, folder)

    content = Content(
        records=_Named(ArrayFiles(spec, folder).strings("id")),
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
    count = settings.num_patches

    def measure(path: str) -> Span:
        found = count if isinstance(count, int) else count(path)
        return Span.of(tokenizer.image_id, found) if isinstance(found, int) else found

    checks.probe(spec, folder, corpus.paths, corpus.spans, index["probes"], measure)
    return content


def mapped(spec: str, folder: pathlib.Path, where: str) -> tuple[Corpus, packing.Pieces, Checksums]:
    """A set's corpus and pieces, on disk, and their checksums.

    Args:
        spec: its folder or URL.
        folder: of its arrays.
        where: what the names of its images begin with.
    """
    files = ArrayFiles(spec, folder)
    corpus = Corpus(
        **{name: files[name] for name in (*_OF_CORPUS, "source")},
        images=files.groups("images_of_record"),
        paths=files.strings("path", prefix=f"{where}/"),
        spans=files.spans(),
    )
    pieces = packing.Pieces(
        images=files.groups("images_of_piece"),
        **{name: files[f"piece_{name}"] for name in _OF_PIECE},
    )
    return corpus, pieces, Checksums(corpus, pieces, files.strings("path"))


class _Named(Sequence[Any]):
    """Records that have an id and nothing else."""

    def __init__(self, ids: Sequence[str]):
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        return Record(self._ids[index], (), ())


class _CheckedSequences(packing.Sequences):
    """Packed sequences of a set; raises DataError for one that is not as it was packed."""

    def __init__(self, spec: str, folder: pathlib.Path):
        files = ArrayFiles(spec, folder)
        super().__init__(files["sequence_piece"], files["sequence_start"])
        self._spec, self._folder = spec, folder
        self._checksum = files["sequence_checksum"]

    def __getitem__(self, index: int) -> np.ndarray:
        own = super().__getitem__(index)
        if not holds(lambda: of_sequence(own), self._checksum, index):
            raise checks.damaged(f"sequence {index}", self._spec, self._folder)
        return own


def _u32(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.uint32)


def _used(content: Content, sequences: packing.Sequences) -> list[int]:
    """Images in the order in which packed sequences show them: they are read in runs."""
    images = (p for i in sequences.piece.tolist() for p in content.pieces.images[i])
    return list(dict.fromkeys(images))
