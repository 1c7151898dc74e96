"""Writes files of embeddings incrementally and atomically."""

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

from jaxvlm.checkpoint.run_record import whole_file
from jaxvlm.config import ConfigError

_RANGES = "ranges"
_TENSORS = {"float32": "F32", "int8": "I8", "uint8": "U8"}


class EmbeddingTable(NamedTuple):
    """The content of a file of embeddings."""

    records: Sequence[Mapping[str, str]]
    """The ``id``, ``text`` and ``image`` of each embedding's item, as far as given."""
    parts: Iterable[np.ndarray]
    """The embeddings, in blocks of rows."""
    shape: tuple[int, int]
    dtype: np.dtype
    """float32, int8 or uint8."""
    ranges: np.ndarray | None = None
    """f32[2, E]: the quantization ranges of int8 embeddings."""


def check(output: pathlib.Path) -> None:
    """Refuses an output file that can't be written, before the embeddings are computed.

    Raises:
        ConfigError: the format is unknown, or a package that it needs is missing.
    """
    if output.suffix not in WRITERS:
        *some, last = (f"FILE{suffix}" for suffix in WRITERS)
        raise ConfigError(
            f"embeddings are written to --output={', '.join(some)} or {last}, not {str(output)!r}"
        )
    if output.suffix == ".parquet":
        _pyarrow(output)


def write(output: pathlib.Path, table: EmbeddingTable) -> None:
    """Writes ``output`` in the format of its suffix.

    Quantization ranges go into the file, or into a file next to it (:func:`ranges_path`).

    Raises:
        ConfigError: as for :func:`check`.
    """
    check(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    ranges = table.ranges
    if ranges is not None and output.suffix in (".npy", ".jsonl"):
        with whole_file(ranges_path(output)) as file:
            np.save(file, ranges)
    with whole_file(output) as file:
        WRITERS[output.suffix](file, table)


def ranges_path(output: pathlib.Path) -> pathlib.Path:
    """The path of the ranges of a file whose format can't hold them."""
    return output.with_name(f"{output.stem}.ranges.npy")


def read_ranges(name: str) -> np.ndarray:
    """Reads ranges f32[2, E] from a file of ``jaxvlm embed --quantize=int8``, or from a .npy file.

    Raises:
        ConfigError: the file can't be read or holds no ranges.
    """
    path = pathlib.Path(name)
    ranges = None
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r")
            if array.dtype != np.float32:  # the embeddings themselves
                array = np.load(ranges_path(path))
            ranges = np.array(array)
        elif path.suffix == ".npz":
            ranges = np.load(path)[_RANGES]
        elif path.suffix == ".jsonl":
            ranges = np.load(ranges_path(path))
        elif path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            ranges = load_file(path)[_RANGES]
        elif path.suffix == ".parquet":
            metadata = _pyarrow(path).parquet.read_schema(path).metadata or {}
            ranges = np.asarray(json.loads(metadata[_RANGES.encode()]), np.float32)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"--ranges={name}: the file holds no ranges ({error})") from None
    except Exception as error:  # safetensors and pyarrow have errors of their own
        raise ConfigError(f"--ranges={name} can't be read ({error})") from None
    if ranges is None or ranges.ndim != 2 or len(ranges) != 2:
        raise ConfigError(f"--ranges={name}: the ranges of int8 embeddings have shape [2, E]")
    return ranges.astype(np.float32)


def _npy(file: Any, table: EmbeddingTable) -> None:
    head = {
        "descr": np.lib.format.dtype_to_descr(table.dtype),
        "fortran_order": False,
        "shape": table.shape,
    }
    np.lib.format.write_array_header_1_0(file, head)
    for part in table.parts:
        file.write(part.tobytes())


def _npz(file: Any, table: EmbeddingTable) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        with archive.open("embeddings.npy", "w", force_zip64=True) as member:
            _npy(member, table)
        if table.ranges is not None:
            with archive.open(f"{_RANGES}.npy", "w") as member:
                np.save(member, table.ranges)


def _safetensors(file: Any, table: EmbeddingTable) -> None:
    """Writes the format without the library, which needs all tensors in memory at once."""
    tensors = [("embeddings", table.shape, table.dtype)]
    if table.ranges is not None:
        tensors.append((_RANGES, table.ranges.shape, table.ranges.dtype))
    head: dict[str, Any] = {"__metadata__": {"format": "np"}}
    end = 0
    for name, shape, dtype in tensors:
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


def _jsonl(file: Any, table: EmbeddingTable) -> None:
    for some, part in _with_records(table):
        for row, embedding in zip(some, part.tolist(), strict=True):
            line = json.dumps({**row, "embedding": embedding}, ensure_ascii=False)
            file.write(line.encode() + b"\n")


def _parquet(file: Any, table: EmbeddingTable) -> None:
    pa = _pyarrow(pathlib.Path("output.parquet"))
    names = [n for n in ("id", "text", "image") if any(n in record for record in table.records)]
    embedding = pa.list_(pa.from_numpy_dtype(table.dtype), table.shape[1])
    metadata = {} if table.ranges is None else {_RANGES: json.dumps(table.ranges.tolist())}
    schema = pa.schema([*((n, pa.string()) for n in names), ("embedding", embedding)], metadata)
    with pa.parquet.ParquetWriter(file, schema) as writer:
        for some, part in _with_records(table):
            columns = [pa.array([record.get(n) for record in some], pa.string()) for n in names]
            flat = pa.array(part.reshape(-1))
            columns.append(pa.FixedSizeListArray.from_arrays(flat, table.shape[1]))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _with_records(
    table: EmbeddingTable,
) -> Iterator[tuple[Sequence[Mapping[str, str]], np.ndarray]]:
    first = 0
    for part in table.parts:
        yield table.records[first : first + len(part)], part
        first += len(part)


def _pyarrow(path: pathlib.Path) -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{path}: Parquet needs pyarrow; run `pip install 'jaxvlm[parquet]'`")
    import pyarrow
    import pyarrow.parquet

    return pyarrow


WRITERS: dict[str, Callable[[Any, EmbeddingTable], None]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".parquet": _parquet,
    ".jsonl": _jsonl,
}
"""Suffix of the file -> function that writes it."""
