"""A long array that is made a part at a time: what is done survives a kill."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxvlm.config import ConfigError

_IDENTITY = "made_from.json"


class Parts:
    """f32[N, E] in files of some rows each; it is indexed as an array is, and read when it is.

    Args:
        folder: of the files.
        shape: N, E.
        size: rows of a part.
    """

    ndim = 2

    def __init__(self, folder: pathlib.Path, shape: tuple[int, int], size: int):
        if size < 1:
            raise ConfigError(f"part_size={size}: at least 1")
        self.folder, self.shape, self.size = folder, shape, size
        self.slices = [slice(i, min(i + size, shape[0])) for i in range(0, shape[0], size)]
        self._identity: dict[str, str] = {}

    def begin(self, identity: Mapping[str, str]) -> list[bool]:
        """Which parts are there already, made from the same.

        Args:
            identity: what a part depends on, a word for each thing.

        Raises:
            ConfigError: the folder's parts are made from something else.
        """
        self._identity = dict(identity)
        done = [self._whole(i) for i in range(len(self.slices))]
        path = self.folder / _IDENTITY
        if not path.is_file():
            return [False] * len(done)
        try:
            before = dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            before = {}
        if other := [name for name in identity if before.get(name) != identity[name]]:
            raise ConfigError(
                f"{self.folder} holds vectors of an interrupted run with other "
                f"{', '.join(other)}; give what was given then, or delete that folder to start over"
            )
        return done

    def write(self, number: int, rows: np.ndarray) -> None:
        """Part ``number``, behind :meth:`begin`: whole in its file, or not there."""
        if not (self.folder / _IDENTITY).is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            _settle(
                self.folder / _IDENTITY,
                (json.dumps(self._identity, indent=2) + "\n").encode(),
            )
        half = self._file(number).with_suffix(".tmp")
        with half.open("wb") as file:
            np.save(file, np.ascontiguousarray(rows, np.float32))
            file.flush()
            os.fsync(file.fileno())
        half.replace(self._file(number))

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (np.array(self._part(i)) for i in range(len(self.slices)))

    def __getitem__(self, where: Any) -> np.ndarray:
        """Rows of a slice, or of an i[n] array of indices."""
        asked = np.arange(len(self))[where]
        out = np.empty((len(asked), self.shape[1]), np.float32)
        of = asked // self.size
        for i in np.unique(of).tolist():
            here = of == i
            out[here] = self._part(i)[asked[here] - i * self.size]
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or np.float32, copy=False)

    def _file(self, number: int) -> pathlib.Path:
        return self.folder / f"{number:06d}.npy"

    def _part(self, number: int) -> np.ndarray:
        return np.load(self._file(number), mmap_mode="r")

    def _whole(self, number: int) -> bool:
        some = self.slices[number]
        try:
            return self._part(number).shape == (some.stop - some.start, self.shape[1])
        except (OSError, ValueError):  # not there, or cut short
            return False


def _settle(path: pathlib.Path, data: bytes) -> None:
    half = path.with_name(path.name + ".tmp")
    half.write_bytes(data)
    half.replace(path)
