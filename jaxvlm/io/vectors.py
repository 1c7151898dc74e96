"""Files of vectors, written a part at a time and found whole or not at all."""

from __future__ import annotations

import importlib.util
import json
import math
import pathlib
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import ConfigError

_RANGES = "ranges"
_TENSORS = {"float32": "F32", "int8": "I8", "uint8": "U8"}


class Table(NamedTuple):
    """What a file is to hold."""

    rows: Sequence[Mapping[str, str]]
    """What each vector is of: ``id``, ``text``, ``image``, where it has them."""
    parts: Iterable[np.ndarray]
    """The vectors, some rows at a time."""
    shape: tuple[int, int]
    dtype: np.dtype
    """float32, int8 or uint8."""
    ranges: np.ndarray | None = None
    """f32[2, E]: of vectors in int8."""


def check(output: pathlib.Path) -> None:
    """Refuse a file that could not be written, before work is spent on it.

    Raises:
        ConfigError: no such format, or a package is missing.
    """
    if output.suffix not in WRITERS:
        *some, last = (f"FILE{suffix}" for suffix in WRITERS)
        raise ConfigError(
            f"vectors are written to --output={', '.join(some)} or {last}, not {str(output)!r}"
        )
    if output.suffix == ".parquet":
        _pyarrow(output)


def write(output: pathlib.Path, table: Table) -> None:
    """Write ``output``, by its ending; ranges are in it, or beside it (:func:`beside`).

    Raises:
        ConfigError: as :func:`check`.
    """
    check(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    ranges = table.ranges
    if ranges is not None and output.suffix in (".npy", ".jsonl"):
        _whole(beside(output), lambda file: np.save(file, ranges))
    _whole(output, lambda file: WRITERS[output.suffix](file, table))


def beside(output: pathlib.Path) -> pathlib.Path:
    """Where the ranges of a file are that has no room for them."""
    return output.with_name(f"{output.stem}.ranges.npy")


def read_ranges(name: str) -> np.ndarray:
    """f32[2, E] from a file that ``jaxvlm embed --quantize=int8`` wrote, or from FILE.npy itself.

    Raises:
        ConfigError: there are none in it.
    """
    path = pathlib.Path(name)
    found = None
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r")
            if array.dtype != np.float32:  # the vectors themselves
                array = np.load(beside(path))
            found = np.array(array)
        elif path.suffix == ".npz":
            found = np.load(path)[_RANGES]
        elif path.suffix == ".jsonl":
            found = np.load(beside(path))
        elif path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            found = load_file(path)[_RANGES]
        elif path.suffix == ".parquet":
            said = _pyarrow(path).parquet.read_schema(path).metadata or {}
            found = np.asarray(json.loads(said[_RANGES.encode()]), np.float32)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"--ranges={name}: no ranges in it ({error})") from None
    except Exception as error:  # safetensors and pyarrow have errors of their own
        raise ConfigError(f"--ranges={name} can't be read ({error})") from None
    if found is None or found.ndim != 2 or len(found) != 2:
        raise ConfigError(f"--ranges={name}: not the ranges of int8 vectors, two rows of floats")
    return found.astype(np.float32)


def _whole(path: pathlib.Path, fill: Callable[[Any], Any]) -> None:
    half = path.with_name(path.name + ".tmp")
    with half.open("wb") as file:
        fill(file)
    half.replace(path)


def _npy(file: Any, table: Table) -> None:
    head = {
        "descr": np.lib.format.dtype_to_descr(table.dtype),
        "fortran_order": False,
        "shape": table.shape,
    }
    np.lib.format.write_array_header_1_0(file, head)
    for part in table.parts:
        file.write(part.tobytes())


def _npz(file: Any, table: Table) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        with archive.open("vectors.npy", "w", force_zip64=True) as member:
            _npy(member, table)
        if table.ranges is not None:
            with archive.open(f"{_RANGES}.npy", "w") as member:
                np.save(member, table.ranges)


def _safetensors(file: Any, table: Table) -> None:
    """By hand: the library wants all tensors in memory at once."""
    held = [("vectors", table.shape, table.dtype)]
    if table.ranges is not None:
        held.append((_RANGES, table.ranges.shape, table.ranges.dtype))
    head: dict[str, Any] = {"__metadata__": {"format": "np"}}
    end = 0
    for name, shape, dtype in held:
        first, end = end, end + math.prod(shape) * dtype.itemsize
        kind = _TENSORS[dtype.name]
        head[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for part in table.parts:
        file.write(part.tobytes())
    if table.ranges is not None:
        file.write(table.ranges.tobytes())


def _jsonl(file: Any, table: Table) -> None:
    for some, part in _with_rows(table):
        for row, vector in zip(some, part.tolist(), strict=True):
            line = json.dumps({**row, "vector": vector}, ensure_ascii=False)
            file.write(line.encode() + b"\n")


def _parquet(file: Any, table: Table) -> None:
    pa = _pyarrow(pathlib.Path("output.parquet"))
    names = [n for n in ("id", "text", "image") if any(n in row for row in table.rows)]
    vector = pa.list_(pa.from_numpy_dtype(table.dtype), table.shape[1])
    said = {} if table.ranges is None else {_RANGES: json.dumps(table.ranges.tolist())}
    schema = pa.schema([*((n, pa.string()) for n in names), ("vector", vector)], said)
    with pa.parquet.ParquetWriter(file, schema) as writer:
        for some, part in _with_rows(table):
            columns = [pa.array([row.get(n) for row in some], pa.string()) for n in names]
            flat = pa.array(part.reshape(-1))
            columns.append(pa.FixedSizeListArray.from_arrays(flat, table.shape[1]))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _with_rows(table: Table) -> Iterator[tuple[Sequence[Mapping[str, str]], np.ndarray]]:
    first = 0
    for part in table.parts:
        yield table.rows[first : first + len(part)], part
        first += len(part)


def _pyarrow(path: pathlib.Path) -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{path}: Parquet needs pyarrow; run `pip install 'jaxvlm[parquet]'`")
    import pyarrow
    import pyarrow.parquet

    return pyarrow


WRITERS: dict[str, Callable[[Any, Table], None]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".parquet": _parquet,
    ".jsonl": _jsonl,
}
"""A file's ending -> what fills it."""
