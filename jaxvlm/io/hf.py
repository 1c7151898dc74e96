"""Hugging Face checkpoints: tensors streamed to their shards, and written back.

A checkpoint is a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and
the files that it names. Where a tensor goes is a ``WeightMap``'s to say.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxvlm.config import ConfigError
from jaxvlm.types import Params, WeightMap

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
"""The one file of an adapter's folder."""
DTYPES: dict[str, Any] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""What a file calls a dtype -> the dtype."""
_ALIGNED = 64  # bytes: what lets a CPU device take a NumPy array without a copy


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    file: str
    dtype: str
    """``F32``, ``F16`` or ``BF16``."""
    shape: tuple[int, ...]


Layout = dict[str, Stored]
"""Name -> where and how it is stored."""


def read_layout(folder: str | os.PathLike[str], only: str = "") -> Layout:
    """What tensors a checkpoint has; reads headers alone.

    Args:
        folder: of the checkpoint.
        only: the file to read, where it is no checkpoint: :data:`ADAPTER`.

    Raises:
        ConfigError: no safetensors there, or a file that is missing, damaged or of no known dtype.
    """
    root = Path(folder)
    layout: Layout = {}
    for file in _files(root, only):
        try:
            with safe_open(root / file, "numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                    part = opened.get_slice(name)
                    layout[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{root / file} can't be read: {error}; fetch it again") from None
    return layout


def read_params(
    folder: str | os.PathLike[str],
    weights: WeightMap,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    only: str = "",
) -> Params:
    """Parameters from a checkpoint, each process reading what its devices hold, shard by shard.

    Args:
        folder: of the checkpoint.
        weights: which tensors hold which parameters.
        abstract: path -> shape, dtype and sharding; values are cast to the dtype.
        only: as for :func:`read_layout`.

    Raises:
        ConfigError: tensors that are missing, left over, of another shape or no floats.
    """
    with _opened(Path(folder), weights, only) as (_, get):
        return {path: _read(path, leaf, weights, get) for path, leaf in abstract.items()}


def check_copies(folder: str | os.PathLike[str], weights: WeightMap) -> None:
    """Refuse a checkpoint whose tied tensors differ: transformers would then not tie them.

    Raises:
        ConfigError: as :func:`read_params`; or which two differ.
    """
    with _opened(Path(folder), weights, "") as (shapes, get):
        for name, of in weights.copies.items():
            rows = shapes.get(name, (0,))[0]
            for start in range(0, rows, _ROWS):
                part = (slice(start, min(start + _ROWS, rows)),)
                if not np.array_equal(get(name, part), get(of, part)):
                    raise ConfigError(
                        f"{folder}: {name} is not equal to {of}, but config.json ties them; set "
                        "its tie_word_embeddings to false"
                    )


_ROWS = 4096  # of a matrix that are compared at a time
_Get = Callable[[str, tuple[slice, ...]], np.ndarray]


@contextlib.contextmanager
def _opened(
    root: Path, weights: WeightMap, only: str
) -> Iterator[tuple[dict[str, tuple[int, ...]], _Get]]:
    """Shapes of the checkpoint's tensors by canonical name, and what reads parts of them."""
    layout = read_layout(root, only)
    spelled = weights.check({name: stored.shape for name, stored in layout.items()}, str(root))
    strange = [n for n in spelled.values() if layout[n].dtype not in DTYPES]
    if strange:
        raise ConfigError(
            f"{root}: {strange[0]} is stored as {layout[strange[0]].dtype}; known: "
            f"{', '.join(DTYPES)} (quantised checkpoints are not read)"
        )
    with contextlib.ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(root / file, "numpy"))
            for file in {layout[name].file for name in spelled.values()}
        }

        def get(name: str, where: tuple[slice, ...]) -> np.ndarray:
            name = spelled[name]
            return opened[layout[name].file].get_slice(name)[where]

        yield {name: layout[theirs].shape for name, theirs in spelled.items()}, get


def _read(
    path: str,
    leaf: jax.ShapeDtypeStruct,
    weights: WeightMap,
    get: _Get,
) -> jax.Array:
    made: dict[str, np.ndarray] = {}  # devices that hold the same part read it once

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # it is for arrays of another kind
        shape = tuple(len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True))
        if str(index) not in made:
            made[str(index)] = out = _empty(shape, np.dtype(leaf.dtype))
            weights.read(path, index, get, out)
        return made[str(index)]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + _ALIGNED, np.uint8)
    start = -buffer.ctypes.data % _ALIGNED
    return buffer[start : start + size].view(dtype).reshape(shape)


def write_params(
    folder: str | os.PathLike[str], params: Params, weights: WeightMap, layout: Layout
) -> None:
    """Write parameters as a checkpoint; every process calls it, process 0 writes.

    Args:
        folder: must exist; of a single process's view.
        params: all of them, on any mesh.
        weights: which tensors hold which parameters.
        layout: of the tensors, in the spelling that is wanted: their files and dtypes.
    """
    spelled = weights.check({name: stored.shape for name, stored in layout.items()}, "the layout")
    ours = {theirs: name for name, theirs in spelled.items()}

    def make(name: str) -> np.ndarray:
        return weights.write(ours[name], lambda path, place: host(params[path], place))

    write_tensors(folder, {name: stored for name, stored in layout.items() if name in ours}, make)


def write_tensors(
    folder: str | os.PathLike[str], layout: Layout, make: Callable[[str], np.ndarray]
) -> int:
    """Write tensors, a file at a time; every process calls it, process 0 writes.

    Args:
        folder: must exist.
        layout: their files and dtypes.
        make: name -> the tensor.

    Returns:
        Bytes of all tensors.
    """
    by_file: dict[str, list[str]] = {}
    for name, stored in layout.items():
        by_file.setdefault(stored.file, []).append(name)
    total = 0
    for file, names in by_file.items():
        tensors: dict[str, np.ndarray] = {}
        for name in names:  # the others take part in gathering, and keep nothing
            made = make(name).astype(DTYPES[layout[name].dtype])
            total += made.nbytes
            if not jax.process_index():
                tensors[name] = made
        if not jax.process_index():
            save_file(tensors, Path(folder) / file, metadata={"format": "pt"})
    if not jax.process_index() and list(by_file) not in ([SINGLE], [ADAPTER]):
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: layout[name].file for name in sorted(layout)},
        }
        (Path(folder) / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def sharded(shapes: Mapping[str, tuple[int, ...]], dtype: str, most: int) -> Layout:
    """A layout in files of at most ``most`` bytes, or of one tensor where that is larger.

    Args:
        shapes: name -> shape.
        dtype: of all tensors, as in :data:`DTYPES`.
        most: bytes of a file.
    """
    files: list[list[str]] = [[]]
    room = most
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * DTYPES[dtype].itemsize
        if files[-1] and size > room:
            files.append([])
            room = most
        files[-1].append(name)
        room -= size
    named = [SINGLE] if len(files) == 1 else []
    named = named or [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    return {
        name: Stored(file, dtype, tuple(shapes[name]))
        for file, group in zip(named, files, strict=True)
        for name in group
    }


def host(x: jax.Array, place: tuple[int, ...] = ()) -> np.ndarray:
    """An array, or the part of it at ``place``, on this host; every process calls it."""
    part = x[place] if place else x
    if isinstance(part, jax.Array) and not part.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(part, tiled=True))
    return np.asarray(part)


def _files(root: Path, only: str) -> list[str]:
    if only:
        files = [only]
    elif (root / SINGLE).is_file():  # where both are there, as transformers does
        files = [SINGLE]
    elif (root / INDEX).is_file():
        try:
            names = json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{root / INDEX} is damaged: {error}; fetch it again") from None
        files = sorted(set(names))
    else:
        files = [SINGLE]
    missing = [file for file in files if not (root / file).is_file()]
    if missing:
        pickled = any(root.glob("*.bin")) or any(root.glob("*.pt"))
        advice = (
            "its .bin or .pt files are pickles, which are never read; save it as safetensors"
            if pickled
            else "fetch it again"
        )
        raise ConfigError(f"{root} has no {', '.join(missing)}: {advice}")
    return files
