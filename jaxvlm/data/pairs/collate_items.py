"""Tokenized items, and the collator protocol that turns them into batches for a model."""

from __future__ import annotations

import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Int64

from jaxvlm.data.conversations.collate import PromptShape
from jaxvlm.data.images.image_files import Preparation
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.pairs.examples import Item
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.data.tokenizer.text_tokenizer import TextTokenizer
from jaxvlm.types import Batch, Span

TOKENIZE_BATCH = 4096
"""Texts tokenized at once: bounds the memory of their offsets."""


class Encoded(NamedTuple):
    """Tokenized items in flat arrays; an item that can't be used has length 0 and no image."""

    tokens: Int32[np.ndarray, " total"]
    """Token ids; an image is one image token, if the model has image tokens."""
    first: Int64[np.ndarray, " items+1"]
    """Index in ``tokens`` of an item's first token."""
    length: Int32[np.ndarray, " items"]
    """Tokens of an item, image placeholders expanded."""
    image: Int32[np.ndarray, " items"]
    """Index into ``paths``; -1 is none."""
    paths: Sequence[str]
    """Each image file once."""
    spans: Sequence[Span]
    """Token span of each image; () if the model has no image tokens."""
    truncated: int
    """Number of texts that were truncated."""

    def ids(self, item: int) -> Int32[np.ndarray, " n"]:
        """Token ids of one item."""
        return self.tokens[self.first[item] : self.first[item + 1]]


Rejected = dict[int, tuple[str, str]]
"""Item -> (reason, detail) why it can't be used, see ``Problem``."""


@runtime_checkable
class Collator(Protocol):
    """Tokenizes items and collates them into batches in the input format of a model."""

    @property
    def prepare(self) -> Preparation | None:
        """Preprocessing of images; ``None`` if the model takes no images."""
        ...

    @property
    def image(self) -> tuple[int, Patching | None, int]:
        """Image format: height and width in pixels (0: any), how images of any size are cut into
        patches, and the number of patches that each is padded to (0: no fixed number)."""
        ...

    @property
    def tokenizer(self) -> ChatTokenizer | TextTokenizer | None:
        """Tokenizes the texts; ``None`` if the model takes none."""
        ...

    @property
    def span_of(self) -> Callable[[str], Span] | None:
        """Measures the token span of an image file; ``None`` if the model has no image tokens."""
        ...

    @property
    def unk_id(self) -> int:
        """Id of the token of unknown words; -1 if there is none."""
        ...

    @property
    def lengths(self) -> tuple[int, int]:
        """Minimum and maximum number of tokens of an item; 0 is no limit."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Settings that batches are a function of, besides the items; JSON-able."""
        ...

    def encode(self, items: Sequence[Item], max_length: int) -> tuple[Encoded, Rejected]:
        """Tokenize items; longer texts are truncated to ``max_length`` tokens."""
        ...

    def collate(self, items: Encoded, which: Sequence[int], shape: PromptShape) -> Batch:
        """Collate items, -1 is padding; the caller fills in pixels and keys of the images."""
        ...


class TokenIds:
    """Token ids of items, added in their order: flat, since millions of small arrays take memory.

    Args:
        count: number of items; those that none are added of have none.
    """

    def __init__(self, count: int):
        self._flat = array.array("i")
        self._length = np.zeros(count, np.int64)
        self._last = -1

    def add(self, item: int, ids: Sequence[int] | np.ndarray) -> None:
        """Set the ids of an item, i32 or whole numbers, after those of all items before it."""
        assert item > self._last, "items come in their order"
        self._last = item
        before = len(self._flat)
        if isinstance(ids, np.ndarray):
            self._flat.frombytes(ids.astype(np.int32, copy=False).tobytes())
        else:
            self._flat.extend(ids)
        self._length[item] = len(self._flat) - before

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """i32[total], all ids, and i64[items], how many each item has."""
        return np.frombuffer(self._flat, np.int32), self._length


def encoded(
    items: Sequence[Item],
    ids: TokenIds,
    rejected: Rejected,
    spans_by_path: Mapping[str, Span] | None,
    truncated: int,
) -> Encoded:
    """Build the result of :meth:`Collator.encode`.

    Args:
        items: all items.
        ids: token ids of the items.
        rejected: items that can't be used.
        spans_by_path: token span of each image; ``None`` if the model has no image tokens.
        truncated: number of texts that were truncated.
    """
    indices: dict[str, int] = {}
    image = [
        indices.setdefault(item.image, len(indices)) if item.image and i not in rejected else -1
        for i, item in enumerate(items)
    ]
    tokens, length = ids.arrays()
    first = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
    spans = tuple(spans_by_path[path] for path in indices) if spans_by_path is not None else ()
    if spans:
        extra = np.asarray([len(span.ids) - 1 for span in spans] + [0], np.int64)
        length = length + extra[image]
    return Encoded(
        tokens,
        first,
        length.astype(np.int32),
        np.asarray(image, np.int32),
        tuple(indices),
        spans,
        truncated,
    )


def take(items: Encoded, chosen: Sequence[int]) -> Encoded:
    """Select some items, with the images that they use."""
    which = np.asarray(chosen, np.int64)
    if np.array_equal(which, np.arange(len(items.image))):
        return items
    indices: dict[int, int] = {}
    old = items.image[which].tolist()
    image = [indices.setdefault(p, len(indices)) if p >= 0 else -1 for p in old]
    ids = TokenIds(len(which))
    for i, item in enumerate(chosen):
        ids.add(i, items.ids(item))
    tokens, count = ids.arrays()
    return items._replace(
        tokens=tokens,
        first=np.concatenate([[0], np.cumsum(count)]).astype(np.int64),
        length=items.length[which],
        image=np.asarray(image, np.int32),
        paths=tuple(items.paths[p] for p in indices),
        spans=tuple(items.spans[p] for p in indices) if items.spans else (),
    )
