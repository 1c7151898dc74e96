"""One side of a data set of pairs: its different items, and rows of any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxvlm.data import images, packing, spans
from jaxvlm.data.batch import Places, lay_pictures, lay_tokens
from jaxvlm.data.errors import ImageError
from jaxvlm.data.examples import Item
from jaxvlm.data.item_rows import Encoded, RowFormat
from jaxvlm.data.prompt_rows import PromptShape
from jaxvlm.data.slots import Given
from jaxvlm.data.views import View, Views
from jaxvlm.types import Batch

Draw = Callable[[int], tuple[int, ...]]
"""Row -> its picture's augmentation, see :func:`jaxvlm.data.images.draw`."""


_LENGTH_STEP = 8
"""The longest rows are padded to a multiple of it, where the model has room."""


class Side:
    """Queries, or documents.

    Args:
        name: query | document.
        items: all different ones, which can be used.
        encoded: their ids.
        rows: how they become rows.
        pictures: decodes them; ``None`` where no item has one.
        buckets: lengths of rows to choose from.

    Attributes:
        shapes: (tokens, patches) of the rows that batches may have, ascending.
    """

    def __init__(
        self,
        name: str,
        items: Sequence[Item],
        encoded: Encoded,
        rows: RowFormat,
        pictures: images.Pictures | None,
        buckets: int,
    ):
        self.name, self.items, self.encoded, self.rows = name, items, encoded, rows
        self.size, self.patching, self._patches = rows.picture
        self.views = (
            Views(encoded.paths, encoded.spans, pictures, self.patching) if pictures else None
        )
        used = {id(span): span for span in encoded.spans}.values()
        tiles = max((len(span.starts) for span in used), default=1)
        self._shape = PromptShape(
            tokens=0,
            images=tiles if encoded.paths else 0,
            position_rows=max((len(span.positions) for span in used), default=1),
            taps=spans.most_taps(used),
        )
        per_token = self.patching.per_token if self.patching else 0
        of_picture = [per_token * int((span.tile > 0).sum()) for span in encoded.spans]
        # Of a picture without tokens the size is not known here: all get as many places.
        known = np.asarray([*of_picture, 0], np.int64)
        self.patches = known[encoded.picture] if encoded.spans else np.zeros(len(items), np.int64)
        self.shapes = self._all_shapes(buckets)
        self._given: tuple[Given, int] | None = None

    def _all_shapes(self, buckets: int) -> tuple[tuple[int, int], ...]:
        least, most = self.rows.lengths
        longest = int(self.encoded.length.max(initial=0))
        longest = max(longest, least) if longest else 0  # pictures alone have no tokens
        longest = min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, most or longest + _LENGTH_STEP)
        lengths = [n for n in packing.buckets(longest, buckets) if n >= least] if longest else [0]
        if self.patching is None or not self.encoded.paths:
            return tuple((n, 0) for n in lengths)
        if self._patches:
            return tuple((n, self._patches) for n in lengths)
        # A row of half the tokens has half the patches.
        largest, room = int(self.patches.max()), self.patching.room
        return tuple((n, room(largest * n // lengths[-1])) for n in lengths)

    @property
    def images(self) -> int:
        """I: places for pictures, or their tiles, in a row."""
        return self._shape.images

    @property
    def position_rows(self) -> int:
        """R: rotary positions of a token."""
        return self._shape.position_rows

    def give_tokens(self, given: Given, tokens: int) -> None:
        """From now on, rows for training have room for pictures' visual tokens.

        Args:
            given: what they are like.
            tokens: of a picture, or a tile; 0: one of each patch of a picture of any size.
        """
        self._given = given, tokens

    @property
    def num_tokens(self) -> np.ndarray:
        """i32[items]: of each item's row."""
        return self.encoded.length

    def fit(self, which: np.ndarray) -> tuple[int, int]:
        """The smallest of ``shapes`` that fits all these items, -1 being none."""
        which = which[which >= 0]
        tokens = int(self.encoded.length[which].max(initial=0))
        patches = int(self.patches[which].max(initial=0))
        return next(s for s in self.shapes if s[0] >= tokens and s[1] >= patches)

    def load(
        self,
        which: Sequence[int],
        shape: tuple[int, int],
        drawn: Draw | None = None,
        pass_: int | None = None,
    ) -> tuple[Batch, Mapping[int, str]]:
        """Rows of items.

        Args:
            which: items, row by row; -1 is a row of padding.
            shape: one of ``shapes`` that fits them.
            drawn: how each row's picture is augmented; ``None``: not at all.
            pass_: the pass over the data in which a picture's visual tokens, where they are known,
                do as well as its pixels; ``None``: they don't.

        Returns:
            The batch, and of rows whose picture failed the reason; they are padding.
        """
        failed: dict[int, str] = {}
        views: dict[int, list[View]] = {}
        for row, item in enumerate(which):
            if item < 0 or self.views is None or self.encoded.picture[item] < 0:
                continue
            try:
                picture = int(self.encoded.picture[item])
                look = pass_ is not None and not drawn and not self.views.audits(picture, pass_)
                found = self.views.get(picture, drawn(row) if drawn else (), look=look)
                self._check(found)
                views[row] = found
            except ImageError as error:
                failed[row] = str(error)
        kept = [-1 if row in failed else int(item) for row, item in enumerate(which)]
        batch = self.rows.lay(self.encoded, kept, self._shape._replace(tokens=shape[0]))
        given = None if pass_ is None else self._given
        seats = (len(kept), self._shape.images)
        return self._with_pictures(batch, views, seats, shape[1], given), failed

    def _check(self, views: Sequence[View]) -> None:
        """Refuse a picture for which there is no room; its header did not tell."""
        pixels = views[0].pixels
        if self.patching and self._patches and pixels is not None:
            _, rows, columns = self.patching.grid(pixels)
            if rows * columns > self._patches:
                raise ImageError(f"more than {self._patches} patches")
        if len(views) > self._shape.images:
            raise ImageError(f"cut in more than {self._shape.images} tiles")

    def _with_pictures(
        self,
        batch: Batch,
        views: Mapping[int, list[View]],
        seats: tuple[int, int],
        patches: int,
        given: tuple[Given, int] | None,
    ) -> Batch:
        if not seats[1]:
            return batch
        flat = [view for found in views.values() for view in found]
        counts = [len(found) for found in views.values()]
        row = np.repeat(np.asarray(list(views), np.int64), counts)
        slot = np.concatenate([np.zeros(0, np.int64), *map(np.arange, counts)]).astype(np.int64)
        places = Places(row, slot)
        key = np.zeros((*seats, 4), np.uint32)
        if flat:
            key[row, slot] = [view.key for view in flat]
        # A picture that is a vector has no patches that anything reads.
        grids = [view.grid or (0, 0, 0) for view in flat]
        how = (self.size, self.patching, patches, grids)
        laid = lay_pictures([view.pixels for view in flat], places, seats, *how)
        if given:
            kind, tokens = given
            shape = (seats[0], *((seats[1], tokens) if tokens else (patches,)), kind.width)
            found = [view.tokens for view in flat]
            laid |= lay_tokens(found, places, shape, seats[1], kind.dtype, laid.get("grid"))
        return batch._replace(image_key=key, **laid)
