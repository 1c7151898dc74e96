"""Lists whose items are parts of flat arrays, which may be mapped from files and take no memory."""

from __future__ import annotations

import abc
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxvlm.data.errors import DataError
from jaxvlm.data.packed import checks
from jaxvlm.types import Sources, Span


class _Parts(Sequence[Any]):
    """``start[i]:start[i+1]`` is item i of ``values``."""

    def __init__(self, start: np.ndarray, values: np.ndarray):
        self._start, self._values = start, values

    def __len__(self) -> int:
        return len(self._start) - 1

    def _part(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._values[self._start[index] : self._start[index + 1]]


class Groups(_Parts):
    """Tuples of numbers."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._part(index).tolist())


class Strings(_Parts):
    """Strings, each but empty ones behind a ``prefix``."""

    def __init__(self, start: np.ndarray, values: np.ndarray, *, prefix: str = ""):
        super().__init__(start, values)
        self._prefix = prefix

    def __getitem__(self, index: Any) -> Any:
        text = self._part(index).tobytes().decode("utf-8", "surrogateescape")
        return text and self._prefix + text


class Lazy(Sequence[Any]):
    """A sequence whose items are made when they are asked for, by ``item``."""

    @abc.abstractmethod
    def item(self, index: int) -> Any:
        """Make an item.

        Args:
            index: from 0 to the length.
        """

    def __getitem__(self, index: Any) -> Any:
        return self.item(index) if isinstance(index, int) and index >= 0 else self._other(index)

    def _other(self, index: Any) -> Any:
        places = range(len(self))[index]  # with its IndexError
        return self.item(places) if isinstance(places, int) else [self.item(i) for i in places]


class Chosen(Sequence[Any]):
    """Some items of a sequence.

    Args:
        items: all items.
        which: indices of those.
    """

    def __init__(self, items: Sequence[Any], which: np.ndarray):
        self._items, self._which = items, which

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: Any) -> Any:
        return self._items[int(self._which[index])]


class Concatenated(Sequence[Any]):
    """Items of one sequence, then those of another."""

    def __init__(self, first: Sequence[Any], second: Sequence[Any]):
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def __getitem__(self, index: Any) -> Any:
        own = len(self._first)
        return self._first[index] if index < own else self._second[index - own]


class ArrayFiles:
    """Arrays of a packed set, mapped into memory.

    Args:
        spec: the set's folder or URL.
        folder: where they are, as ``.npy``.
        prefix: of their names.
    """

    def __init__(self, spec: str, folder: pathlib.Path, prefix: str = ""):
        self._spec, self._folder, self._prefix = spec, folder, prefix

    def __getitem__(self, name: str) -> np.ndarray:
        """Map an array; raises DataError where its file has no such header."""
        path = self._folder / f"{self._prefix}{name}.npy"
        try:
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (ValueError, EOFError, SyntaxError, TypeError, OverflowError, MemoryError):
            raise checks.damaged(path.name, self._spec, self._folder) from None

    def strings(self, name: str, *, prefix: str = "") -> Strings:
        """The strings that :func:`flat` made arrays of, each but empty ones behind a ``prefix``."""
        return Strings(self[f"{name}_start"], self[name], prefix=prefix)

    def groups(self, name: str) -> Groups:
        """The tuples of numbers that :func:`flat` made arrays of."""
        return Groups(self[f"{name}_start"], self[name])

    def spans(self) -> Spans:
        """The token spans that :meth:`Spans.arrays` made arrays of."""
        return Spans(self.__getitem__)


def save(folder: pathlib.Path, arrays: Mapping[str, np.ndarray], prefix: str = "") -> None:
    """Write arrays for :class:`ArrayFiles`."""
    for name, array in arrays.items():
        np.save(folder / f"{prefix}{name}.npy", array, allow_pickle=False)


def flat(name: str, items: Sequence[Sequence[int]] | Sequence[str]) -> dict[str, np.ndarray]:
    """Arrays of :class:`Groups`, or of :class:`Strings`: ``NAME`` and ``NAME_start``."""
    parts: list[Any] = [
        item.encode("utf-8", "surrogateescape") if isinstance(item, str) else item for item in items
    ]
    if items and isinstance(items[0], str):
        values = np.frombuffer(b"".join(parts), np.uint8)
    else:
        values = np.fromiter(itertools.chain.from_iterable(parts), np.int64)
    counts = np.fromiter(map(len, parts), np.int64, len(parts))
    return {name: values, f"{name}_start": np.concatenate([[0], np.cumsum(counts)])}


class Spans(Sequence[Any]):
    """Token spans of images, of which equal ones are stored once.

    Args:
        read: name -> array of :meth:`arrays`.
    """

    def __init__(self, read: Callable[[str], np.ndarray]):
        self._of = {name: read(f"span_{name}") for name in _OF_SPAN}
        self._leads = Strings(read("span_lead_start"), read("span_lead"))
        self._made: dict[int, Span] = {}

    @staticmethod
    def arrays(spans: Sequence[Span]) -> dict[str, np.ndarray]:
        """Arrays to store, by name."""
        unique = list({id(span): span for span in spans}.values())
        number = {id(span): i for i, span in enumerate(unique)}
        inside = [span.sources for span in unique]
        none = np.zeros(0)
        weights = [none if x is None or x.weight is None else x.weight for x in inside]
        features = [none if x is None else x.feature for x in inside]
        found = {
            "which": np.asarray([number[id(span)] for span in spans], np.int64),
            "ids": _joined([span.ids for span in unique], np.int32),
            "ids_end": _ends([span.ids for span in unique]),
            "tile": _joined([span.tile for span in unique], np.int32),
            "positions": _joined([span.positions for span in unique], np.int32),
            "positions_end": _ends([span.positions for span in unique]),
            "rows": np.asarray([len(span.positions) for span in unique], np.int64),
            "advance": np.asarray([span.advance for span in unique], np.int64),
            "feature": _joined(features, np.int32),
            "feature_end": _ends(features),
            "weight": _joined(weights, np.float32),
            "weight_end": _ends(weights),
            "tiles": np.asarray([-1 if x is None else x.tiles for x in inside], np.int64),
            "per_tile": np.asarray([0 if x is None else x.per_tile for x in inside], np.int64),
        }
        assert found.keys() == set(_OF_SPAN)
        leads = flat("span_lead", [span.lead for span in unique])
        return {f"span_{name}": array for name, array in found.items()} | leads

    def __len__(self) -> int:
        return len(self._of["which"])

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(self._of["which"][index])
        if number not in self._made:  # all threads get the same one, which is never freed
            self._made.setdefault(number, self._make(number))
        return self._made[number]

    def _make(self, i: int) -> Span:
        ids, tile = self._cut("ids", "ids", i), self._cut("tile", "ids", i)
        positions = self._cut("positions", "positions", i).reshape(
            int(self._of["rows"][i]), len(ids)
        )
        if len(tile) and not 0 <= int(tile.min()) <= int(tile.max()) <= len(tile):
            raise DataError(
                f"tokens of images ({i}) are not as they were packed; `jaxvlm data verify`"
            )
        sources = None
        if (tiles := int(self._of["tiles"][i])) >= 0:
            feature = self._cut("feature", "feature", i)
            feature = feature.reshape(len(ids), len(feature) // max(len(ids), 1))
            weight = self._cut("weight", "weight", i)
            per_tile = int(self._of["per_tile"][i])
            sources = Sources(
                feature, weight.reshape(feature.shape) if len(weight) else None, tiles, per_tile
            )
        return Span(ids, tile, positions, int(self._of["advance"][i]), sources, self._leads[i])

    def _cut(self, name: str, ends: str, i: int) -> np.ndarray:
        end = self._of[f"{ends}_end"]
        return self._of[name][int(end[i - 1]) if i else 0 : int(end[i])]


_OF_SPAN = (
    *("which", "ids", "ids_end", "tile", "positions", "positions_end", "rows", "advance"),
    *("feature", "feature_end", "weight", "weight_end", "tiles", "per_tile"),
)


def _joined(parts: Sequence[np.ndarray], kind: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *(part.ravel() for part in parts)]).astype(kind)


def _ends(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum(np.asarray([part.size for part in parts], np.int64))
