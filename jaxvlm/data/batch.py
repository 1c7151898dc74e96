"""Rows of pieces -> the numpy arrays of a Batch, all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.data.chat import Corpus
from jaxvlm.data.packing import Pieces
from jaxvlm.data.patches import Patching
from jaxvlm.data.spans import sources
from jaxvlm.types import Batch, Span


class Layout(NamedTuple):
    """What is the same for every batch of a data set."""

    image_id: int
    pad_id: int
    max_images: int
    """Picture places a row; 0 where the data has no picture."""
    has_parents: bool
    """Whether any piece is shared; else ``parent`` is None."""
    mask: str
    """Which tokens see each other both ways: ``causal`` none, ``prefix`` a picture's, ``prompt``
    all before the first answer."""
    position_rows: int = 1
    """R: rotary positions a token."""
    taps: int = 0
    """K: features that a token may be the sum of; 0: a tile's follow each other."""


class Meta(NamedTuple):
    """What stands in a batch, for evaluations and logs; it stays on the host."""

    num_rows: int
    row: np.ndarray
    """i32[n]: local row of each record in the batch."""
    segment: np.ndarray
    """i32[n]: its segment id there."""
    record: np.ndarray
    """i32[n]: its index in ``Dataset.records``."""

    def by_row(self) -> list[list[tuple[int, int]]]:
        """Of each local row: (segment id, record index)."""
        out: list[list[tuple[int, int]]] = [[] for _ in range(self.num_rows)]
        for row, segment, record in zip(*map(np.ndarray.tolist, self[1:])):
            out[row].append((segment, record))
        return out


class Places(NamedTuple):
    """Where the pictures of a batch go, in the order of rows, pieces and their pictures."""

    row: np.ndarray
    """i64[n]."""
    slot: np.ndarray
    """i64[n]: picture place within the row."""


class _Segments(NamedTuple):
    """The segments of a batch, row by row."""

    which: np.ndarray
    """i64[n]: into Pieces' segments."""
    row: np.ndarray
    number: np.ndarray
    """Segment id, from 1."""
    parent: np.ndarray


def assemble(
    corpus: Corpus, pieces: Pieces, rows: Sequence[np.ndarray], length: int, layout: Layout
) -> tuple[Batch, Meta, Places]:
    """Lay out rows; the pictures' pixels and keys are the caller's to fill in.

    Args:
        corpus: encoded records.
        pieces: what rows are made of.
        rows: i32[k] pieces of each row; empty is a row of padding.
        length: T.
        layout: what is the same for every batch.

    Returns:
        The batch, without pixels, picture keys and example ids; what stands in it; and where
        its pictures go.
    """
    segments = _segments(pieces, rows)
    flat = [p for row in rows for piece in row.tolist() for p in pieces.pictures[piece]]
    where = pieces.last[segments.which] - pieces.first[segments.which]
    source = _spread(pieces.first[segments.which], where)
    of_segment = np.repeat(np.arange(len(segments.which)), where)
    ids = corpus.tokens[source]

    # A picture is one token in the corpus and a span here.
    is_image = np.flatnonzero(ids == layout.image_id)
    spans = [corpus.spans[p] for p in flat]
    repeats, advance = np.ones(len(ids), np.int64), np.ones(len(ids), np.int64)
    repeats[is_image] = [len(span.ids) for span in spans]
    advance[is_image] = [span.advance for span in spans]
    begin = np.cumsum(repeats) - repeats
    wide = np.repeat(np.arange(len(ids)), repeats)
    inside = _spread(begin[is_image], repeats[is_image])

    segment = of_segment[wide]
    row = segments.row[segment]
    at = np.arange(len(wide))
    row_begin = np.searchsorted(row, np.arange(len(rows)))
    column = at - row_begin[row]
    places, place = _places(segments.row[of_segment[is_image]], spans)

    tokens = ids[wide]
    tokens[inside] = _join([span.ids for span in spans])
    position = _positions(advance, of_segment, pieces.offset[segments.which])
    positions = np.tile(position[wide], (layout.position_rows, 1))
    positions[:, inside] += _join([span.positions for span in spans], layout.position_rows)
    tile = np.zeros(len(wide), np.int64)
    tile[inside] = _join([np.where(s.tile > 0, s.tile + p, 0) for s, p in zip(spans, place)])
    trained = corpus.loss[source][wide]
    group = tile if layout.mask == "prefix" else _prompts(trained, segment)

    def field(values: np.ndarray, dtype: type = np.int32, fill: int = 0) -> np.ndarray:
        out: np.ndarray = np.full((len(rows), length), fill, dtype)
        out[row, column] = values
        return out

    source = np.full((layout.taps, len(wide)), -1, np.int64)
    weight = np.zeros((layout.taps, len(wide)), np.float32)
    if layout.taps:
        index, share = sources(spans, place, layout.taps)
        source[:, inside], weight[:, inside] = index.T, share.T

    image_start = np.full((len(rows), layout.max_images), -1, np.int32)
    first = np.repeat(begin[is_image], [len(s.starts) for s in spans])
    first = first + _join([span.starts for span in spans])
    image_start[places.row, places.slot] = first - row_begin[places.row]
    batch = Batch(
        tokens=field(tokens, fill=layout.pad_id),
        loss_weight=field(trained, np.float32),
        positions=np.stack([field(values) for values in positions], axis=1),
        segment=field(segments.number[segment]),
        parent=field(segments.parent[segment]) if layout.has_parents else None,
        bidirectional=None if layout.mask == "causal" else field(group),
        image_start=image_start if layout.max_images else None,
        image_source=_stack(source, lambda x: field(x, fill=-1)),
        image_weight=_stack(weight, lambda x: field(x, np.float32)) if layout.taps > 1 else None,
    )
    return batch, _meta(corpus, pieces, segments, len(rows)), places


def lay_pictures(
    pixels: Sequence[np.ndarray | None],
    places: Places,
    shape: tuple[int, int],
    size: int,
    patching: Patching | None = None,
    max_patches: int = 0,
    grids: Sequence[Any] = (),
) -> dict[str, np.ndarray]:
    """The fields of a batch that hold pictures.

    Args:
        pixels: u8[H, W, 3] of each picture, or of each of its tiles; ``None`` leaves zeros.
        places: where it goes; within a row, in the order of places.
        shape: (B, I).
        size: pixels a side, where all pictures have one size.
        patching: how pictures of any size are cut; ``None`` where they have one size.
        max_patches: P, then.
        grids: (t, h, w) of each picture in patches, where there may be no pixels to tell it.

    Returns:
        ``pixels``, or ``patches`` and ``grid``.
    """
    where = zip(pixels, places.row.tolist(), places.slot.tolist(), strict=True)
    if patching is None:
        canvas = np.zeros((*shape, size, size, 3), np.uint8)
        for picture, row, slot in where:
            if picture is not None:
                canvas[row, slot] = picture
        return {"pixels": canvas}
    patches = np.zeros((shape[0], max_patches, patching.patch_dim), np.uint8)
    grid = np.zeros((*shape, 3), np.int32)
    for i, (picture, row, slot) in enumerate(where):
        first = int(grid[row].prod(axis=1).sum())
        grid[row, slot] = patching.grid(picture) if picture is not None else grids[i]
        if picture is not None:
            cut = patching.cut(picture)
            patches[row, first : first + len(cut)] = cut
    return {"patches": patches, "grid": grid}


def lay_tokens(
    tokens: Sequence[np.ndarray | None],
    places: Places,
    shape: tuple[int, ...],
    seats: int,
    dtype: Any,
    grid: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The fields of a batch that hold visual tokens which are given.

    Args:
        tokens: [P, D] of each tile; ``None``: not given.
        places: where it goes.
        shape: of ``Batch.features``.
        seats: I.
        dtype: of the tokens.
        grid: ``Batch.grid``, of packed patches.

    Returns:
        ``stored`` and ``is_stored``.
    """
    laid, here = np.zeros(shape, dtype), np.zeros((shape[0], seats), bool)
    for tile, row, slot in zip(tokens, places.row.tolist(), places.slot.tolist(), strict=True):
        if tile is None:
            continue
        here[row, slot] = True
        if laid.ndim == 4 or grid is None:
            laid[row, slot] = tile
        else:
            first = int(grid[row, :slot].prod(axis=1).sum())
            laid[row, first : first + len(tile)] = tile
    return {"stored": laid, "is_stored": here}


def _stack(taps: np.ndarray, field: Callable[[np.ndarray], np.ndarray]) -> np.ndarray | None:
    """[K, n] -> [B, T, K], or None where K is 0."""
    return np.stack([field(values) for values in taps], axis=2) if len(taps) else None


def _segments(pieces: Pieces, rows: Sequence[np.ndarray]) -> _Segments:
    flat = np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int64)
    row_of_piece = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    count = pieces.start[flat + 1] - pieces.start[flat]
    index = _spread(pieces.start[flat], count)
    row = np.repeat(row_of_piece, count)
    at = np.arange(len(index))
    number = at - np.searchsorted(row, np.arange(len(rows)))[row] + 1
    # A piece's first segment is its children's parent, if it is a shared beginning.
    head = np.repeat(np.cumsum(count) - count, count)
    child = (pieces.record[index[head]] < 0) & (head != at)
    return _Segments(index, row, number, np.where(child, number[head], 0))


def _meta(corpus: Corpus, pieces: Pieces, segments: _Segments, num_rows: int) -> Meta:
    record = pieces.record[segments.which]
    kept = record >= 0
    source = corpus.source[record[kept]]
    row, number = segments.row[kept].astype(np.int32), segments.number[kept].astype(np.int32)
    return Meta(num_rows, row, number, source)


def _places(row: np.ndarray, spans: list[Span]) -> tuple[Places, list[int]]:
    """Picture places, one a tile; and how many lie before each picture in its row."""
    tiles = np.asarray([len(span.starts) for span in spans], np.int64)
    of_tile = np.repeat(row, tiles)
    slot = np.arange(len(of_tile)) - np.searchsorted(of_tile, of_tile)
    before = np.cumsum(tiles) - tiles
    return Places(of_tile, slot), [int(slot[b]) if n else 0 for b, n in zip(before, tiles)]


def _positions(advance: np.ndarray, of_segment: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """i64[n]: where each token of the corpus stands in its conversation."""
    reached = np.cumsum(advance) - advance
    start = np.searchsorted(of_segment, np.arange(len(offset)))
    return reached - reached[start][of_segment] + offset[of_segment]


def _prompts(trained: np.ndarray, segment: np.ndarray) -> np.ndarray:
    """i64[n]: a number of its own for each segment, on the tokens before its first trained one."""
    before = np.cumsum(trained)
    start = np.searchsorted(segment, np.arange(segment[-1] + 1 if len(segment) else 0))
    seen = before - (before - trained)[start][segment]
    return np.where(seen == 0, segment + 1, 0)


def _join(parts: list[np.ndarray], rows: int = 0) -> np.ndarray:
    """The parts one after another; with ``rows``, 2-D ones of one row stand for all."""
    if rows:
        parts = [np.broadcast_to(part, (rows, part.shape[1])) for part in parts]
        return np.concatenate([np.zeros((rows, 0), np.int64), *parts], axis=1)
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _spread(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """``first[i], first[i] + 1, ...``, ``count[i]`` of them, one after another."""
    skipped = np.cumsum(count) - count
    return np.repeat(first - skipped, count) + np.arange(int(count.sum()))
