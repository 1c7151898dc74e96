"""Tensor names and layouts of a checkpoint, mapped both ways by a table."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.models.vit import ABOVE_TRUNK, BLOCKS
from jaxvlm.types import Params


class Entry(NamedTuple):
    """One parameter: what it is called and how it lies, here and there.

    Each letter is a dim; letters written together are one dim there, and the word ``1`` is a dim
    of one; a scalar has no letters. Where ``theirs`` holds ``{}`` there is one tensor a layer, and
    ours is their stack, layers first; a second ``{}`` is one tensor an expert, and ours has those
    next.
    """

    ours: str
    theirs: str
    dims: str
    """Ours, one letter a word: ``"D N H"``."""
    their_dims: str
    """Theirs: ``"NH D"``."""
    part: tuple[int, int] = (0, 1)
    """(i, n): ours is the i-th of n equal parts of theirs."""
    cut: int = 0
    """The dim of theirs that those parts are cut along."""
    first: int = 0
    """The layer of theirs that ours begins with."""

    def name(self, place: Sequence[int]) -> str:
        """Their tensor of a place in our stack; () where there is none."""
        return self.theirs.format(*(n + self.first * (i == 0) for i, n in enumerate(place)))


class NameMap(NamedTuple):
    """Every parameter of a model; the ``WeightMap`` that reading and writing use."""

    entries: Sequence[Entry]
    sizes: Mapping[str, int]
    """Letter -> size."""
    depths: Mapping[str, int]
    """Tower (the first word of our path) -> layers; and how many ``experts``."""
    aliases: Sequence[tuple[str, str]] = ()
    """(pattern, replacement), applied in turn, that turn other spellings into ``theirs``."""
    buffers: tuple[str, ...] = ()
    """Ends of names that are computed, not trained; left out."""
    copies: Mapping[str, str] = MappingProxyType({})
    """Name -> the tensor that it must be equal to, in files that hold both."""
    modules: Sequence[tuple[str, str]] = ()
    """(pattern, replacement), applied in turn, that turn ``theirs`` into the names that
    transformers' modules have in memory, where they differ; adapters bear those."""
    partial: bool = False
    """Whether a checkpoint may hold more, which is left out."""

    def part(self, tower: str) -> NameMap:
        """The parameters of one tower, of checkpoints that hold more."""
        own = [entry for entry in self.entries if entry.ours.startswith(f"{tower}/")]
        return self._replace(entries=own, copies=MappingProxyType({}), partial=True)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape."""
        found = {}
        for entry in self.entries:
            shape = list(self._their_shape(entry))
            if entry.part[1] > 1:
                shape[entry.cut] *= entry.part[1]
            for name in self.names(entry):
                found[name] = tuple(shape)
        return found

    def check(self, found: Mapping[str, tuple[int, ...]], where: str) -> dict[str, str]:
        """Refuse a checkpoint that does not hold exactly what its config says.

        Args:
            found: name -> shape of what is there, in any known spelling.
            where: the checkpoint, for the message.

        Returns:
            Name -> how it is spelled there.

        Raises:
            ConfigError: every tensor that is missing, left over, or of another shape.
        """
        spelled = {self._canonical(name): name for name in found}
        spelled.pop("", None)
        needed = self.tensors()
        needed |= {name: needed[of] for name, of in self.copies.items() if name in spelled}
        shapes = [
            f"{name} (has {list(found[spelled[name]])}, needs {list(shape)})"
            for name, shape in needed.items()
            if name in spelled and tuple(found[spelled[name]]) != shape
        ]
        groups = {
            "missing": sorted(needed.keys() - spelled.keys()),
            "with no place here": sorted(spelled.keys() - needed.keys()) * (not self.partial),
            "of another shape": shapes,
        }
        lines = [f"{len(names)} {what}: {_some(names)}" for what, names in groups.items() if names]
        if lines:
            raise ConfigError(f"{where} do not fit config.json: {'; '.join(lines)}")
        return spelled

    def read(
        self,
        path: str,
        index: tuple[slice, ...],
        get: Callable[[str, tuple[slice, ...]], np.ndarray],
        out: np.ndarray,
    ) -> None:
        """Fill ``out`` with one shard of a parameter, reading no more than it needs.

        Args:
            path: of the parameter.
            index: which part of it, a slice a dim.
            get: (tensor's name, slices) -> that part of the tensor.
            out: of the part's shape; its dtype is what values become.
        """
        entry = self._entry(path)
        lead = len(self._counts(entry))
        kept = [range(n)[s] for n, s in zip(self._counts(entry), index[:lead], strict=True)]
        names = [entry.name(place) for place in itertools.product(*kept)]
        targets = out.reshape(-1, *out.shape[lead:]) if lead else [out]
        dims = dict(zip(entry.dims.split(), index[lead:], strict=True))
        ranges = {a: range(*s.indices(self.sizes[a])) for a, s in dims.items()}
        # A block of their rows at a time: it stays in the processor's cache while it is turned,
        # and no copy of a whole tensor is made.
        blocks: list[tuple[Any, ...]] = []
        if not dims:
            blocks.append(((), *self._turned(entry, dims, ranges)))
        else:
            rows = _words(entry)[0][0]
            at, first = entry.dims.split().index(rows), ranges[rows].start
            for part in _blocks(ranges[rows], out.nbytes // max(1, len(targets))):
                to = (slice(None),) * at + (slice(part.start - first, part.stop - first),)
                blocks.append((to, *self._turned(entry, dims, {**ranges, rows: part})))

        def fill(task: tuple[str, np.ndarray, tuple[Any, ...]]) -> None:
            name, target, (to, where, turn) = task
            target[to] = turn(get(name, where))

        with ThreadPoolExecutor(_THREADS) as pool:
            named = zip(names, targets, strict=True)
            list(pool.map(fill, ((*one, block) for one in named for block in blocks)))

    def _turned(
        self, entry: Entry, dims: Mapping[str, slice], ranges: Mapping[str, range]
    ) -> tuple[tuple[slice, ...], Callable[[np.ndarray], np.ndarray]]:
        """What to read of theirs, and what makes ours of it."""
        slices = [self._their_slice(word, ranges) for word in entry.their_dims.split()]
        if entry.part[1] > 1:
            part, offset = slices[entry.cut], entry.part[0] * self._their_shape(entry)[entry.cut]
            slices[entry.cut] = slice(part.start + offset, part.stop + offset)
        shape, inner, words = [], [], _words(entry)
        for word in words:
            shape += [len(ranges[word[0]]), *(self.sizes[a] for a in word[1:])]
            inner += [slice(None), *(dims[a] for a in word[1:])]
        letters = "".join(words)
        order = [letters.index(a) for a in entry.dims.split()]
        return tuple(slices), lambda x: x.reshape(shape)[tuple(inner)].transpose(order)

    def write(self, name: str, get: Callable[[str, tuple[int, ...]], np.ndarray]) -> np.ndarray:
        """One tensor.

        Args:
            name: of the tensor.
            get: (path, place) -> that layer, or (layer, expert), of a parameter; () is all of it.
        """
        parts, sources = [], self._sources()[self.copies.get(name, name)]
        for entry, place in sources:
            array = get(entry.ours, place)
            dims = entry.dims.split()
            order = [dims.index(a) for word in _words(entry) for a in word]
            parts.append(np.transpose(array, order).reshape(self._their_shape(entry)))
        cut = sources[0][0].cut
        whole = np.concatenate(parts, cut) if len(parts) > 1 else parts[0]
        return np.asarray(whole, order="C")  # ascontiguousarray would give a scalar a dim

    def load(self, tensors: Mapping[str, np.ndarray]) -> Params:
        """Our parameters, in float32, from tensors in memory.

        Raises:
            ConfigError: tensors that are missing, left over, or of another shape.
        """
        spelled = self.check({name: array.shape for name, array in tensors.items()}, "the tensors")
        params: Params = {}
        for entry in self.entries:
            shape = [self.sizes[a] for a in entry.dims.split()]
            shape = [*self._counts(entry), *shape]
            out = np.empty(shape, np.float32)
            whole = (slice(None),) * len(shape)
            self.read(
                entry.ours, whole, lambda name, at: np.asarray(tensors[spelled[name]])[at], out
            )
            params[entry.ours] = out
        return params

    def dump(self, params: Params) -> dict[str, np.ndarray]:
        """The inverse of :meth:`load`.

        Raises:
            ConfigError: a parameter without an entry.
        """
        if extra := sorted(set(params) - {entry.ours for entry in self.entries}):
            raise ConfigError(f"parameters without a tensor name: {', '.join(extra)}")

        def get(path: str, place: tuple[int, ...]) -> np.ndarray:
            return np.asarray(np.asarray(params[path])[place])

        return {name: self.write(name, get) for name in self.tensors()}

    def _canonical(self, name: str) -> str:
        """``name`` in our spelling; "" for what is left out."""
        for pattern, replacement in self.aliases:
            name = re.sub(pattern, replacement, name)
        return "" if any(map(name.endswith, self.buffers)) else name

    def _entry(self, path: str) -> Entry:
        return next(entry for entry in self.entries if entry.ours == path)

    def _sources(self) -> dict[str, list[tuple[Entry, tuple[int, ...]]]]:
        """Tensor -> the parameters it holds, part by part, and their place in a stack."""
        found: dict[str, list[tuple[Entry, tuple[int, ...]]]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.part[0]):
            for place in itertools.product(*map(range, self._counts(entry))):
                found.setdefault(entry.name(place), []).append((entry, place))
        return found

    def names(self, entry: Entry) -> list[str]:
        """The tensors of one parameter, layer by layer."""
        places = itertools.product(*map(range, self._counts(entry)))
        return [entry.name(place) for place in places]

    def _counts(self, entry: Entry) -> list[int]:
        """Layers, and experts, that ours stacks."""
        words = [entry.ours.split("/")[0], "experts"][: entry.theirs.count("{}")]
        return [self.depths[word] for word in words]

    def _their_shape(self, entry: Entry) -> tuple[int, ...]:
        words = entry.their_dims.split()
        return tuple(1 if w == "1" else math.prod(self.sizes[a] for a in w) for w in words)

    def _their_slice(self, word: str, ranges: Mapping[str, range]) -> slice:
        """What of a dim of theirs to read: its first letter's range, all of its others."""
        if word == "1":
            return slice(0, 1)
        inner = math.prod(self.sizes[a] for a in word[1:])
        first = ranges[word[0]]
        return slice(first.start * inner, first.stop * inner)


def over_trunk(tower: Sequence[Entry], trunk: int) -> tuple[Entry, ...]:
    """A vision tower's entries where its first ``trunk`` blocks are apart (``VisionConfig.trunk``).

    Args:
        tower: its entries without a trunk.
        trunk: blocks; 0: ``tower`` as it is.
    """
    kept, found = [], []
    for entry in tower:
        above = entry._replace(ours=entry.ours.replace("vision/", "top/", 1))
        if entry.ours.startswith(BLOCKS):
            found.append(above._replace(first=trunk))
        elif entry.ours.startswith(ABOVE_TRUNK):
            found.append(above)
            continue
        kept.append(entry)
    return (*kept, *found) if trunk else tuple(tower)


def tower_depths(depth: int, trunk: int) -> dict[str, int]:
    """A :class:`NameMap`'s, of a vision tower of ``depth`` that :func:`over_trunk` cuts."""
    return {"vision": trunk, "top": depth - trunk} if trunk else {"vision": depth}


_BLOCK = 2**20  # bytes: a core's cache holds both ends of a copy
_THREADS = min(8, os.cpu_count() or 1)


def _blocks(rows: range, size: int) -> list[range]:
    """``rows`` in pieces of about :data:`_BLOCK` bytes, if all of them have ``size``."""
    step = max(1, len(rows) * _BLOCK // max(1, size))
    return [rows[i : i + step] for i in range(0, len(rows), step)]


def _words(entry: Entry) -> list[str]:
    """Their dims, those of one left out."""
    return [word for word in entry.their_dims.split() if word != "1"]


def _some(names: Sequence[str], most: int = 40) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
