"""Pack records into sequences: which records share an image, and which share a sequence.

A *piece* is the unit of packing and is never split: one record, or a shared prefix (text up to
the last image) with the records that continue from it. A piece consists of segments, runs of
consecutive tokens; the shared prefix is the parent of the others, which attend to it and not to
each other. :class:`SequenceOrder` is the order of the sequences over training steps, a function of
(seed, step, V) and nothing else. All functions here are pure.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations.tokenize import Corpus
from jaxvlm.data.errors import TooFewRecords
from jaxvlm.data.images.patches import Patching

OPEN_SEQUENCES = 8  # sequences that packing keeps open for further pieces
_UNBOUNDED = 2**62

_ASSIGN = 0x5A  # tags that keep the random streams of one seed apart
_ORDER = 0x0D


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
    images: tuple[tuple[int, ...], ...]
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
        if tokens > self.max_length:
            detail = f"{tokens} tokens"
            detail += f", {patches // self.per_token} of them images'" if patches else ""
            return f"longer than data.max_length={self.max_length}", detail + smaller
        if (tiles := count_tiles(corpus, images)) > self.max_images:
            detail = f"{len(images)} images"
            detail += f" of {tiles} tiles" if tiles != len(images) else ""
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
    apart: Sequence[int] = (),
) -> tuple[Pieces, list[tuple[int, str, str]]]:
    """Group records with a common prefix into pieces; split groups that exceed a sequence.

    Args:
        corpus: tokenized records.
        image_id: id of the image token.
        limits: capacity of a packed sequence.
        share: whether records with the same leading images share them.
        apart: number of each record's source; records of different ones share nothing. () is one.

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
            name = (images, head, apart[i] if apart else 0) if prefix else (i,)
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
        self.start = [0]
        self.segments: list[tuple[int, int, int, int, int]] = []
        self.images: list[tuple[int, ...]] = []
        self.first, self.last = corpus.first.tolist(), corpus.last.tolist()
        self.length = corpus.length.tolist()

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
            self.segments.append((-1, begin, begin + prefix, head, 0))
        for i in records:
            first, last = self.first[i] + prefix, self.last[i]
            self.segments.append((i, first, last, self.length[i] - head, position))
        self.start.append(len(self.segments))
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


def units(pieces: Pieces, batch_size: int, chosen: Sequence[int] | None = None) -> list[list[int]]:
    """Group pieces into the units that are assigned to virtual shards: one per set of images.

    If there are fewer sets of images than sequences in a batch, they can't be kept together: each
    piece is then a unit of its own.

    Args:
        pieces: all pieces.
        batch_size: sequences in a batch.
        chosen: the pieces to group; ``None``: all.

    Raises:
        TooFewRecords: there are fewer pieces than sequences in a batch.
    """
    chosen = range(len(pieces.num_tokens)) if chosen is None else chosen
    total = len(chosen)
    if total < batch_size:
        segments = (pieces.record[pieces.start[i] : pieces.start[i + 1]] for i in chosen)
        records, most = sum(int(np.sum(own >= 0)) for own in segments), max(total, 1)
        found = (
            f"data: {records} records make {total} packed pieces, fewer than "
            f"data.batch_size={batch_size}"
        )
        apart = ", or set data.share_images=false" if records >= batch_size else ""
        raise TooFewRecords(found, most, f"lower it to {most} or less{apart}")
    sets: dict[tuple, list[int]] = {}
    for i in chosen:
        sets.setdefault(pieces.images[i] or (-1 - i,), []).append(i)
    return list(sets.values()) if len(sets) >= batch_size else [[i] for i in chosen]


def effective_shards(virtual_shards: int, batch_size: int, num_units: int) -> int:
    """V: the number of virtual shards that the data is divided into; a multiple of ``batch_size``.

    Small data gets fewer than ``virtual_shards``, so that each shard has about four units to
    shuffle and pack.
    """
    return batch_size * max(1, min(virtual_shards, num_units // 4) // batch_size)


def assign(
    pieces: Pieces, members: list[list[int]], num_shards: int, seed: int
) -> list[Int32[np.ndarray, " n"]]:
    """Assign units to virtual shards of about equal numbers of tokens, once for the whole run.

    Args:
        pieces: all pieces.
        members: pieces of each unit; at least ``num_shards`` units.
        num_shards: V, number of virtual shards.
        seed: seed of the run.

    Returns:
        Pieces of each shard, ascending; no shard is empty.
    """
    weight = np.asarray([int(pieces.num_tokens[m].sum()) for m in members])
    order = np.random.default_rng([seed, _ASSIGN]).permutation(len(members))
    longest_first = order[np.argsort(-weight[order], kind="stable")]
    heap = [(0, shard) for shard in range(num_shards)]
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    for i in longest_first.tolist():
        load, shard = heapq.heappop(heap)
        shards[shard] += members[i]
        heapq.heappush(heap, (load + int(weight[i]), shard))
    return [np.sort(np.asarray(shard, np.int32)) for shard in shards]


def shuffled(
    shard_pieces: Int32[np.ndarray, " n"], seed: int, pass_: int, shard: int
) -> Int32[np.ndarray, " n"]:
    """Shuffle a shard's pieces for one pass over them."""
    return np.random.default_rng([seed, _ORDER, pass_, shard]).permutation(shard_pieces)


def pack(
    order: Int[np.ndarray, " n"],
    pieces: Pieces,
    limits: Limits,
    max_pieces: int = 0,
) -> list[Int32[np.ndarray, " k"]]:
    """Pack pieces first-fit into ``OPEN_SEQUENCES`` open sequences; a new one closes the oldest.

    Args:
        order: pieces, each once.
        pieces: sizes of all pieces.
        limits: capacity of a packed sequence.
        max_pieces: maximum number of pieces in a sequence; 0 is no limit.

    Returns:
        i32[k] pieces of each sequence; every piece of ``order`` is in exactly one.
    """
    if max_pieces == 1:
        return [np.asarray([i], np.int32) for i in order]
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
    return [np.asarray(sequence, np.int32) for sequence in closed + opened]


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


class PackedSequence(NamedTuple):
    """One packed sequence of a batch."""

    pieces: np.ndarray
    """i32[k]: pieces in the sequence's order; empty is padding."""
    pass_: int = 0
    """Number of complete passes over the sequence's virtual shard before this one."""
    shard: int = -1
    """Index of the virtual shard."""


EMPTY = PackedSequence(np.zeros(0, np.int32))


class SequenceOrder:
    """An endless order of packed training sequences, with random access by step.

    Sequence r of step s is the next one of virtual shard ``r * (V/B) + s mod (V/B)``. A shard that
    is exhausted begins its next pass, in a new order, whether or not the others are.
    """

    def __init__(
        self, pieces: Pieces, config: DataConfig, seed: int, chosen: Sequence[int] | None = None
    ):
        """Assign the pieces, or those that are ``chosen``, to virtual shards.

        Raises:
            TooFewRecords: there are fewer pieces than sequences in a batch.
        """
        self.pieces, self.config, self.seed = pieces, config, seed
        members = units(pieces, config.batch_size, chosen)
        self.num_shards = effective_shards(config.virtual_shards, config.batch_size, len(members))
        self.shards = assign(pieces, members, self.num_shards, seed)
        self.turns = self.num_shards // config.batch_size  # steps between two visits to a shard
        self._ends: list[list[int]] = [[] for _ in self.shards]  # sequences up to each pass's end
        self._lock = threading.Lock()
        # Two passes of each shard: prefetching crosses from one to the next.
        self._pass = functools.lru_cache(maxsize=2 * self.num_shards)(self._pack_pass)

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every record has been in a batch (every shard has completed a pass)."""
        return max(map(self.steps_of_pass, range(self.config.batch_size)))

    def sequences_of_pass(self, index: int) -> int:
        """Number of a batch's sequences ``index`` that hold every record of its shards once."""
        shards = range(index * self.turns, (index + 1) * self.turns)
        return sum(len(self._pass(shard, 0)) for shard in shards)

    def steps_of_pass(self, index: int) -> int:
        """Steps until every record of a batch's sequence ``index`` has been in it."""
        last = 0
        for shard in range(index * self.turns, (index + 1) * self.turns):
            visits = len(self._pass(shard, 0))
            last = max(last, (visits - 1) * self.turns + shard % self.turns + 1)
        return last

    def sequence(self, step: int, index: int) -> PackedSequence:
        """Look up the pieces of one sequence of a step.

        Args:
            step: training step, from 0.
            index: index of the sequence in the global batch.
        """
        shard = index * self.turns + step % self.turns
        visit = step // self.turns
        with self._lock:
            ends = self._ends[shard]
            while not ends or ends[-1] <= visit:
                packed = self._pass(shard, len(ends))
                ends.append((ends[-1] if ends else 0) + len(packed))
            pass_ = bisect.bisect_right(ends, visit)
            begin = ends[pass_ - 1] if pass_ else 0
            return PackedSequence(self._pass(shard, pass_)[visit - begin], pass_, shard)

    def _pack_pass(self, shard: int, pass_: int) -> list[np.ndarray]:
        order = shuffled(self.shards[shard], self.seed, pass_, shard)
        return sequences(order, self.pieces, self.config)


def of_pieces(pieces: Pieces, of_records: Sequence[int]) -> np.ndarray:
    """What each piece has of something that all records of a piece have in common.

    Args:
        pieces: all pieces.
        of_records: that of each record of the corpus.
    """
    last = pieces.record[pieces.start[1:] - 1]  # a shared prefix comes first
    return np.asarray(of_records)[last]


def sequences(order: np.ndarray, pieces: Pieces, config: DataConfig) -> list[np.ndarray]:
    """Pack pieces in ``order`` as ``config`` says; one piece a sequence if packing is off."""
    limit = 0 if config.packing else 1
    return pack(order, pieces, limits_of(config), limit)
