"""Tensor names and layouts of a checkpoint, mapped both ways by a table."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.types import Params


class Entry(NamedTuple):
    """One parameter: what it is called and how it lies, here and there.

    Each letter is a dim; letters written together are one dim there. Where ``theirs`` holds
    ``{}`` there is one tensor a layer, and ours is their stack, layers first; a second ``{}`` is
    one tensor an expert, and ours has those next.
    """

    ours: str
    theirs: str
    dims: str
    """Ours, one letter a word: ``"D N H"``."""
    their_dims: str
    """Theirs: ``"NH D"``."""
    part: str = "1/1"
    """``"1/2"``: ours is the first half of their last dim. The parts of a tensor stand in order."""


def load(
    tensors: Mapping[str, np.ndarray],
    entries: Sequence[Entry],
    sizes: Mapping[str, int],
    depths: Mapping[str, int],
    aliases: Iterable[tuple[str, str]] = (),
    buffers: tuple[str, ...] = (),
) -> Params:
    """Our parameters, in float32, from a checkpoint's tensors.

    Args:
        tensors: name -> array.
        entries: every parameter.
        sizes: letter -> size.
        depths: tower (the first word of our path) -> layers; and how many ``experts``.
        aliases: (pattern, replacement) that turn other spellings into ``theirs``.
        buffers: ends of names that are computed, not trained; left out.

    Raises:
        ConfigError: a tensor that is missing, left over, or of another shape.
    """
    left = {
        _rename(name, aliases): array
        for name, array in tensors.items()
        if not any(map(name.endswith, buffers))
    }

    def take(name: str, entry: Entry) -> np.ndarray:
        if name not in left:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        part, parts = map(int, entry.part.split("/"))
        array = left.pop(name) if part == parts else left[name]
        *outer, size = (math.prod(sizes[a] for a in word) for word in entry.their_dims.split())
        shape = (*outer, size * parts)
        if array.shape != shape:
            raise ConfigError(f"tensor {name} has shape {array.shape}; config.json says {shape}")
        array = array[..., (part - 1) * size : part * size]
        letters = entry.their_dims.replace(" ", "")
        split = np.asarray(array, np.float32).reshape([sizes[a] for a in letters])
        return split.transpose([letters.index(a) for a in entry.dims.split()])

    params: Params = {}
    for entry in entries:
        names = _names(entry, depths)
        if "{}" in entry.theirs:
            stack = np.stack([take(name, entry) for name in names])
            params[entry.ours] = stack.reshape(*_counts(entry, depths), *stack.shape[1:])
        else:
            params[entry.ours] = np.ascontiguousarray(take(names[0], entry))
    if left:
        some = ", ".join(sorted(left)[:3])
        raise ConfigError(f"the checkpoint has {len(left)} tensors with no place here: {some}")
    return params


def dump(
    params: Params, entries: Sequence[Entry], sizes: Mapping[str, int], depths: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """The inverse of :func:`load`; arguments as there.

    Raises:
        ConfigError: a parameter without an entry.
    """
    if extra := sorted(set(params) - {entry.ours for entry in entries}):
        raise ConfigError(f"parameters without a tensor name: {', '.join(extra)}")
    tensors: dict[str, np.ndarray] = {}
    for entry in entries:
        array = np.asarray(params[entry.ours])
        stacked = entry.theirs.count("{}")
        layers = array.reshape(-1, *array.shape[stacked:]) if stacked else [array]
        dims, words = entry.dims.split(), entry.their_dims.split()
        order = [dims.index(a) for word in words for a in word]
        shape = [math.prod(sizes[a] for a in word) for word in words]
        for name, layer in zip(_names(entry, depths), layers, strict=True):
            whole = np.ascontiguousarray(layer.transpose(order)).reshape(shape)
            if name in tensors:  # the part before this one
                whole = np.concatenate([tensors[name], whole], axis=-1)
            tensors[name] = whole
    return tensors


def _names(entry: Entry, depths: Mapping[str, int]) -> list[str]:
    places = itertools.product(*map(range, _counts(entry, depths)))
    return [entry.theirs.format(*place) for place in places]


def _counts(entry: Entry, depths: Mapping[str, int]) -> list[int]:
    words = [entry.ours.split("/")[0], "experts"][: entry.theirs.count("{}")]
    return [depths[word] for word in words]


def _rename(name: str, aliases: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in aliases:
        name = re.sub(pattern, replacement, name)
    return name
