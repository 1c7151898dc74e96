"""One column of a data set of pairs (queries or documents): its unique items, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.data import image_placeholders
from jaxvlm.data.conversations import packing
from jaxvlm.data.conversations.collate import Places, PromptShape, collate_inputs
from jaxvlm.data.errors import ImageError
from jaxvlm.data.image_inputs import ImageCache, ImageInput, ImageInputs
from jaxvlm.data.page_allocation import TokenShape
from jaxvlm.data.pairs.collate_items import Collator, Encoded
from jaxvlm.data.pairs.examples import Item
from jaxvlm.types import Batch

Draw = Callable[[int], tuple[int, ...]]
"""Batch row -> its image's augmentation, see :func:`jaxvlm.data.images.image_files.draw`."""


_LENGTH_STEP = 8
"""The longest bucket is a multiple of it, if the model's maximum length permits."""


class Measured(NamedTuple):
    """What holds for all items of a column, so that no start looks at all of them."""

    tiles: int
    """Tiles of an image, at most."""
    position_rows: int
    """R: rotary positions of a token."""
    taps: int
    """Features that a visual token holds, at most."""
    unknown: int
    """Tokens that are ``<unk>``."""
    patches: np.ndarray
    """i64[items]: patches that a batch has of each item's image."""


def measure(encoded: Encoded, collator: Collator) -> Measured:
    """Look at all items of a column."""
    unique = {id(span): span for span in encoded.spans}.values()  # equal spans are one object
    patching = collator.image[1]
    per_token = patching.per_token if patching else 0
    of_image = [per_token * int((span.tile > 0).sum()) for span in encoded.spans]
    # Without image tokens, an image's patches are not computed here: all are padded alike.
    patches = np.asarray([*of_image, 0], np.int64)
    none = np.zeros(len(encoded.image), np.int64)
    return Measured(
        tiles=max((len(span.starts) for span in unique), default=1),
        position_rows=max((len(span.positions) for span in unique), default=1),
        taps=image_placeholders.max_taps(unique),
        unknown=int(np.sum(encoded.tokens == collator.unk_id)),
        patches=patches[encoded.image] if encoded.spans else none,
    )


class Column:
    """The queries or the documents of a data set of pairs.

    Args:
        name: query | document.
        items: all unique items that can be used.
        encoded: the tokenized items.
        collator: collates the items.
        image_cache: decodes images; ``None`` if no item has one.
        buckets: maximum number of bucket lengths.
        measured: result of :func:`measure`; ``None``: not known yet.
        check: of a packed set: raises DataError for an item that is not as it was packed.
        each: calls a function of each row: of several at a time where a store is waited for.

    Attributes:
        shapes: static shapes (tokens, patches) of an item in a batch, ascending.
    """

    def __init__(
        self,
        name: str,
        items: Sequence[Item],
        encoded: Encoded,
        collator: Collator,
        image_cache: ImageCache | None,
        buckets: int,
        measured: Measured | None = None,
        check: Callable[[int], None] | None = None,
        each: Callable[..., Iterable[Any]] = map,
    ):
        self.name, self.items, self.encoded, self.collator = name, items, encoded, collator
        self.size, self.patching, self._patches = collator.image
        self.measured = measured or measure(encoded, collator)
        self._check_item, self._each = check, each
        self.image_inputs = (
            ImageInputs(encoded.paths, encoded.spans, image_cache, self.patching)
            if image_cache
            else None
        )
        self._shape = PromptShape(
            tokens=0,
            images=self.measured.tiles if encoded.paths else 0,
            position_rows=self.measured.position_rows,
            taps=self.measured.taps,
        )
        self.patches = self.measured.patches
        self.shapes = self._all_shapes(buckets)
        self._token_shape: tuple[TokenShape, int] | None = None

    def _all_shapes(self, buckets: int) -> tuple[tuple[int, int], ...]:
        least, most = self.collator.lengths
        longest = int(self.encoded.length.max(initial=0))
        longest = max(longest, least) if longest else 0  # images alone have no tokens
        longest = min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, most or longest + _LENGTH_STEP)
        lengths = [n for n in packing.buckets(longest, buckets) if n >= least] if longest else [0]
        if self.patching is None or not self.encoded.paths:
            return tuple((n, 0) for n in lengths)
        if self._patches:
            return tuple((n, self._patches) for n in lengths)
        # Patches are in proportion to tokens.
        largest, padded_count = int(self.patches.max()), self.patching.padded_count
        return tuple((n, padded_count(largest * n // lengths[-1])) for n in lengths)

    @property
    def images(self) -> int:
        """I: image slots of an item, one for each tile."""
        return self._shape.images

    @property
    def position_rows(self) -> int:
        """R: rotary positions of a token."""
        return self._shape.position_rows

    def allocate_tokens(self, token_shape: TokenShape, tokens: int) -> None:
        """Add the fields of cached visual tokens to training batches.

        Args:
            token_shape: width and dtype of the tokens.
            tokens: tokens of an image, or a tile; 0: one for each patch of an image of any size.
        """
        self._token_shape = token_shape, tokens

    @property
    def num_tokens(self) -> np.ndarray:
        """i32[items]: tokens of each item, those of its image included."""
        return self.encoded.length

    def fit(self, which: np.ndarray) -> tuple[int, int]:
        """Find the smallest of ``shapes`` that fits all these items; -1 is padding."""
        which = which[which >= 0]
        tokens = int(self.encoded.length[which].max(initial=0))
        patches = int(self.patches[which].max(initial=0))
        return next(s for s in self.shapes if s[0] >= tokens and s[1] >= patches)

    def load(
        self,
        which: Sequence[int],
        shape: tuple[int, int],
        draw: Draw | None = None,
        pass_: int | None = None,
    ) -> tuple[Batch, Mapping[int, str]]:
        """Load a batch of items.

        Args:
            which: item of each row of the batch; -1 is padding.
            shape: one of ``shapes`` that fits the items.
            draw: draws the augmentation of each row's image; ``None`` is no augmentation.
            pass_: pass over the data; cached visual tokens then replace an image's pixels on a
                hit. ``None``: all images come as pixels.

        Returns:
            The batch, and the reason for each row whose image failed; such a row is padding.
        """
        source, check = self.image_inputs, self._check_item
        if check is not None:
            for item in which:
                if item >= 0:
                    check(int(item))

        def load_image(row: int) -> list[ImageInput] | str:
            assert source is not None  # it is called for rows with images
            try:
                image = int(self.encoded.image[which[row]])
                cached = not (draw or pass_ is None or source.audits(image, pass_))
                tiles = source.get(image, draw(row) if draw else (), use_cached=cached)
                self._check(tiles)
                return tiles
            except ImageError as error:
                return str(error)

        rows = [i for i, x in enumerate(which) if source and x >= 0 and self.encoded.image[x] >= 0]
        loaded = dict(zip(rows, self._each(load_image, rows), strict=True))
        failed = {row: own for row, own in loaded.items() if isinstance(own, str)}
        inputs = {row: own for row, own in loaded.items() if not isinstance(own, str)}
        kept = [-1 if row in failed else int(item) for row, item in enumerate(which)]
        batch = self.collator.collate(self.encoded, kept, self._shape._replace(tokens=shape[0]))
        token_shape = None if pass_ is None else self._token_shape
        slots_shape = (len(kept), self._shape.images)
        return self._with_images(batch, inputs, slots_shape, shape[1], token_shape), failed

    def problem(self, item: int) -> str:
        """Reason why an item's image can't be in a batch, found by decoding it; "" if it can."""
        try:
            image = int(self.encoded.image[item])
            if self.image_inputs and image >= 0:
                self._check(self.image_inputs.get(image))
            return ""
        except ImageError as error:
            return str(error)

    def _check(self, inputs: Sequence[ImageInput]) -> None:
        """Refuse an image that exceeds the batch's patches or slots, as its header didn't show."""
        pixels = inputs[0].pixels
        if self.patching and self._patches and pixels is not None:
            _, rows, columns = self.patching.grid(pixels)
            if rows * columns > self._patches:
                raise ImageError(f"more than {self._patches} patches")
        if len(inputs) > self._shape.images:
            raise ImageError(f"cut into more than {self._shape.images} tiles")

    def _with_images(
        self,
        batch: Batch,
        inputs: Mapping[int, list[ImageInput]],
        slots_shape: tuple[int, int],
        patches: int,
        token_shape: tuple[TokenShape, int] | None,
    ) -> Batch:
        if not slots_shape[1]:
            return batch
        flat = [tile for tiles in inputs.values() for tile in tiles]
        counts = [len(tiles) for tiles in inputs.values()]
        row = np.repeat(np.asarray(list(inputs), np.int64), counts)
        slot = np.concatenate([np.zeros(0, np.int64), *map(np.arange, counts)]).astype(np.int64)
        rest = (self.size, self.patching, patches, token_shape)
        return batch._replace(**collate_inputs(flat, Places(row, slot), slots_shape, *rest))
