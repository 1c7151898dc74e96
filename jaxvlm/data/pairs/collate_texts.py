"""Collate items into batches of a text encoder or a dual encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.data.conversations.collate import PromptShape
from jaxvlm.data.images.image_files import Preparation
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.images.processor import Processor
from jaxvlm.data.pairs.collate_items import (
    TOKENIZE_BATCH,
    Encoded,
    Rejected,
    TokenIds,
    encoded,
)
from jaxvlm.data.pairs.examples import Item
from jaxvlm.data.tokenizer.text_tokenizer import TextTokenizer
from jaxvlm.types import Batch


class TextCollator(NamedTuple):
    """Collator of a text encoder or a dual encoder: a text, an image, or one of each per item."""

    tokenizer: TextTokenizer | None
    """``None`` if the model takes no texts."""
    image_processor: Processor | None = None
    """``None`` if the model takes no images."""

    @property
    def prepare(self) -> Preparation | None:
        """See :class:`Collator`."""
        return self.image_processor.prepare if self.image_processor else None

    @property
    def image(self) -> tuple[int, Patching | None, int]:
        """See :class:`Collator`."""
        own = self.image_processor
        return (own.size, own.patching, own.max_patches) if own else (0, None, 0)

    @property
    def span_of(self) -> None:
        """See :class:`Collator`."""
        return None

    @property
    def unk_id(self) -> int:
        """See :class:`Collator`."""
        return self.tokenizer.unk_id if self.tokenizer else -1

    @property
    def lengths(self) -> tuple[int, int]:
        """See :class:`Collator`."""
        if self.tokenizer is None:
            return 0, 0
        style = self.tokenizer.style
        return (style.max_length if style.see_padding else 0), style.max_length

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`Collator`."""
        return {"rows": "text", "images": self.prepare.fingerprint if self.prepare else ""}

    def encode(self, items: Sequence[Item], max_length: int) -> tuple[Encoded, Rejected]:
        """See :class:`Collator`; an instruction is put directly before the text."""
        rejected: Rejected = {}
        for i, item in enumerate(items):
            if item.image and self.image_processor is None:
                rejected[i] = "it has an image, but the model takes no images", item.image
            elif item.words and self.tokenizer is None:
                rejected[i] = "it has a text, but the model takes no texts", item.words[:60]
        with_text = [i for i, item in enumerate(items) if item.words and i not in rejected]
        ids = TokenIds(len(items))
        truncated = 0
        if self.tokenizer is not None:
            most = min(max_length, self.tokenizer.style.max_length)
            for begin in range(0, len(with_text), TOKENIZE_BATCH):
                batch = with_text[begin : begin + TOKENIZE_BATCH]
                texts = [items[i].instruction + items[i].words for i in batch]
                encodings, longer = self.tokenizer.encode_within(texts, most)
                for i, own in zip(batch, encodings, strict=True):
                    ids.add(i, own)
                truncated += longer
        return encoded(items, ids, rejected, None, truncated), rejected

    def collate(self, items: Encoded, which: Sequence[int], shape: PromptShape) -> Batch:
        """See :class:`Collator`; T is 0 if none of the column's items has a text."""
        count = len(which)
        tokens = np.zeros((count, shape.tokens), np.int32)
        segment = np.zeros((count, shape.tokens), np.int32)
        texts = [items.ids(i).tolist() if i >= 0 else [] for i in which]
        if self.tokenizer is not None and shape.tokens:
            tokens, segment = self.tokenizer.pad(texts, count, shape.tokens)
            segment[[not len(text) for text in texts]] = 0
        has = [i >= 0 and items.image[i] >= 0 for i in which]
        places = np.arange(shape.tokens, dtype=np.int32)
        return Batch(
            tokens,
            np.zeros(tokens.shape, np.float32),
            np.tile(places, (count, 1, 1)),
            segment,
            image_start=np.where(has, 0, -1).astype(np.int32)[:, None] if shape.images else None,
        )
