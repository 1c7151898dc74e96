"""Maps parameters to a checkpoint's tensors and back, by a table of names and layouts."""

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
from jaxvlm.models.vit import ABOVE_FROZEN, BLOCKS
from jaxvlm.types import Params


class Entry(NamedTuple):
    """Name and layout of one parameter, in jaxvlm (*ours*) and in the checkpoint (*theirs*).

    Each letter is a dim. Letters written together are one dim of theirs, the word ``1`` is a dim of
    size 1, and a scalar has no letters. If ``theirs`` contains ``{}``, there is one tensor per
    layer, and ours is their stack with layers first. A second ``{}`` is one tensor per expert, and
    experts are the second dim of ours.
    """

    ours: str
    """Path of the parameter."""
    theirs: str
    """Name of the tensor, or pattern of the tensors' names."""
    dims: str
    """Dims of ours, one letter per word: ``"D N H"``."""
    their_dims: str
    """Dims of theirs: ``"NH D"``."""
    part: tuple[int, int] = (0, 1)
    """(i, n): ours is the i-th of n equal parts of theirs."""
    cut: int = 0
    """The dim of theirs that is cut into these parts."""
    first: int = 0
    """The layer number of theirs that our stack starts with."""

    def name(self, place: Sequence[int]) -> str:
        """Return the tensor at an index (layer, expert) of our stack; () if it has no stack."""
        return self.theirs.format(*(n + self.first * (i == 0) for i, n in enumerate(place)))


def linear_layer(
    ours: str, theirs: str, dims: str, their_dims: str, part: tuple[int, int] = (0, 1)
) -> tuple[Entry, Entry]:
    """List the entries of a linear layer with a bias.

    Args:
        ours: the parameters' path, with ``{}`` for ``w`` and ``b``.
        theirs: name of the layer, without ``.weight``.
        dims: our dims of the weight.
        their_dims: their dims of the weight, whose outputs come first.
        part: as for :class:`Entry`.
    """
    out = their_dims.split()[0]
    return (
        Entry(ours.format("w"), theirs + ".weight", dims, their_dims, part),
        Entry(ours.format("b"), theirs + ".bias", " ".join(out), out, part),
    )


def norm_layer(ours: str, theirs: str, dim: str, bias: bool = True) -> tuple[Entry, ...]:
    """List the entries of a norm: its scale, and its bias unless it has none."""
    entries = (
        Entry(ours + "/scale", theirs + ".weight", dim, dim),
        Entry(ours + "/bias", theirs + ".bias", dim, dim),
    )
    return entries if bias else entries[:1]


class NameMap(NamedTuple):
    """All parameters of a model; the ``WeightMap`` with which checkpoints are read and written."""

    entries: Sequence[Entry]
    sizes: Mapping[str, int]
    """Letter -> size of the dim."""
    depths: Mapping[str, int]
    """Submodule (the first word of our path) -> layers; and the number of ``experts``."""
    aliases: Sequence[tuple[str, str]] = ()
    """Regex substitutions, applied in order, from other spellings of names to ``theirs``."""
    buffers: tuple[str, ...] = ()
    """Suffixes of names of buffers, which are computed and not read."""
    copies: Mapping[str, str] = MappingProxyType({})
    """Tensor -> the tensor that it must be equal to, in checkpoints that hold both."""
    modules: Sequence[tuple[str, str]] = ()
    """Regex substitutions, applied in order, from ``theirs`` to the names of transformers' modules
    in memory, where these differ; PEFT adapters have those names."""
    partial: bool = False
    """Whether extra tensors in a checkpoint are ignored."""
    layouts: Sequence[Sequence[Entry]] = ()
    """Other layouts that checkpoints have of some parameters: each lists their entries anew."""

    def fitting(self, found: Mapping[str, tuple[int, ...]]) -> NameMap:
        """Return the map in the layout of a checkpoint, by the names and shapes of its tensors.

        Args:
            found: name -> shape of the checkpoint's tensors, in any known spelling.
        """
        shapes = {self._canonical(name): tuple(shape) for name, shape in found.items()}
        for layout in self.layouts:
            own = self._replace(entries=layout).tensors()
            if all(shapes.get(name) == shape for name, shape in own.items()):
                new = {entry.ours: entry for entry in layout}
                return self._replace(entries=[new.get(e.ours, e) for e in self.entries], layouts=())
        return self

    def part(self, tower: str) -> NameMap:
        """Return the map of one tower's parameters, for checkpoints that hold more."""
        entries = [entry for entry in self.entries if entry.ours.startswith(f"{tower}/")]
        return self._replace(entries=entries, copies=MappingProxyType({}), partial=True, layouts=())

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor."""
        result = {}
        for entry in self.entries:
            shape = list(self._their_shape(entry))
            if entry.part[1] > 1:
                shape[entry.cut] *= entry.part[1]
            for name in self.names(entry):
                result[name] = tuple(shape)
        return result

    def check(self, found: Mapping[str, tuple[int, ...]], where: str) -> dict[str, str]:
        """Check that a checkpoint holds exactly the tensors that its config implies.

        Args:
            found: name -> shape of the checkpoint's tensors, in any known spelling.
            where: the checkpoint, for error messages.

        Returns:
            Canonical name -> name in the checkpoint.

        Raises:
            ConfigError: it lists all tensors that are missing, extra, or of another shape.
        """
        spelled = {self._canonical(name): name for name in found}
        spelled.pop("", None)
        needed = self.fitting(found).tensors()
        needed |= {name: needed[of] for name, of in self.copies.items() if name in spelled}
        shapes = [
            f"{name} (has {list(found[spelled[name]])}, needs {list(shape)})"
            for name, shape in needed.items()
            if name in spelled and tuple(found[spelled[name]]) != shape
        ]
        groups = {
            "missing": sorted(needed.keys() - spelled.keys()),
            "extra": sorted(spelled.keys() - needed.keys()) * (not self.partial),
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
        """Read one shard of a parameter into ``out``, and no other part of its tensors.

        Args:
            path: path of the parameter.
            index: the shard, one slice per dim.
            get: (tensor's name, slices) -> that part of the tensor.
            out: array of the shard's shape; values are cast to its dtype.
        """
        entry = self._entry(path)
        lead = len(self._counts(entry))
        selected = [range(n)[s] for n, s in zip(self._counts(entry), index[:lead], strict=True)]
        names = [entry.name(place) for place in itertools.product(*selected)]
        targets = out.reshape(-1, *out.shape[lead:]) if lead else [out]
        dims = dict(zip(entry.dims.split(), index[lead:], strict=True))
        ranges = {a: range(*s.indices(self.sizes[a])) for a, s in dims.items()}
        # One block of their rows at a time: it stays in the processor's cache while it is
        # transposed, and no copy of a whole tensor is made.
        blocks: list[tuple[Any, ...]] = []
        if not dims:
            blocks.append(((), *self._transposed(entry, dims, ranges)))
        else:
            rows = _words(entry)[0][0]
            at, first = entry.dims.split().index(rows), ranges[rows].start
            for part in _blocks(ranges[rows], out.nbytes // max(1, len(targets))):
                to = (slice(None),) * at + (slice(part.start - first, part.stop - first),)
                blocks.append((to, *self._transposed(entry, dims, {**ranges, rows: part})))

        def fill(task: tuple[str, np.ndarray, tuple[Any, ...]]) -> None:
            name, target, (to, slices, transpose) = task
            target[to] = transpose(get(name, slices))

        with ThreadPoolExecutor(_THREADS) as pool:
            named = zip(names, targets, strict=True)
            list(pool.map(fill, ((*one, block) for one in named for block in blocks)))

    def _transposed(
        self, entry: Entry, dims: Mapping[str, slice], ranges: Mapping[str, range]
    ) -> tuple[tuple[slice, ...], Callable[[np.ndarray], np.ndarray]]:
        """Return the slices of theirs to read, and the function from these to ours."""
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
        """Build one tensor of a checkpoint.

        Args:
            name: name of the tensor.
            get: (path, index) -> that layer, or (layer, expert), of a parameter; () is all of it.
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
        """Convert tensors in memory to parameters in float32.

        Raises:
            ConfigError: tensors that are missing, extra, or of another shape.
        """
        shapes = {name: array.shape for name, array in tensors.items()}
        spelled, self = self.check(shapes, "the tensors"), self.fitting(shapes)
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
        """Convert parameters to tensors in memory; the inverse of :meth:`load`.

        Raises:
            ConfigError: a parameter without an entry.
        """
        if extra := sorted(set(params) - {entry.ours for entry in self.entries}):
            raise ConfigError(f"parameters without a tensor name: {', '.join(extra)}")

        def get(path: str, place: tuple[int, ...]) -> np.ndarray:
            return np.asarray(np.asarray(params[path])[place])

        return {name: self.write(name, get) for name in self.tensors()}

    def _canonical(self, name: str) -> str:
        """Return the canonical spelling of a tensor's name; "" for a buffer."""
        for pattern, replacement in self.aliases:
            name = re.sub(pattern, replacement, name)
        return "" if any(map(name.endswith, self.buffers)) else name

    def _entry(self, path: str) -> Entry:
        return next(entry for entry in self.entries if entry.ours == path)

    def _sources(self) -> dict[str, list[tuple[Entry, tuple[int, ...]]]]:
        """Return, for each tensor, the parameters it holds, in order, and their stack indices."""
        result: dict[str, list[tuple[Entry, tuple[int, ...]]]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.part[0]):
            for place in itertools.product(*map(range, self._counts(entry))):
                result.setdefault(entry.name(place), []).append((entry, place))
        return result

    def names(self, entry: Entry) -> list[str]:
        """Return the tensors of one parameter, layer by layer."""
        places = itertools.product(*map(range, self._counts(entry)))
        return [entry.name(place) for place in places]

    def by_path(self) -> dict[str, list[str]]:
        """Return the tensors of every parameter, layer by layer."""
        return {entry.ours: self.names(entry) for entry in self.entries}

    def _counts(self, entry: Entry) -> list[int]:
        """Return the number of layers, and of experts, that our parameter stacks."""
        words = [entry.ours.split("/")[0], "experts"][: entry.theirs.count("{}")]
        return [self.depths[word] for word in words]

    def _their_shape(self, entry: Entry) -> tuple[int, ...]:
        words = entry.their_dims.split()
        return tuple(1 if w == "1" else math.prod(self.sizes[a] for a in w) for w in words)

    def _their_slice(self, word: str, ranges: Mapping[str, range]) -> slice:
        """Return the slice of a dim of theirs: its first letter's range, all of its others."""
        if word == "1":
            return slice(0, 1)
        inner = math.prod(self.sizes[a] for a in word[1:])
        first = ranges[word[0]]
        return slice(first.start * inner, first.stop * inner)


def over_frozen_blocks(encoder: Sequence[Entry], frozen_blocks: int) -> tuple[Entry, ...]:
    """Split a vision encoder's entries at its first ``VisionConfig.frozen_blocks`` blocks.

    Args:
        encoder: entries of the encoder without frozen blocks.
        frozen_blocks: number of blocks at ``vision/``, with the rest at ``vision_top/``; 0 returns
            ``encoder`` unchanged.
    """
    bottom, top = [], []
    for entry in encoder:
        above = entry._replace(ours=entry.ours.replace("vision/", "vision_top/", 1))
        if entry.ours.startswith(BLOCKS):
            top.append(above._replace(first=frozen_blocks))
        elif entry.ours.startswith(ABOVE_FROZEN):
            top.append(above)
            continue
        bottom.append(entry)
    return (*bottom, *top) if frozen_blocks else tuple(encoder)


def encoder_depths(depth: int, frozen_blocks: int) -> dict[str, int]:
    """Return :class:`NameMap` depths of a vision encoder with ``depth`` blocks."""
    if not frozen_blocks:
        return {"vision": depth}
    return {"vision": frozen_blocks, "vision_top": depth - frozen_blocks}


_BLOCK = 2**20  # bytes; source and target of the copy fit in a core's cache
_THREADS = min(8, os.cpu_count() or 1)


def _blocks(rows: range, size: int) -> list[range]:
    """Split ``rows``, which have ``size`` bytes in total, into blocks of about `_BLOCK` bytes."""
    step = max(1, len(rows) * _BLOCK // max(1, size))
    return [rows[i : i + step] for i in range(0, len(rows), step)]


def _words(entry: Entry) -> list[str]:
    """Return the dims of theirs, without those of size 1."""
    return [word for word in entry.their_dims.split() if word != "1"]


def _some(names: Sequence[str], most: int = 40) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
