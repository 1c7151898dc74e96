"""The contents of several sources as one: views that copy nothing of what is mapped from files."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxvlm.data.conversations.content import Content, Facts
from jaxvlm.data.conversations.packing import Pieces
from jaxvlm.data.conversations.tokenize import Corpus

_ALL = ("digest", "unknown", "has_parents", "has_images", "has_videos")
"""Facts that are not the largest of the sources'."""


def join(contents: Mapping[str, Content]) -> Content:
    """The contents of the sources of a mixture, one after another.

    Args:
        contents: source -> what it holds.

    Returns:
        All of it; ids begin with the name of their source and a slash.
    """
    parts, names = list(contents.values()), list(contents)
    corpora, pieces = [x.corpus for x in parts], [x.pieces for x in parts]
    firsts = {
        "records": _firsts(len(x.records) for x in parts),
        "corpus": _firsts(len(x.first) for x in corpora),
        "tokens": _firsts(len(x.tokens) for x in corpora),
        "segments": _firsts(len(x.record) for x in pieces),
        "pieces": _firsts(len(x.num_tokens) for x in pieces),
    }
    paths, spans, number = _images(parts)

    def arrays(of: Sequence[Any], name: str, shift: str = "") -> Any:
        added = firsts[shift][:-1] if shift else [0] * len(parts)
        return Joined([getattr(x, name) for x in of], added)

    def images(of: Sequence[Any]) -> Any:
        return Items([x.images for x in of], lambda part, own: tuple(map(number[part], own)))

    start: Any = Joined(
        [*(x.start[:-1] for x in pieces), np.zeros(1, np.int64)], firsts["segments"]
    )
    return Content(
        records=Items(
            [x.records for x in parts],
            lambda part, own: own._replace(id=f"{names[part]}/{own.id}"),
        ),
        corpus=Corpus(
            tokens=arrays(corpora, "tokens"),
            loss=arrays(corpora, "loss"),
            first=arrays(corpora, "first", "tokens"),
            last=arrays(corpora, "last", "tokens"),
            length=arrays(corpora, "length"),
            images=images(corpora),
            paths=paths,
            spans=spans,
            source=arrays(corpora, "source", "records"),
        ),
        pieces=Pieces(
            start=start,
            record=arrays(pieces, "record", "corpus"),
            first=arrays(pieces, "first", "tokens"),
            last=arrays(pieces, "last", "tokens"),
            length=arrays(pieces, "length"),
            offset=arrays(pieces, "offset"),
            images=images(pieces),
            num_tokens=arrays(pieces, "num_tokens"),
            num_images=arrays(pieces, "num_images"),
            num_patches=arrays(pieces, "num_patches"),
        ),
        facts=_facts([x.facts for x in parts]),
        tokens=sum(x.tokens for x in parts),
        parts=[
            part._replace(problems=[x._replace(id=f"{name}/{x.id}") for x in part.problems])
            for name, own in contents.items()
            for part in own.parts
        ],
        check=_check([x.check for x in parts], firsts["pieces"]),
        each=next((x.each for x in parts if x.each is not map), map),
        sources=tuple(parts),
    )


def _images(
    parts: Sequence[Content],
) -> tuple[Sequence[str], Sequence[Any], list[Callable[[int], int]]]:
    """Paths and spans of all images, and for each source: its image's number -> that among them.

    A file that several sources have is one image; a packed source has files of its own.
    """
    known: dict[str, int] = {}
    spans: list[Any] = []
    for own in (x.corpus for x in parts if not x.check):
        for path, span in zip(own.paths, own.spans, strict=True):
            if known.setdefault(path, len(known)) == len(spans):
                spans.append(span)
    paths: list[Sequence[str]] = [list(known)]
    all_spans: list[Sequence[Any]] = [spans]
    number: list[Callable[[int], int]] = []
    first = len(known)
    for part in parts:
        if part.check:
            paths.append(part.corpus.paths)
            all_spans.append(part.corpus.spans)
            number.append(functools.partial(operator.add, first))
            first += len(part.corpus.paths)
        else:
            number.append([known[path] for path in part.corpus.paths].__getitem__)
    return Items(paths), Items(all_spans), number


class Joined:
    """Arrays one after another, with a number added to the items of each that are not negative.

    Args:
        parts: arrays of one dim.
        added: to the items of each.
    """

    def __init__(self, parts: Sequence[np.ndarray], added: Sequence[int]):
        self._parts, self._added = parts, added
        self._firsts = np.asarray(_firsts(map(len, parts)))
        self.dtype = np.result_type(*parts)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: Any) -> Any:
        """One item, or those of a slice or of an array of indices, as of an array."""
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        places = np.asarray(index)
        if places.size and not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(f"index out of range of {len(self)} items")
        which = np.searchsorted(self._firsts, places, side="right") - 1
        out = np.empty(places.shape, self.dtype)
        for i in np.unique(which).tolist():
            here = which == i
            own = self._parts[i][places[here] - self._firsts[i]]
            out[here] = np.where(own < 0, own, own + self._added[i]) if self._added[i] else own
        return out[()]


class Items(Sequence[Any]):
    """Lists one after another.

    Args:
        parts: the lists.
        of: (index of a list, its item) -> the item.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Any]],
        of: Callable[[int, Any], Any] = lambda part, item: item,
    ):
        self._parts, self._of, self._firsts = parts, of, _firsts(map(len, parts))

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: Any) -> Any:
        place = len(self) + index if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        part = int(np.searchsorted(self._firsts, place, side="right")) - 1
        return self._of(part, self._parts[part][place - self._firsts[part]])


def _firsts(counts: Any) -> list[int]:
    """Where each of some parts begins, and where the last one ends."""
    return [0, *np.cumsum(list(counts)).tolist()]


def _facts(parts: Sequence[Facts]) -> Facts:
    largest = {
        name: max(getattr(x, name) for x in parts) for name in Facts._fields if name not in _ALL
    }
    text = " ".join(x.digest for x in parts)
    return Facts(
        **largest,
        digest=hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        unknown=sum(x.unknown for x in parts),
        has_parents=any(x.has_parents for x in parts),
        has_images=any(x.has_images for x in parts),
        has_videos=any(x.has_videos for x in parts),
    )


def _check(
    checks: Sequence[Callable[[int], None] | None], firsts: Sequence[int]
) -> Callable[[int], None] | None:
    """Check a piece where its source has a check."""
    if not any(checks):
        return None

    def check(piece: int) -> None:
        part = int(np.searchsorted(firsts, piece, side="right")) - 1
        if (own := checks[part]) is not None:
            own(piece - firsts[part])

    return check
