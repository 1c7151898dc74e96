"""Reads and writes safetensors checkpoints, streaming tensors to and from sharded arrays.

A checkpoint is a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and
the files that it names. A ``WeightMap`` says which tensors hold which parameters.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxvlm.checkpoint.digest import is_finite
from jaxvlm.config import ConfigError, json_text
from jaxvlm.config.merge import write_json
from jaxvlm.types import Params, WeightMap

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
"""The weights file of a PEFT adapter's folder."""
DTYPES: dict[str, Any] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Name of a dtype in a safetensors file -> the dtype."""
_ALIGNED = 64  # bytes; a CPU device takes a NumPy array so aligned without a copy


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    file: str
    dtype: str
    """``F32``, ``F16`` or ``BF16``."""
    shape: tuple[int, ...]


Layout = dict[str, Stored]
"""Tensor -> its file, dtype and shape."""


def read_layout(folder: str | os.PathLike[str], only: str = "") -> Layout:
    """Read the file, dtype and shape of each tensor of a checkpoint; reads file headers only.

    Args:
        folder: folder of the checkpoint.
        only: name of the one file to read, :data:`ADAPTER`; "": a checkpoint's files.

    Raises:
        ConfigError: the folder has no safetensors, or a file is missing or damaged.
    """
    root = Path(folder)
    layout: Layout = {}
    for file in _files(root, only):
        try:
            with safe_open(root / file, "numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is not a mapping)
                    part = opened.get_slice(name)
                    layout[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{root / file} can't be read: {error}; fetch it again") from None
    return layout


def num_bytes(layout: Layout) -> int:
    """Return the bytes of all tensors."""
    sizes = (np.prod(s.shape) * DTYPES[s.dtype].itemsize for s in layout.values())
    return int(sum(sizes))


def read_params(
    folder: str | os.PathLike[str],
    weights: WeightMap,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    only: str = "",
) -> Params:
    """Read parameters from a checkpoint; each process reads the shards of its own devices.

    Args:
        folder: folder of the checkpoint.
        weights: map of tensors to parameters.
        abstract: path -> shape, dtype and sharding; values are cast to the dtype.
        only: as for :func:`read_layout`.

    Raises:
        ConfigError: tensors that are missing, extra, of another shape, or not floats; or a value is
            NaN or infinite.
    """
    with _opened(Path(folder), weights, only) as (weights, _, get):
        return {
            path: _read(Path(folder), path, leaf, weights, get) for path, leaf in abstract.items()
        }


def check_copies(folder: str | os.PathLike[str], weights: WeightMap) -> None:
    """Check that a checkpoint's tied tensors are equal; transformers would not tie them otherwise.

    Raises:
        ConfigError: as :func:`read_params`; or two tied tensors differ.
    """
    with _opened(Path(folder), weights, "") as (_, shapes, get):
        for name, of in weights.copies.items():
            rows = shapes.get(name, (0,))[0]
            for start in range(0, rows, _ROWS):
                part = (slice(start, min(start + _ROWS, rows)),)
                if not np.array_equal(get(name, part), get(of, part)):
                    raise ConfigError(
                        f"{folder}: {name} is not equal to {of}, but config.json ties them; set "
                        "its tie_word_embeddings to false"
                    )


_ROWS = 4096  # rows of a matrix compared at a time
_Get = Callable[[str, tuple[slice, ...]], np.ndarray]


@contextlib.contextmanager
def _opened(
    root: Path, weights: WeightMap, only: str
) -> Iterator[tuple[WeightMap, dict[str, tuple[int, ...]], _Get]]:
    """Yield the map in the checkpoint's layout, the tensors' shapes by canonical name, and a
    function that reads slices of them.
    """
    layout = read_layout(root, only)
    found = {name: stored.shape for name, stored in layout.items()}
    spelled = weights.check(found, str(root))
    unsupported = [n for n in spelled.values() if layout[n].dtype not in DTYPES]
    if unsupported:
        raise ConfigError(
            f"{root}: {unsupported[0]} is stored as {layout[unsupported[0]].dtype}; known: "
            f"{', '.join(DTYPES)} (quantized checkpoints are not supported)"
        )
    with contextlib.ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(root / file, "numpy"))
            for file in {layout[name].file for name in spelled.values()}
        }

        def get(name: str, where: tuple[slice, ...]) -> np.ndarray:
            name = spelled[name]
            return opened[layout[name].file].get_slice(name)[where]

        shapes = {name: layout[theirs].shape for name, theirs in spelled.items()}
        yield weights.fitting(found), shapes, get


def _read(
    root: Path,
    path: str,
    leaf: jax.ShapeDtypeStruct,
    weights: WeightMap,
    get: _Get,
) -> jax.Array:
    shards: dict[str, np.ndarray] = {}  # a shard of several devices is read once

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # None is for other kinds of arrays
        shape = tuple(len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True))
        if str(index) not in shards:
            shards[str(index)] = out = _empty(shape, np.dtype(leaf.dtype))
            weights.read(path, index, get, out)
            if not is_finite(out):
                raise ConfigError(
                    f"{root}: the weights of {path} have values that are NaN or infinite; fetch "
                    "them again"
                )
        return shards[str(index)]

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
        folder: an existing folder, on process 0.
        params: all parameters, on any mesh.
        weights: map of tensors to parameters.
        layout: file and dtype of each tensor, under the names to write.
    """
    found = {name: stored.shape for name, stored in layout.items()}
    spelled, weights = weights.check(found, "the layout"), weights.fitting(found)
    ours = {theirs: name for name, theirs in spelled.items()}

    def make(name: str) -> np.ndarray:
        return weights.write(ours[name], lambda path, place: host(params[path], place))

    write_tensors(folder, {name: stored for name, stored in layout.items() if name in ours}, make)


def write_tensors(
    folder: str | os.PathLike[str], layout: Layout, make: Callable[[str], np.ndarray]
) -> int:
    """Write tensors, one file at a time; every process calls it, process 0 writes.

    Args:
        folder: an existing folder.
        layout: file and dtype of each tensor.
        make: function of a tensor's name that returns its values.

    Returns:
        Bytes of all tensors.
    """
    by_file: dict[str, list[str]] = {}
    for name, stored in layout.items():
        by_file.setdefault(stored.file, []).append(name)
    total = 0
    for file, names in by_file.items():
        tensors: dict[str, np.ndarray] = {}
        for name in names:  # the other processes take part in the all-gather, and keep nothing
            tensor = make(name).astype(DTYPES[layout[name].dtype])
            total += tensor.nbytes
            if not jax.process_index():
                tensors[name] = tensor
        if not jax.process_index():
            _save(tensors, Path(folder) / file)
    if not jax.process_index() and list(by_file) not in ([SINGLE], [ADAPTER]):
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: layout[name].file for name in sorted(layout)},
        }
        write_json(Path(folder) / INDEX, index)
    return total


def _save(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write one file; raises OSError where the system refuses to."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if code := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
        raise


def sharded(shapes: Mapping[str, tuple[int, ...]], dtype: str, most: int) -> Layout:
    """Lay out tensors in checkpoint shards of at most ``most`` bytes, unless one tensor is larger.

    Args:
        shapes: name -> shape.
        dtype: dtype of all tensors, as in :data:`DTYPES`.
        most: maximum bytes of a shard.
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
    count = len(files)
    shards = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    named = [SINGLE] if count == 1 else shards
    return {
        name: Stored(file, dtype, tuple(shapes[name]))
        for file, group in zip(named, files, strict=True)
        for name in group
    }


def host(x: jax.Array, place: tuple[int, ...] = ()) -> np.ndarray:
    """Copy an array, or its part at index ``place``, to this host; every process calls it."""
    part = x[place] if place else x
    if isinstance(part, jax.Array) and not part.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(part, tiled=True))
    return np.asarray(part)


def _plain_name(root: Path, name: Any) -> str:
    """Refuse a name that would lead out of the folder: reading follows it, and an export writes."""
    if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
        raise ConfigError(
            f"{root / INDEX} names a shard {name!r}; only .safetensors files in its own folder are "
            "read, so put them there or fetch it again"
        )
    return name


def _files(root: Path, only: str) -> list[str]:
    if only:
        files = [only]
    elif (root / SINGLE).is_file():  # takes precedence over an index, as in transformers
        files = [SINGLE]
    elif (root / INDEX).is_file():
        try:
            names = list(json_text.read(root / INDEX)["weight_map"].values())
            if not names:
                raise ValueError("weight_map has to name a file for each tensor")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{root / INDEX} is damaged: {error}; fetch it again") from None
        files = sorted({_plain_name(root, name) for name in names})
    else:
        files = [SINGLE]
    missing = [file for file in files if not (root / file).is_file()]
    if missing:
        pickled = any(root.glob("*.bin")) or any(root.glob("*.pt"))
        advice = "fetch it again"
        if pickled:
            advice = (
                "its .bin or .pt files are pickles, which are never read; save it as safetensors"
            )
        raise ConfigError(f"{root} has no {', '.join(missing)}: {advice}")
    return files
