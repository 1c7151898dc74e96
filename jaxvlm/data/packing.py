"""Records -> pieces -> rows: who shares a picture, who shares a row. Pure functions.

A *piece* is what is packed whole: one record, or a shared beginning (text up to the last
picture) with the records that go on from it. A piece's segments are its tokens' runs: the shared
beginning is the parent of the others, which see it and not each other.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from jaxvlm.config import DataConfig
from jaxvlm.data.chat import Corpus
from jaxvlm.data.errors import DataError
from jaxvlm.data.patches import Patching

LOOK_AHEAD = 8  # rows held open while packing
_ENDLESS = 2**62

_ASSIGN = 0x5A  # tags that keep the random streams of one seed apart
_ORDER = 0x0D


class Pieces(NamedTuple):
    """Pieces and their segments, flat; ``start[i]:start[i+1]`` are piece i's."""

    start: Int64[np.ndarray, " pieces+1"]
    """First segment of each piece."""
    record: Int32[np.ndarray, " segments"]
    """The record that a segment ends; -1 for a shared beginning."""
    first: Int64[np.ndarray, " segments"]
    """Index in the corpus of the segment's first token ..."""
    last: Int64[np.ndarray, " segments"]
    """... and one after its last."""
    length: Int32[np.ndarray, " segments"]
    """Tokens in a row, pictures included."""
    offset: Int32[np.ndarray, " segments"]
    """Position of the first token: where the parent ended, so that sharing changes no result."""
    pictures: tuple[tuple[int, ...], ...]
    """Of each piece: indices into the corpus's paths."""
    num_tokens: Int32[np.ndarray, " pieces"]
    num_images: Int32[np.ndarray, " pieces"]
    """Picture places that a piece takes: one a tile."""
    num_patches: Int32[np.ndarray, " pieces"]
    """Patches of pictures of any size; 0 where pictures have one size."""


class Limits(NamedTuple):
    """What a row can hold."""

    max_length: int
    """Tokens."""
    max_images: int
    """Pictures, or their tiles."""
    max_patches: int = 0
    """Patches of pictures of any size; 0 is no bound."""
    per_token: int = 0
    """Patches that become one visual token; 0 where pictures have one size."""

    def exceeded(self, corpus: Corpus, record: int) -> tuple[str, str]:
        """(reason, detail) of a record that fits no row; two empty ones if it fits."""
        tokens, pictures = int(corpus.length[record]), corpus.pictures[record]
        patches = self.patches(corpus, pictures)
        smaller = "; data.picture_pixels makes pictures smaller" if patches else ""
        if tokens > self.max_length:
            detail = f"{tokens} tokens"
            detail += f", {patches // self.per_token} of them pictures'" if patches else ""
            return f"longer than data.max_length={self.max_length}", detail + smaller
        if (tiles := count_tiles(corpus, pictures)) > self.max_images:
            detail = f"{len(pictures)} pictures"
            detail += f" of {tiles} tiles" if tiles != len(pictures) else ""
            return f"more than data.max_images={self.max_images} pictures", detail
        if patches > self.max_patches > 0:
            detail = f"{patches} patches{smaller}"
            return f"more than data.max_patches={self.max_patches} patches", detail
        return "", ""

    def patches(self, corpus: Corpus, pictures: tuple[int, ...]) -> int:
        """Patches of pictures of any size."""
        if not self.per_token:
            return 0
        return self.per_token * sum(int((corpus.spans[p].tile > 0).sum()) for p in pictures)


def limits_of(config: DataConfig, patching: Patching | None = None) -> Limits:
    """What a row can hold, as the settings say.

    Args:
        config: of the data.
        patching: how pictures of any size are cut; ``None`` where they have one size.
    """
    per_token = patching.per_token if patching else 0
    return Limits(config.max_length, config.max_images, config.max_patches, per_token)


def build_pieces(
    corpus: Corpus, image_id: int, limits: Limits, share: bool
) -> tuple[Pieces, list[tuple[int, str, str]]]:
    """Group records that begin alike, and cut groups that no row could hold.

    Args:
        corpus: encoded records.
        image_id: the picture token.
        limits: what a row can hold.
        share: whether records with the same leading pictures share them.

    Returns:
        Pieces, each fit for a row of its own, in the order of their first record; and
        (record, reason, detail) of the records that fit no row.
    """
    groups: dict[tuple, list[int]] = {}
    shared: dict[tuple, int] = {}
    problems: list[tuple[int, str, str]] = []
    prefixes = _prefixes(corpus, image_id) if share else np.zeros(len(corpus.length), np.int64)
    for i, (pictures, prefix) in enumerate(zip(corpus.pictures, prefixes.tolist())):
        reason, detail = limits.exceeded(corpus, i)
        if reason:
            problems.append((i, reason, detail))
        else:
            begin = int(corpus.first[i])
            head = corpus.tokens[begin : begin + prefix].tobytes()
            name = (pictures, head) if prefix else (i,)
            groups.setdefault(name, []).append(i)
            shared[name] = prefix
    builder = _Builder(corpus, limits)
    for name, members in groups.items():
        builder.add(members, shared[name])
    return builder.pieces(), problems


def count_tiles(corpus: Corpus, pictures: tuple[int, ...]) -> int:
    """Tiles of some pictures; one of a picture that is not cut."""
    return sum(len(corpus.spans[p].starts) for p in pictures)


def _prefixes(corpus: Corpus, image_id: int) -> Int64[np.ndarray, " records"]:
    """Tokens (a picture counting as one) that a record can share: through its last picture.

    0 where it has no picture, where the loss begins inside them, or right after them: a child's
    first token has no token of its own before it that could predict it.
    """
    out = np.zeros(len(corpus.first), np.int64)
    known: dict[int, int] = {}
    for i, (first, last) in enumerate(zip(corpus.first.tolist(), corpus.last.tolist())):
        if first not in known:
            places = np.flatnonzero(corpus.tokens[first:last] == image_id)
            prefix = int(places[-1]) + 1 if len(places) else 0
            clear = first + prefix < last and not corpus.loss[first : first + prefix + 1].any()
            known[first] = prefix if clear else 0
        out[i] = known[first]
    return out


class _Builder:
    """Collects segments piece by piece."""

    def __init__(self, corpus: Corpus, limits: Limits):
        self.corpus, self.limits = corpus, limits
        self.start = [0]
        self.segments: list[tuple[int, int, int, int, int]] = []
        self.pictures: list[tuple[int, ...]] = []
        self.first, self.last = corpus.first.tolist(), corpus.last.tolist()
        self.length = corpus.length.tolist()

    def add(self, members: list[int], prefix: int) -> None:
        """Records that share ``prefix`` tokens, in as many pieces as the row's length asks."""
        pictures = self.corpus.pictures[members[0]]
        spans = [self.corpus.spans[p] for p in pictures]
        head = prefix + sum(len(span.ids) - 1 for span in spans)
        reached = prefix + sum(span.advance - 1 for span in spans)
        waiting: list[int] = []
        used = head
        for i in members:
            rest = self.length[i] - head
            if waiting and used + rest > self.limits.max_length:
                self._close(waiting, prefix, head, reached, pictures)
                waiting, used = [], head
            waiting.append(i)
            used += rest
        self._close(waiting, prefix, head, reached, pictures)

    def _close(
        self, records: list[int], prefix: int, head: int, reached: int, pictures: tuple
    ) -> None:
        if len(records) == 1:  # nobody to share with: one segment says the same
            prefix = head = reached = 0
        else:
            begin = self.first[records[0]]
            self.segments.append((-1, begin, begin + prefix, head, 0))
        for i in records:
            first, last = self.first[i] + prefix, self.last[i]
            self.segments.append((i, first, last, self.length[i] - head, reached))
        self.start.append(len(self.segments))
        self.pictures.append(pictures)

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
            pictures=tuple(self.pictures),
            num_tokens=(total[start[1:]] - total[start[:-1]]).astype(np.int32),
            num_images=np.asarray([count_tiles(self.corpus, p) for p in self.pictures], np.int32),
            num_patches=np.asarray(
                [self.limits.patches(self.corpus, p) for p in self.pictures], np.int32
            ),
        )


def units(pieces: Pieces, batch_size: int) -> list[list[int]]:
    """What is dealt to virtual shards: the pieces of one set of pictures, together.

    Pictures that are fewer than the rows of a batch can't be kept together: then each piece is
    a unit of its own.

    Raises:
        DataError: fewer pieces than rows a batch.
    """
    total = len(pieces.num_tokens)
    if total < batch_size:
        raise DataError(
            f"data: {total} packed pieces are fewer than data.batch_size={batch_size};"
            f" lower it to {max(total, 1)} or less, or set data.share_pictures=false"
        )
    sets: dict[tuple, list[int]] = {}
    for i, pictures in enumerate(pieces.pictures):
        sets.setdefault(pictures or (-1 - i,), []).append(i)
    return list(sets.values()) if len(sets) >= batch_size else [[i] for i in range(total)]


def effective_shards(virtual_shards: int, batch_size: int, num_units: int) -> int:
    """V: the virtual shards that data is dealt to; a multiple of ``batch_size``.

    Small data gets fewer than asked, so that each has about four units to shuffle and pack.
    """
    return batch_size * max(1, min(virtual_shards, num_units // 4) // batch_size)


def assign(
    pieces: Pieces, members: list[list[int]], num_shards: int, seed: int
) -> list[Int32[np.ndarray, " n"]]:
    """Deal units to virtual shards for good, about equal in tokens.

    Args:
        pieces: all pieces.
        members: pieces of each unit; at least ``num_shards`` units.
        num_shards: V.
        seed: of the run.

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
    """The shard's pieces in the order of one pass over them."""
    return np.random.default_rng([seed, _ORDER, pass_, shard]).permutation(shard_pieces)


def pack(
    order: Int[np.ndarray, " n"],
    pieces: Pieces,
    limits: Limits,
    max_pieces: int = 0,
) -> list[Int32[np.ndarray, " k"]]:
    """First fit among the ``LOOK_AHEAD`` rows held open; the oldest is closed for a new one.

    Args:
        order: pieces, each once.
        pieces: their sizes.
        limits: what a row can hold.
        max_pieces: pieces a row; 0 is no bound.

    Returns:
        Rows of pieces; every piece of ``order`` in exactly one.
    """
    if max_pieces == 1:
        return [np.asarray([i], np.int32) for i in order]
    closed: list[list[int]] = []
    rows: list[list[int]] = []
    room: list[list[int]] = []  # tokens, pictures and patches left in each open row
    whole = [limits.max_length, limits.max_images, limits.max_patches or _ENDLESS]
    sizes = np.stack([pieces.num_tokens, pieces.num_images, pieces.num_patches], axis=1)
    for piece, (tokens, images, patches) in zip(order.tolist(), sizes[order].tolist()):
        for row, left in zip(rows, room):
            if tokens <= left[0] and images <= left[1] and patches <= left[2]:
                row.append(piece)
                left[:] = left[0] - tokens, left[1] - images, left[2] - patches
                break
        else:
            if len(rows) == LOOK_AHEAD:
                closed.append(rows.pop(0))
                room.pop(0)
            rows.append([piece])
            room.append([whole[0] - tokens, whole[1] - images, whole[2] - patches])
    return [np.asarray(row, np.int32) for row in closed + rows]


def buckets(max_length: int, count: int) -> tuple[int, ...]:
    """Row lengths to choose from: multiples of 8, each about 1.6 times the one before.

    Returns:
        Up to ``count`` lengths, ascending; the last is ``max_length`` itself.
    """
    lengths = {max_length}
    for i in range(1, max(count, 1)):
        lengths.add(min(max_length, -(-int(max_length / 1.6**i) // 8) * 8))
    return tuple(sorted(lengths))
