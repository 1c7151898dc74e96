"""Items -> rows of a text encoder or a dual encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.data.examples import Item
from jaxvlm.data.images import Preparation
from jaxvlm.data.item_rows import CHUNK, Bad, Encoded, encoded
from jaxvlm.data.patches import Patching
from jaxvlm.data.processor import Processor
from jaxvlm.data.prompt_rows import PromptShape
from jaxvlm.data.texts import TextTokenizer
from jaxvlm.types import Batch


class TextRows(NamedTuple):
    """Rows of a text encoder or a dual encoder: a text, a picture, or one of each."""

    tokenizer: TextTokenizer | None
    """``None``: the model takes no texts."""
    pictures: Processor | None = None
    """``None``: the model takes no pictures."""

    @property
    def prepare(self) -> Preparation | None:
        """See :class:`RowFormat`."""
        return self.pictures.prepare if self.pictures else None

    @property
    def picture(self) -> tuple[int, Patching | None, int]:
        """See :class:`RowFormat`."""
        found = self.pictures
        return (found.size, found.patching, found.most_patches) if found else (0, None, 0)

    @property
    def lengths(self) -> tuple[int, int]:
        """See :class:`RowFormat`."""
        if self.tokenizer is None:
            return 0, 0
        style = self.tokenizer.style
        return (style.max_length if style.see_padding else 0), style.max_length

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`RowFormat`."""
        return {"rows": "text", "pictures": self.prepare.fingerprint if self.prepare else ""}

    def encode(self, items: Sequence[Item], max_length: int) -> tuple[Encoded, Bad]:
        """See :class:`RowFormat`; an instruction stands right before the text."""
        bad: Bad = {}
        for i, item in enumerate(items):
            if item.image and self.pictures is None:
                bad[i] = "a picture, and the model takes none", item.image
            elif item.words and self.tokenizer is None:
                bad[i] = "a text, and the model takes none", item.words[:60]
        told = [i for i, item in enumerate(items) if item.words and i not in bad]
        ids: dict[int, list[int]] = {}
        cut = 0
        if self.tokenizer is not None:
            most = min(max_length, self.tokenizer.style.max_length)
            for begin in range(0, len(told), CHUNK):
                chunk = told[begin : begin + CHUNK]
                said = [items[i].instruction + items[i].words for i in chunk]
                found, longer = self.tokenizer.encode_within(said, most)
                ids.update(zip(chunk, found, strict=True))
                cut += longer
        return encoded(items, ids, bad, None, cut), bad

    def lay(self, items: Encoded, which: Sequence[int], shape: PromptShape) -> Batch:
        """See :class:`RowFormat`; T is 0 where the side has no texts."""
        count = len(which)
        tokens = np.zeros((count, shape.tokens), np.int32)
        segment = np.zeros((count, shape.tokens), np.int32)
        texts = [items.ids(i).tolist() if i >= 0 else [] for i in which]
        if self.tokenizer is not None and shape.tokens:
            tokens, segment = self.tokenizer.rows(texts, count, shape.tokens)
            segment[[not len(text) for text in texts]] = 0
        has = [i >= 0 and items.picture[i] >= 0 for i in which]
        places = np.arange(shape.tokens, dtype=np.int32)
        return Batch(
            tokens,
            np.zeros(tokens.shape, np.float32),
            np.tile(places, (count, 1, 1)),
            segment,
            image_start=np.where(has, 0, -1).astype(np.int32)[:, None] if shape.images else None,
        )
