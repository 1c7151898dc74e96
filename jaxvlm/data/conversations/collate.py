"""Collate packed sequences of pieces, or prompts, into the numpy arrays of a Batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.data.conversations.packing import Pieces
from jaxvlm.data.conversations.tokenize import Corpus
from jaxvlm.data.image_inputs import ImageInput
from jaxvlm.data.image_placeholders import Expanded, sources
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.page_allocation import TokenShape
from jaxvlm.types import Batch, Span


class Layout(NamedTuple):
    """Collation settings that are the same for every batch of a data set."""

    image_id: int
    pad_id: int
    max_images: int
    """Image slots of a sequence; 0 if the data has no image."""
    has_parents: bool
    """Whether any piece has a shared prefix; if not, ``Batch.parent`` is None."""
    mask: str
    """Which tokens attend to each other bidirectionally: ``causal`` none, ``prefix`` those of one
    image, ``prompt`` all tokens before the first answer."""
    position_rows: int = 1
    """R: rotary positions of a token."""
    taps: int = 0
    """K: number of visual features that one token may be the weighted sum of; 0: each image token
    holds one feature, in order."""


class Meta(NamedTuple):
    """Contents of a batch, for evaluations and logs; it stays on the host."""

    num_sequences: int
    sequence: np.ndarray
    """i32[n]: index of each record's sequence in the local batch."""
    segment: np.ndarray
    """i32[n]: the record's segment id within that sequence."""
    record: np.ndarray
    """i32[n]: the record's index in ``Dataset.records``."""

    def by_sequence(self) -> list[list[tuple[int, int]]]:
        """List the (segment id, record index) pairs of each local sequence."""
        out: list[list[tuple[int, int]]] = [[] for _ in range(self.num_sequences)]
        for row, segment, record in zip(*map(np.ndarray.tolist, self[1:])):
            out[row].append((segment, record))
        return out


class Places(NamedTuple):
    """Batch slots of the images, in the order of sequences, pieces and their images."""

    row: np.ndarray
    """i64[n]: index of the sequence in the batch."""
    slot: np.ndarray
    """i64[n]: image slot within the sequence."""


class _Segments(NamedTuple):
    """The segments of a batch, sequence by sequence."""

    which: np.ndarray
    """i64[n]: index into the segments of ``Pieces``."""
    row: np.ndarray
    number: np.ndarray
    """Segment id, from 1."""
    parent: np.ndarray


def collate(
    corpus: Corpus, pieces: Pieces, sequences: Sequence[np.ndarray], length: int, layout: Layout
) -> tuple[Batch, Meta, Places]:
    """Collate sequences into a batch; the caller fills in the images' pixels and keys.

    Args:
        corpus: encoded records.
        pieces: the units that sequences are packed from.
        sequences: i32[k] pieces of each sequence; an empty one is all padding.
        length: T, tokens of each sequence, padding included.
        layout: settings that are the same for every batch.

    Returns:
        The batch, without pixels, image keys and example ids; its contents; and the slots that
        its images go to.
    """
    segments = _segments(pieces, sequences)
    images = [p for chosen in sequences for i in chosen.tolist() for p in pieces.images[i]]
    counts = pieces.last[segments.which] - pieces.first[segments.which]
    source = _spread(pieces.first[segments.which], counts)
    of_segment = np.repeat(np.arange(len(segments.which)), counts)
    ids = corpus.tokens[source]

    # An image is one token in the corpus and is expanded to its span of tokens here.
    is_image = np.flatnonzero(ids == layout.image_id)
    spans = [corpus.spans[p] for p in images]
    repeats, advance = np.ones(len(ids), np.int64), np.ones(len(ids), np.int64)
    repeats[is_image] = [len(span.ids) for span in spans]
    advance[is_image] = [span.advance for span in spans]
    begin = np.cumsum(repeats) - repeats
    wide = np.repeat(np.arange(len(ids)), repeats)
    inside = _spread(begin[is_image], repeats[is_image])

    segment = of_segment[wide]
    row = segments.row[segment]
    at = np.arange(len(wide))
    row_begin = np.searchsorted(row, np.arange(len(sequences)))
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
        out: np.ndarray = np.full((len(sequences), length), fill, dtype)
        out[row, column] = values
        return out

    source = np.full((layout.taps, len(wide)), -1, np.int64)
    weight = np.zeros((layout.taps, len(wide)), np.float32)
    if layout.taps:
        index, share = sources(spans, place, layout.taps)
        source[:, inside], weight[:, inside] = index.T, share.T

    image_start = np.full((len(sequences), layout.max_images), -1, np.int32)
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
    return batch, _meta(corpus, pieces, segments, len(sequences)), places


def collate_images(
    pixels: Sequence[np.ndarray | None],
    places: Places,
    shape: tuple[int, int],
    size: int,
    patching: Patching | None = None,
    max_patches: int = 0,
    grids: Sequence[Any] = (),
) -> dict[str, np.ndarray]:
    """Collate images into the batch fields that hold them.

    Args:
        pixels: u8[H, W, 3] of each image, or of each of its tiles; ``None`` leaves zeros.
        places: slot of each image; within a sequence, in ascending order of slots.
        shape: (B, I).
        size: height and width in pixels, if all images have the same size.
        patching: how images of any size are cut into patches; ``None`` if all have the same size.
        max_patches: P, patches of a sequence, padding included; only with ``patching``.
        grids: (t, h, w) of each image in patches; read for images without pixels.

    Returns:
        ``pixels``, or ``patches`` and ``grid``.
    """
    located = zip(pixels, places.row.tolist(), places.slot.tolist(), strict=True)
    if patching is None:
        canvas = np.zeros((*shape, size, size, 3), np.uint8)
        for image, row, slot in located:
            if image is not None:
                canvas[row, slot] = image
        return {"pixels": canvas}
    patches = np.zeros((shape[0], max_patches, patching.patch_dim), np.uint8)
    grid = np.zeros((*shape, 3), np.int32)
    for i, (image, row, slot) in enumerate(located):
        first = int(grid[row].prod(axis=1).sum())
        grid[row, slot] = patching.grid(image) if image is not None else grids[i]
        if image is not None:
            cut = patching.cut(image)
            patches[row, first : first + len(cut)] = cut
    return {"patches": patches, "grid": grid}


def collate_inputs(
    inputs: Sequence[ImageInput],
    places: Places,
    shape: tuple[int, int],
    size: int,
    patching: Patching | None,
    max_patches: int,
    cached: tuple[TokenShape, int] | None = None,
) -> dict[str, np.ndarray]:
    """Collate tiles that come as pixels or as cached visual tokens into the batch's fields.

    Args:
        inputs: the tiles.
        places: slot of each tile, see :func:`collate_images`.
        shape: (B, I).
        size: see ``collate_images``.
        patching: see ``collate_images``.
        max_patches: see ``collate_images``.
        cached: width and dtype of cached visual tokens, and their number for a tile (0: one for
            each patch of an image of any size); ``None`` if all tiles come as pixels.

    Returns:
        ``image_key``, the fields of ``collate_images``, and with ``cached`` those of the tokens.
    """
    key = np.zeros((*shape, 4), np.uint32)
    if inputs:
        key[places.row, places.slot] = [tile.key for tile in inputs]
    # The grid of an image whose cached feature is one embedding is not read.
    grids = [tile.grid or (0, 0, 0) for tile in inputs]
    pixels = [tile.pixels for tile in inputs]
    fields = collate_images(pixels, places, shape, size, patching, max_patches, grids)
    fields["image_key"] = key
    if cached:
        token_shape, tokens = cached
        own_shape = (*shape, tokens) if tokens else (shape[0], max_patches)
        stored = np.zeros((*own_shape, token_shape.width), token_shape.dtype)
        fields |= _cached_tokens(inputs, places, stored, np.zeros(shape, bool), fields.get("grid"))
    return fields


def _cached_tokens(
    inputs: Sequence[ImageInput],
    places: Places,
    stored: np.ndarray,
    is_stored: np.ndarray,
    grid: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Copy cached visual tokens into the fields ``stored`` and ``is_stored``, given as zeros."""
    for tile, row, slot in zip(inputs, places.row.tolist(), places.slot.tolist(), strict=True):
        if tile.tokens is None:
            continue
        is_stored[row, slot] = True
        if stored.ndim == 4 or grid is None:
            stored[row, slot] = tile.tokens
        else:
            first = int(grid[row, :slot].prod(axis=1).sum())
            stored[row, first : first + len(tile.tokens)] = tile.tokens
    return {"stored": stored, "is_stored": is_stored}


def _stack(taps: np.ndarray, field: Callable[[np.ndarray], np.ndarray]) -> np.ndarray | None:
    """Scatter [K, n] into [B, T, K]; None if K is 0."""
    return np.stack([field(values) for values in taps], axis=2) if len(taps) else None


def _segments(pieces: Pieces, sequences: Sequence[np.ndarray]) -> _Segments:
    flat = np.concatenate([np.zeros(0, np.int64), *sequences]).astype(np.int64)
    row_of_piece = np.repeat(np.arange(len(sequences)), [len(chosen) for chosen in sequences])
    count = pieces.start[flat + 1] - pieces.start[flat]
    index = _spread(pieces.start[flat], count)
    row = np.repeat(row_of_piece, count)
    at = np.arange(len(index))
    number = at - np.searchsorted(row, np.arange(len(sequences)))[row] + 1
    # The first segment of a piece is the parent of the others if it is a shared prefix.
    head = np.repeat(np.cumsum(count) - count, count)
    child = (pieces.record[index[head]] < 0) & (head != at)
    return _Segments(index, row, number, np.where(child, number[head], 0))


def _meta(corpus: Corpus, pieces: Pieces, segments: _Segments, num_sequences: int) -> Meta:
    record = pieces.record[segments.which]
    has_record = record >= 0
    source = corpus.source[record[has_record]]
    row = segments.row[has_record].astype(np.int32)
    number = segments.number[has_record].astype(np.int32)
    return Meta(num_sequences, row, number, source)


def _places(row: np.ndarray, spans: list[Span]) -> tuple[Places, list[int]]:
    """Assign an image slot to each tile; also count the tiles before each image in its sequence."""
    tiles = np.asarray([len(span.starts) for span in spans], np.int64)
    of_tile = np.repeat(row, tiles)
    slot = np.arange(len(of_tile)) - np.searchsorted(of_tile, of_tile)
    before = np.cumsum(tiles) - tiles
    return Places(of_tile, slot), [int(slot[b]) if n else 0 for b, n in zip(before, tiles)]


def _positions(advance: np.ndarray, of_segment: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """i64[n]: position of each corpus token in its conversation."""
    position = np.cumsum(advance) - advance
    start = np.searchsorted(of_segment, np.arange(len(offset)))
    return position - position[start][of_segment] + offset[of_segment]


def _prompts(trained: np.ndarray, segment: np.ndarray) -> np.ndarray:
    """i64[n]: a distinct id per segment on the tokens before its first trained one, 0 elsewhere."""
    before = np.cumsum(trained)
    start = np.searchsorted(segment, np.arange(segment[-1] + 1 if len(segment) else 0))
    seen = before - (before - trained)[start][segment]
    return np.where(seen == 0, segment + 1, 0)


def _join(parts: list[np.ndarray], rows: int = 0) -> np.ndarray:
    """Concatenate the parts; with ``rows``, 2-D parts of one row are broadcast to that many."""
    if rows:
        parts = [np.broadcast_to(part, (rows, part.shape[1])) for part in parts]
        return np.concatenate([np.zeros((rows, 0), np.int64), *parts], axis=1)
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _spread(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Concatenate the ranges ``first[i], first[i] + 1, ...`` of ``count[i]`` numbers each."""
    skipped = np.cumsum(count) - count
    return np.repeat(first - skipped, count) + np.arange(int(count.sum()))


class PromptShape(NamedTuple):
    """Static shape of a batch of prompts."""

    tokens: int
    """T, tokens of a prompt, padding included."""
    images: int
    """I: images, or their tiles; 0 leaves the batch's image fields None."""
    position_rows: int = 1
    """R: rotary positions of a token."""
    taps: int = 0
    """K, see ``Batch.image_source``."""


def collate_prompts(
    prompts: Sequence[Expanded | None],
    shape: PromptShape,
    *,
    pad_id: int,
    mask: str = "causal",
    padding: str = "left",
) -> Batch:
    """Collate prompts, one a sequence; the caller fills in pixels and keys of the images.

    Args:
        prompts: prompt of each sequence; ``None`` is a sequence of padding.
        shape: static shape of the batch.
        pad_id: id of the padding token.
        mask: which tokens attend to each other bidirectionally, see ``DecoderConfig.visual_mask``.
        padding: side on which prompts are padded: left | right.

    Returns:
        A batch without images; its loss weights are all 0.

    Raises:
        ValueError: ``padding`` is neither left nor right.
    """
    if padding not in ("left", "right"):
        raise ValueError(f"padding={padding!r} is unknown; use left or right")
    B, (T, images, R, taps) = len(prompts), shape
    tokens = np.full((B, T), pad_id, np.int32)
    segment, group = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    positions = np.zeros((B, R, T), np.int32)
    start = np.full((B, images), -1, np.int32)
    source = np.full((B, T, taps), -1, np.int32)
    weight = np.zeros((B, T, taps), np.float32)
    for i, prompt in enumerate(prompts):
        if prompt is None:
            continue
        first = T - len(prompt.ids) if padding == "left" else 0
        span = slice(first, first + len(prompt.ids))
        tokens[i, span], segment[i, span] = prompt.ids, 1
        positions[i, :, span], group[i, span] = prompt.positions, prompt.tile
        start[i, : len(prompt.starts)] = [first + at for at in prompt.starts]
        if prompt.source is not None:
            source[i, span], weight[i, span] = prompt.source, prompt.weight
    bidirectional = mask == "prompt" or (mask == "prefix" and images > 0)
    return Batch(
        tokens,
        np.zeros((B, T), np.float32),
        positions,
        segment,
        bidirectional=(segment if mask == "prompt" else group) if bidirectional else None,
        image_start=start if images else None,
        image_source=source if taps else None,
        image_weight=weight if taps > 1 else None,
    )
