"""Items as ids, and how a model wants them: as rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Int64

from jaxvlm.data.examples import Item
from jaxvlm.data.images import Preparation
from jaxvlm.data.patches import Patching
from jaxvlm.data.prompt_rows import PromptShape
from jaxvlm.types import Batch, Span

CHUNK = 4096
"""Texts tokenized at once: bounds the memory of their offsets."""


class Encoded(NamedTuple):
    """Items as ids, in flat arrays; what can't be encoded has length 0 and no picture."""

    tokens: Int32[np.ndarray, " total"]
    """A picture is one token, where it has any."""
    first: Int64[np.ndarray, " items+1"]
    """Index in ``tokens`` of an item's first one."""
    length: Int32[np.ndarray, " items"]
    """Tokens of the row, pictures in full."""
    picture: Int32[np.ndarray, " items"]
    """Index into ``paths``; -1 is none."""
    paths: tuple[str, ...]
    spans: tuple[Span, ...]
    """What each picture is in a row; () where rows have no tokens of pictures."""
    cut: int
    """Texts that were longer than allowed."""

    def ids(self, item: int) -> Int32[np.ndarray, " n"]:
        """Of one item."""
        return self.tokens[self.first[item] : self.first[item + 1]]


Bad = dict[int, tuple[str, str]]
"""Item -> why it can't be used: reason and detail, see ``Problem``."""


@runtime_checkable
class RowFormat(Protocol):
    """How items become rows: what a model wants of them."""

    @property
    def prepare(self) -> Preparation | None:
        """How a picture becomes pixels; ``None``: the model takes no pictures."""
        ...

    @property
    def picture(self) -> tuple[int, Patching | None, int]:
        """Pixels a side (0: any), how pictures of any size are cut, patches if all have as many."""
        ...

    @property
    def lengths(self) -> tuple[int, int]:
        """Least and most tokens of a row; 0 is no bound."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What rows are a function of besides the items; JSON-able."""
        ...

    def encode(self, items: Sequence[Item], max_length: int) -> tuple[Encoded, Bad]:
        """Ids of items; longer texts are cut."""
        ...

    def lay(self, items: Encoded, which: Sequence[int], shape: PromptShape) -> Batch:
        """Rows of items, -1 is padding; pixels and keys of pictures are the caller's."""
        ...


def encoded(
    items: Sequence[Item],
    ids: Mapping[int, Sequence[int] | np.ndarray],
    bad: Bad,
    measured: Mapping[str, Span] | None,
    cut: int,
) -> Encoded:
    """What a :class:`RowFormat` makes of items.

    Args:
        items: all of them.
        ids: of those that have tokens.
        bad: those that can't be used.
        measured: what each picture is in a row; ``None`` where rows have no tokens of pictures.
        cut: texts that were longer than allowed.
    """
    number: dict[str, int] = {}
    picture = [
        number.setdefault(item.image, len(number)) if item.image and i not in bad else -1
        for i, item in enumerate(items)
    ]
    rows = [np.asarray(ids.get(i, ()), np.int32) for i in range(len(items))]
    length = np.asarray([len(row) for row in rows], np.int64)
    first = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
    spans = tuple(measured[path] for path in number) if measured is not None else ()
    if spans:
        extra = np.asarray([len(span.ids) - 1 for span in spans] + [0], np.int64)
        length = length + extra[picture]
    return Encoded(
        np.concatenate([np.zeros(0, np.int32), *rows]),
        first,
        length.astype(np.int32),
        np.asarray(picture, np.int32),
        tuple(number),
        spans,
        cut,
    )


def take(items: Encoded, chosen: Sequence[int]) -> Encoded:
    """Some of the items, and of the pictures those that they have."""
    number: dict[int, int] = {}
    old = items.picture[list(chosen)].tolist()
    picture = [number.setdefault(p, len(number)) if p >= 0 else -1 for p in old]
    rows = [items.ids(i) for i in chosen]
    return items._replace(
        tokens=np.concatenate([np.zeros(0, np.int32), *rows]),
        first=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        length=items.length[list(chosen)],
        picture=np.asarray(picture, np.int32),
        paths=tuple(items.paths[p] for p in number),
        spans=tuple(items.spans[p] for p in number) if items.spans else (),
    )
