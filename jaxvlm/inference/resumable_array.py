"""An array on disk that is written in parts, so that finished parts survive a kill."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxvlm.checkpoint.run_record import whole_file, write_whole
from jaxvlm.config import ConfigError, json_text

_IDENTITY = "made_from.json"


class ResumableArray:
    """f32[N, E] stored in files of some rows each; indexing it reads the rows from disk.

    Args:
        folder: folder of the files.
        shape: (N, E).
        size: number of rows per part.
    """

    ndim = 2

    def __init__(self, folder: pathlib.Path, shape: tuple[int, int], size: int):
        if size < 1:
            raise ConfigError(f"part_size={size} must be at least 1")
        self.folder, self.shape, self.size = folder, shape, size
        self.slices = [slice(i, min(i + size, shape[0])) for i in range(0, shape[0], size)]
        self._identity: dict[str, str] = {}

    def begin(self, identity: Mapping[str, str]) -> list[bool]:
        """Says which parts already exist, and refuses parts with another identity.

        Args:
            identity: digests of what the parts depend on, one entry per input.

        Returns:
            For each part, whether it is complete.

        Raises:
            ConfigError: the folder holds parts with another identity.
        """
        self._identity = dict(identity)
        done = [self._is_complete(i) for i in range(len(self.slices))]
        path = self.folder / _IDENTITY
        if not path.is_file():
            return [False] * len(done)
        try:
            stored = dict(json_text.read(path))
        except (TypeError, ValueError):
            stored = {}
        if other := [name for name in identity if stored.get(name) != identity[name]]:
            raise ConfigError(
                f"{self.folder} holds embeddings of an interrupted run with other "
                f"{', '.join(other)}; use the same as that run, or delete that folder to start over"
            )
        return done

    def write(self, number: int, rows: np.ndarray) -> None:
        """Writes part ``number`` atomically; call :meth:`begin` first."""
        if not (self.folder / _IDENTITY).is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / _IDENTITY, json.dumps(self._identity, indent=2) + "\n")
        with whole_file(self._file(number)) as file:
            np.save(file, np.ascontiguousarray(rows, np.float32))

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (np.array(self._part(i)) for i in range(len(self.slices)))

    def __getitem__(self, key: Any) -> np.ndarray:
        """Reads the rows of a slice, or of an i[n] array of indices."""
        indices = np.arange(len(self))[key]
        out = np.empty((len(indices), self.shape[1]), np.float32)
        part = indices // self.size
        for i in np.unique(part).tolist():
            in_part = part == i
            out[in_part] = self._part(i)[indices[in_part] - i * self.size]
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or np.float32, copy=False)

    def _file(self, number: int) -> pathlib.Path:
        return self.folder / f"{number:06d}.npy"

    def _part(self, number: int) -> np.ndarray:
        return np.load(self._file(number), mmap_mode="r")

    def _is_complete(self, number: int) -> bool:
        rows = self.slices[number]
        try:
            return self._part(number).shape == (rows.stop - rows.start, self.shape[1])
        except (OSError, ValueError):  # missing or truncated
            return False
