"""Pack records into sequences: which records share an image, and which share a sequence.

A *piece* is the unit of packing and is never split: one record, or a shared prefix (text up to
the last image) with the records that continue from it. A piece consists of segments, runs of
consecutive tokens; the shared prefix is the parent of the others, which attend to it and not to
each other. Sequences are packed once; :class:`SequenceOrder` is their order over training steps, a
function of (seed, step, batch size) and nothing else. All functions here are pure.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations.tokenize import Corpus
from jaxvlm.data.errors import TooFewRecords
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.sources.member_names import is_video

OPEN_SEQUENCES = 8  # sequences that packing keeps open for further pieces
_UNBOUNDED = 2**62

NEAR = 4
"""Sets of images among whose pieces the order is random, so that a sequence is not of one image."""
ORDER_VERSION = 2
"""In the fingerprint of a run: raised where the order of the same records changes."""
_WORD = 2**64 - 1
_ROUNDS = 8
_SETS, _PIECES = 0x5A, 0x0D  # tags of the streams of hashes


class Pieces(NamedTuple):
    """Pieces and their segments in flat arrays; ``start[i]:start[i+1]`` are those of piece i."""

    start: Int64[np.ndarray, " pieces+1"]
    """First segment of each piece."""
    record: Int32[np.ndarray, " segments"]
    """The record that the segment belongs to; -1 for a shared prefix."""
    first: Int64[np.ndarray, " segments"]
    """Index in the corpus of the segment's first token."""
    last: Int64[np.ndarray, " segments"]
    """Index in the corpus of the segment's last token, plus one."""
    length: Int32[np.ndarray, " segments"]
    """Tokens in a packed sequence, those of images included."""
    offset: Int32[np.ndarray, " segments"]
    """Position id of the first token: where the parent ended, so that sharing changes no result."""
    images: Sequence[tuple[int, ...]]
    """For each piece: indices into the corpus's paths."""
    num_tokens: Int32[np.ndarray, " pieces"]
    """Tokens of each piece, those of images included."""
    num_images: Int32[np.ndarray, " pieces"]
    """Image slots that each piece takes: one for each tile."""
    num_patches: Int32[np.ndarray, " pieces"]
    """Patches of images of any size; 0 if all images have the same size."""


class Limits(NamedTuple):
    """Capacity of a packed sequence."""

    max_length: int
    """Maximum number of tokens."""
    max_images: int
    """Maximum number of images, or of their tiles."""
    max_patches: int = 0
    """Maximum number of patches of images of any size; 0 is no limit."""
    per_token: int = 0
    """Patches that become one visual token; 0 if all images have the same size."""

    def exceeded(self, corpus: Corpus, record: int) -> tuple[str, str]:
        """Explain why a record fits no sequence: (reason, detail), both empty if it fits."""
        tokens, images = int(corpus.length[record]), corpus.images[record]
        patches = self.patches(corpus, images)
        smaller = "; data.image_pixels_range makes images smaller" if patches else ""
        if any(is_video(corpus.paths[p]) for p in images):
            smaller = "; data.video.max_tokens or num_frames shows less of a video"
        if tokens > self.max_length:
            detail = f"{tokens} tokens"
            detail += f", {patches // self.per_token} of them images'" if patches else ""
            return f"longer than data.max_length={self.max_length}", detail + smaller
        if (tiles := count_tiles(corpus, images)) > self.max_images:
            detail = f"{len(images)} images"
            detail += f" of {tiles} tiles" if tiles != len(images) else ""
            detail += smaller if "video" in smaller else ""
            return f"more than data.max_images_per_sequence={self.max_images} images", detail
        if patches > self.max_patches > 0:
            detail = f"{patches} patches{smaller}"
            return f"more than data.max_patches_per_sequence={self.max_patches} patches", detail
        return "", ""

    def patches(self, corpus: Corpus, images: tuple[int, ...]) -> int:
        """Count the patches of images of any size; 0 if all images have the same size."""
        if not self.per_token:
            return 0
        return self.per_token * sum(int((corpus.spans[p].tile > 0).sum()) for p in images)


def limits_of(config: DataConfig, patching: Patching | None = None) -> Limits:
    """Read the capacity of a packed sequence from the settings.

    Args:
        config: data settings.
        patching: how images of any size are cut into patches; ``None`` if all have the same size.
    """
    per_token = patching.per_token if patching else 0
    return Limits(
        config.max_length,
        config.max_images_per_sequence,
        config.max_patches_per_sequence,
        per_token,
    )


def build_pieces(
    corpus: Corpus,
    image_id: int,
    limits: Limits,
    share: bool,
) -> tuple[Pieces, list[tuple[int, str, str]]]:
    """Group records with a common prefix into pieces; split groups that exceed a sequence.

    Args:
        corpus: tokenized records.
        image_id: id of the image token.
        limits: capacity of a packed sequence.
        share: whether records with the same leading images share them.

    Returns:
        Pieces that each fit into a sequence, in the order of their first record; and
        (record, reason, detail) of the records that fit no sequence.
    """
    groups: dict[tuple, list[int]] = {}
    shared: dict[tuple, int] = {}
    problems: list[tuple[int, str, str]] = []
    prefixes = _prefixes(corpus, image_id) if share else np.zeros(len(corpus.length), np.int64)
    for i, (images, prefix) in enumerate(zip(corpus.images, prefixes.tolist())):
        reason, detail = limits.exceeded(corpus, i)
        if reason:
            problems.append((i, reason, detail))
        else:
            begin = int(corpus.first[i])
            head = corpus.tokens[begin : begin + prefix].tobytes()
            name = (images, head) if prefix else (i,)
            groups.setdefault(name, []).append(i)
            shared[name] = prefix
    builder = _Builder(corpus, limits)
    for name, members in groups.items():
        builder.add(members, shared[name])
    return builder.pieces(), problems


def count_tiles(corpus: Corpus, images: tuple[int, ...]) -> int:
    """Count the tiles of some images; an image that is not cut into tiles counts as one."""
    return sum(len(corpus.spans[p].starts) for p in images)


def _prefixes(corpus: Corpus, image_id: int) -> Int64[np.ndarray, " records"]:
    """Length of each record's sharable prefix: tokens up to its last image, an image being one.

    0 if the record has no image, or if the loss begins within the prefix or at the token right
    after it: the first token of a child segment has no preceding token of its own segment that
    could predict it.
    """
    out = np.zeros(len(corpus.first), np.int64)
    prefix_of: dict[int, int] = {}
    for i, (first, last) in enumerate(zip(corpus.first.tolist(), corpus.last.tolist())):
        if first not in prefix_of:
            places = np.flatnonzero(corpus.tokens[first:last] == image_id)
            prefix = int(places[-1]) + 1 if len(places) else 0
            clear = first + prefix < last and not corpus.loss[first : first + prefix + 1].any()
            prefix_of[first] = prefix if clear else 0
        out[i] = prefix_of[first]
    return out


class _Builder:
    """Collect segments piece by piece."""

    def __init__(self, corpus: Corpus, limits: Limits):
        self.corpus, self.limits = corpus, limits
        self.start = array.array("q", [0])
        self.segments = array.array("q")  # five numbers each
        self.images: list[tuple[int, ...]] = []
        # Fast to index, as lists are, and a quarter of their memory.
        self.first, self.last, self.length = (
            array.array("q", x.tolist()) for x in (corpus.first, corpus.last, corpus.length)
        )

    def add(self, members: list[int], prefix: int) -> None:
        """Add records that share ``prefix`` tokens, split to respect ``max_length``."""
        images = self.corpus.images[members[0]]
        spans = [self.corpus.spans[p] for p in images]
        head = prefix + sum(len(span.ids) - 1 for span in spans)
        position = prefix + sum(span.advance - 1 for span in spans)
        pending: list[int] = []
        used = head
        for i in members:
            rest = self.length[i] - head
            if pending and used + rest > self.limits.max_length:
                self._close(pending, prefix, head, position, images)
                pending, used = [], head
            pending.append(i)
            used += rest
        self._close(pending, prefix, head, position, images)

    def _close(
        self, records: list[int], prefix: int, head: int, position: int, images: tuple
    ) -> None:
        if len(records) == 1:  # nothing is shared: one segment is equivalent
            prefix = head = position = 0
        else:
            begin = self.first[records[0]]
            self.segments.extend((-1, begin, begin + prefix, head, 0))
        for i in records:
            first, last = self.first[i] + prefix, self.last[i]
            self.segments.extend((i, first, last, self.length[i] - head, position))
        self.start.append(len(self.segments) // 5)
        self.images.append(images)

    def pieces(self) -> Pieces:
        table = np.asarray(self.segments, np.int64).reshape(-1, 5).T
        start = np.asarray(self.start, np.int64)
        total = np.concatenate([[0], np.cumsum(table[3])])
        return Pieces(
            start=start,
            record=table[0].astype(np.int32),
            first=table[1],
            last=table[2],
            length=table[3].astype(np.int32),
            offset=table[4].astype(np.int32),
            images=tuple(self.images),
            num_tokens=(total[start[1:]] - total[start[:-1]]).astype(np.int32),
            num_images=np.asarray([count_tiles(self.corpus, p) for p in self.images], np.int32),
            num_patches=np.asarray(
                [self.limits.patches(self.corpus, p) for p in self.images], np.int32
            ),
        )


def bucket(count: int, step: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16 ... times ``step`` that is at least ``count``."""
    size = -(-count // step)
    power = 1 << max(size - 1, 0).bit_length()
    return step * (power * 3 // 4 if 4 * size <= 3 * power and power > 2 else power)


def buckets(max_length: int, count: int) -> tuple[int, ...]:
    """Choose bucket lengths of sequences: multiples of 8, each about 1.6 times the one before.

    Returns:
        Up to ``count`` lengths, ascending; the last is ``max_length`` itself.
    """
    lengths = {max_length}
    for i in range(1, max(count, 1)):
        lengths.add(min(max_length, -(-int(max_length / 1.6**i) // 8) * 8))
    return tuple(sorted(lengths))


class Sequences:
    """Packed sequences in two flat arrays.

    Attributes:
        piece: pieces, those of a sequence one after another.
        start: ``start[i]:start[i+1]`` are those of sequence i.
    """

    def __init__(self, piece: Int32[np.ndarray, " n"], start: Int64[np.ndarray, " ends"]):
        self.piece, self.start = piece, start

    def __len__(self) -> int:
        return len(self.start) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """i32[k] pieces of a sequence, in its order."""
        return self.piece[self.start[index] : self.start[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.__getitem__, range(len(self)))


def pack(order: Int[np.ndarray, " n"], pieces: Pieces, config: DataConfig) -> Sequences:
    """Pack pieces first-fit into ``OPEN_SEQUENCES`` open sequences; a new one closes the oldest.

    Args:
        order: pieces, each once.
        pieces: sizes of all pieces.
        config: capacity of a packed sequence; with ``packing`` off each piece is one.

    Returns:
        Sequences, in which every piece of ``order`` is once.
    """
    if not config.packing:
        return Sequences(order.astype(np.int32), np.arange(len(order) + 1))
    limits = limits_of(config)
    closed: list[list[int]] = []
    opened: list[list[int]] = []
    remaining: list[list[int]] = []  # tokens, images and patches left in each open sequence
    capacity = [limits.max_length, limits.max_images, limits.max_patches or _UNBOUNDED]
    sizes = (x[order].tolist() for x in (pieces.num_tokens, pieces.num_images, pieces.num_patches))
    for piece, tokens, images, patches in zip(order.tolist(), *sizes):
        for sequence, left in zip(opened, remaining):
            if tokens <= left[0] and images <= left[1] and patches <= left[2]:
                sequence.append(piece)
                left[:] = left[0] - tokens, left[1] - images, left[2] - patches
                break
        else:
            if len(opened) == OPEN_SEQUENCES:
                closed.append(opened.pop(0))
                remaining.pop(0)
            opened.append([piece])
            remaining.append([capacity[0] - tokens, capacity[1] - images, capacity[2] - patches])
    closed += opened
    counts = np.asarray([len(sequence) for sequence in closed], np.int64)
    flat = np.fromiter(itertools.chain.from_iterable(closed), np.int32, len(order))
    return Sequences(flat, np.concatenate([[0], np.cumsum(counts)]))


def mixed(x: Any) -> Any:
    """Hash 64-bit numbers, a ``u64`` array or one ``int`` (the finalizer of splitmix64,
    doi:10.1145/2660193.2660195). Unlike NumPy's, it is the same in every version of a library."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _WORD
    return x ^ x >> 31


def permuted(place: int, count: int, *key: int) -> int:
    """Where a random permutation of ``range(count)`` has a place, computed without the others.

    A Feistel network permutes the next power of four; it is walked until it is back in the range
    (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).

    Args:
        place: of the range.
        count: its length.
        key: numbers that name the permutation.
    """
    salt = 0
    for number in key:
        salt = mixed(salt ^ (number & _WORD))
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for number in range(_ROUNDS):
            left, right = right, left ^ (mixed(salt + (number << half) + right) & low)
        place = left << half | right
        if place < count:
            return place


def plan(pieces: Pieces, config: DataConfig) -> Sequences:
    """Pack all pieces, once for all passes, in an order that depends on nothing but them.

    Pieces of the same images stay near each other, so that they are in one row of the batch. Where
    sequences have several pieces, these are mixed with those of ``NEAR`` sets of images.

    Args:
        pieces: all pieces.
        config: capacity of a packed sequence.
    """
    every = np.arange(len(pieces.num_tokens))
    sets: dict[tuple[int, ...], int] = {}
    number = [sets.setdefault(pieces.images[i] or (-1 - i,), len(sets)) for i in every.tolist()]
    place = np.argsort(np.argsort(_hashes(len(sets), _SETS), kind="stable"))
    near = place[np.asarray(number, np.int64)] // (NEAR if config.packing else 1)
    return pack(every[np.lexsort((_hashes(len(every), _PIECES), near))], pieces, config)


def _hashes(count: int, tag: int) -> np.ndarray:
    return mixed(np.arange(count, dtype=np.uint64) ^ np.uint64(mixed(tag)))


class PackedSequence(NamedTuple):
    """One packed sequence of a batch."""

    pieces: np.ndarray
    """i32[k]: pieces in the sequence's order; empty is padding."""
    pass_: int = 0
    """Number of complete passes over the sequences of its row before this one."""
    row: int = -1
    """Index of the sequence in the global batch; -1 in evaluation."""


EMPTY = PackedSequence(np.zeros(0, np.int32))


class SequenceOrder:
    """An endless order of packed training sequences, with random access by step.

    Row r of a batch of B has a B-th of the sequences, from a place on that the seed decides. Each
    of its passes over them has an order of its own, and begins when the one before is over, whether
    or not those of other rows are.

    Args:
        pieces: all pieces.
        config: data settings.
        seed: of the run; it decides the order of each pass.
        planned: result of :func:`plan`, if it is known.

    Raises:
        TooFewRecords: there are fewer pieces than sequences in a batch.
    """

    def __init__(
        self,
        pieces: Pieces,
        config: DataConfig,
        seed: int,
        planned: Sequences | None = None,
    ):
        self.rows, self._seed = config.batch_size, seed
        sequences = plan(pieces, config) if planned is None else planned
        self._first = [row * len(sequences) // self.rows for row in range(self.rows + 1)]
        if len(sequences) < self.rows:
            each = [sequences[i] for i in range(len(sequences))]  # of a packed set, checked
            order = np.concatenate([np.zeros(0, np.int32), *each])
            sequences, self._first = _spread(order, pieces, config)
        self.sequences = sequences
        self._shift = mixed(seed & _WORD) % len(sequences)

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every record has been in a batch (every row has completed a pass)."""
        return max(map(self.sequences_of_pass, range(self.rows)))

    def sequences_of_pass(self, row: int) -> int:
        """Number of sequences, and of steps, in which a row has its records once."""
        return self._first[row + 1] - self._first[row]

    def pieces_of_row(self, row: int) -> np.ndarray:
        """i32[n]: pieces that a row has in each pass."""
        first = self._index(self._first[row])
        last, all_ = first + self.sequences_of_pass(row), self.sequences
        over = max(0, last - len(all_))  # they go on at the first sequence
        start = all_.start[[first, last - over, over]]
        return np.concatenate([all_.piece[start[0] : start[1]], all_.piece[: start[2]]])

    def _index(self, place: int) -> int:
        return (place + self._shift) % len(self.sequences)

    def sequence(self, step: int, row: int) -> PackedSequence:
        """Look up the pieces of one sequence of a step.

        Args:
            step: training step, from 0.
            row: index of the sequence in the global batch.
        """
        count = self.sequences_of_pass(row)
        pass_, place = divmod(int(step), count)
        place = self._first[row] + permuted(place, count, self._seed, pass_, row)
        return PackedSequence(self.sequences[self._index(place)], pass_, row)


def _spread(order: np.ndarray, pieces: Pieces, config: DataConfig) -> tuple[Sequences, list[int]]:
    """Sequences of few pieces, short ones, so that each row has one; and the first of each row.

    Raises:
        TooFewRecords: there are fewer pieces than rows.
    """
    rows, total = config.batch_size, len(order)
    if total < rows:
        segments = (pieces.record[pieces.start[i] : pieces.start[i + 1]] for i in order)
        records, most = sum(int(np.sum(own >= 0)) for own in segments), max(total, 1)
        found = (
            f"data: {records} records make {total} packed pieces, fewer than data.batch_size={rows}"
        )
        apart = ", or set data.share_images=false" if records >= rows else ""
        raise TooFewRecords(found, most, f"lower it to {most} or less{apart}")
    ends = [row * total // rows for row in range(rows + 1)]
    parts = [pack(order[a:b], pieces, config) for a, b in itertools.pairwise(ends)]
    sizes = np.concatenate([[0], *(np.diff(part.start) for part in parts)])
    piece = np.concatenate([part.piece for part in parts])
    return Sequences(piece, np.cumsum(sizes)), [0, *itertools.accumulate(map(len, parts))]
