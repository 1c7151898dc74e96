"""One batch in readable form, for ``--dry_run``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxvlm.data.conversations.collate import Meta
from jaxvlm.data.conversations.dataset import Dataset
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.types import Batch


def batch_preview(
    batch: Batch, meta: Meta, dataset: Dataset, tokenizer: ChatTokenizer, rows: int = 1
) -> Iterator[str]:
    """Lines that show what is trained on: ``[[brackets]]`` mark tokens with loss.

    Args:
        batch: numpy fields.
        meta: which record each segment is.
        dataset: where records' ids are.
        tokenizer: decodes.
        rows: number of sequences that are shown.
    """
    length = batch.tokens.shape[1]
    yield f"batch: {batch.tokens.shape[0]} sequences x {length} tokens"
    for row, pairs in enumerate(meta.by_sequence()[:rows]):
        names = {segment: dataset.records[index].id for segment, index in pairs}
        filled = int((batch.segment[row] > 0).sum())
        yield f"sequence {row}: {filled} of {length} tokens filled"
        for segment in range(1, int(batch.segment[row].max()) + 1):
            places = np.flatnonzero(batch.segment[row] == segment)
            parent = 0 if batch.parent is None else int(batch.parent[row, places[0]])
            of = f", child of {parent}" if parent else ""
            text = _marked(batch, row, places, tokenizer)
            yield f"  segment {segment}{of} ({names.get(segment, 'shared prefix')}): {text}"


def _marked(batch: Batch, row: int, places: np.ndarray, tokenizer: ChatTokenizer) -> str:
    """Tokens in words; runs of image tokens are counted, trained tokens bracketed."""
    parts: list[str] = []
    images = 0
    for place in places.tolist():
        token = int(batch.tokens[row, place])
        if token == tokenizer.image_id:
            images += 1
            continue
        if images:
            parts.append(f"<image x{images}>")
            images = 0
        word = tokenizer.decode([token], skip_special=False)
        parts.append(f"[[{word}]]" if batch.loss_weight[row, place] > 0 else word)
    if images:
        parts.append(f"<image x{images}>")
    return " ".join(parts)
