"""Tokens of a tower that learns, in host memory: of pictures that have no pages on the devices.

What a step is given is what the step before the last one and those before it made, whatever is
done by then, so that a run's losses depend on no thread and no clock. Whether tokens are too old
the step decides, as of those in pages; so it is given the pixels too.
"""

from __future__ import annotations

import collections
import hashlib
import io
import pathlib
import shutil
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxvlm.build import tokens
from jaxvlm.build.caching import MadeNow
from jaxvlm.cache import files
from jaxvlm.cache.store import Store
from jaxvlm.data.slots import Slots
from jaxvlm.parallel.sharding import owned_rows, sum_over_processes
from jaxvlm.types import Age, Batch

if TYPE_CHECKING:
    from jaxvlm.build.run import Run

_INDEX = "index.npz"
_FLUSH = 2**28
"""Bytes of tokens that wait for the disk at most."""


def open_warm(run: Run, say: Callable[[str], None]) -> Warm | None:
    """The tokens of a run in host memory, or ``None`` where its tower rests or none are kept.

    Raises:
        ConfigError: processes share rows.
    """
    if not (run.training.learns and isinstance(run.slots, Slots) and run.slots.tiles_beyond):
        return None
    tokens.refuse_shared_rows(run)
    return Warm(run.slots, run.rows, say)


class Row(NamedTuple):
    """A picture's tokens in a virtual shard of the data; never written to."""

    tokens: np.ndarray
    """[P, D]."""
    version: int
    due: int
    drift: float
    pull: float


_Place = tuple[int, bytes]
"""A virtual shard, and the picture's key."""


class Warm:
    """The pictures of this process.

    Args:
        slots: which pictures have room here.
        rows: numbers of this process's rows in the global batch, ascending.
        say: takes lines for people.
    """

    def __init__(self, slots: Slots, rows: np.ndarray, say: Callable[[str], None]):
        self._slots, self._say = slots, say
        self._rows = rows.tolist()
        self._kept: dict[_Place, Row] = {}
        self._last: dict[_Place, Row] = {}  # of the step before, known when a run goes on
        self._under_way: collections.deque[tuple[Batch, MadeNow]] = collections.deque()
        self._writer: threading.Thread | None = None
        mine = np.random.default_rng().integers(2**48) if not jax.process_index() else 0
        self._run = int(sum_over_processes(np.asarray([mine], np.float64))[0])

    def fill(self, batch: Batch) -> Batch:
        """A batch of this process with what is known of its pictures.

        Args:
            batch: numpy; its pages may be beyond those of the devices. Its ``stored`` is filled.

        Returns:
            The batch to be placed, its ``image_pages`` those of the devices.
        """
        if batch.image_pages is None:
            return batch
        here = np.zeros(batch.image_start.shape, bool)
        age = Age(*(np.zeros(here.shape, kind) for kind in (*[np.int32] * 2, *[np.float32] * 2)))
        for row, place, at in self._places(batch):
            found = self._kept.get(at)
            if found is None:
                continue
            part = tokens.of_picture(batch.stored[row], batch, row, place)
            if part.shape != found.tokens.shape:  # another preparation has another key
                raise AssertionError("a picture's tokens are as many as they were")
            part[:] = found.tokens
            here[row, place] = True
            for field, value in zip(age, found[1:], strict=True):
                field[row, place] = value
        pages = np.where(batch.image_pages >= self._slots.count, -1, batch.image_pages)
        return batch._replace(image_pages=pages.astype(np.int32), is_stored=here, stored_age=age)

    def take(self, batch: Batch, made: MadeNow | None) -> None:
        """What a step makes, right after it was sent; waits for the one before it.

        Args:
            batch: as the loader gave it to :meth:`fill`.
            made: the step's; ``None``: it has no pictures.
        """
        self._settle()
        if made is not None:
            for x in jax.tree.leaves(made):
                x.copy_to_host_async()
            self._under_way.append((batch, made))

    def _settle(self) -> None:
        self._kept |= self._last
        self._last = {}
        while self._under_way:
            self._kept |= self._made(*self._under_way.popleft())

    def _made(self, batch: Batch, made: MadeNow) -> dict[_Place, Row]:
        """The rows that a step changed."""
        local = {row: i for i, row in enumerate(self._rows)}
        new: dict[_Place, Row] = {}

        def own(x: jax.Array) -> list[np.ndarray]:
            found = {local[row]: data for row, data in owned_rows(x).items()}
            return [found[i] for i in range(len(found))]

        features = own(made.tokens)
        encoded, shown = own(made.encoded), own(made.shown)
        age = Age(*map(own, made.age))
        for row, place, at in self._places(batch):
            if encoded[row][place] and at not in new:
                data = tokens.of_picture(features[row], batch, row, place)
                version, due = (int(x[row][place]) for x in age[:2])
                drift, pull = (float(x[row][place]) for x in age[2:])
                new[at] = Row(np.array(data), version, due, drift, pull)
            elif shown[row][place] and at not in new and at in self._kept:
                new[at] = self._kept[at]._replace(pull=float(age.pull[row][place]))
        return new

    def _places(self, batch: Batch) -> list[tuple[int, int, _Place]]:
        """(row, place, where it is kept) of the pictures that have room here."""
        first = batch.image_pages[..., 0]
        beyond = (batch.image_start >= 0) & (first >= self._slots.count)
        return [
            (
                row,
                place,
                (
                    int(first[row, place] - self._slots.count) // self._slots.beyond,
                    batch.image_key[row, place].tobytes(),
                ),
            )
            for row, place in np.argwhere(beyond).tolist()
        ]

    @property
    def bytes(self) -> int:
        """Of the tokens."""
        return sum(row.tokens.nbytes for row in self._kept.values())

    def save(self, folder: pathlib.Path, step: int, kept: Collection[int]) -> dict[str, Any]:
        """Begin to write what a run needs that goes on from a step's checkpoint.

        Args:
            folder: of such writings.
            step: that is done.
            kept: steps whose checkpoints there are; writings of others, but for later ones, go.

        Returns:
            What :meth:`load` asks for; the same on every process.
        """
        last = dict(self._last)
        for item in self._under_way:
            last |= self._made(*item)
        rows = [(at, row, False) for at, row in self._kept.items()]
        rows += [(at, row, True) for at, row in last.items()]
        self.close()
        args = (folder / str(step) / self._own_name(), rows)
        self._writer = threading.Thread(target=self._write, args=args, name="warm")
        self._writer.start()
        if not jax.process_index() and folder.is_dir():
            needed = {
                *kept,
                *range(max(kept, default=0), step + 1),
            }  # a later one's may be under way
            for path in folder.iterdir():
                if path.name.isdecimal() and int(path.name) not in needed:
                    shutil.rmtree(path, ignore_errors=True)
        return {"run": self._run, "processes": jax.process_count()}

    def _own_name(self) -> str:
        return f"{jax.process_index()}-of-{jax.process_count()}"

    def _write(self, folder: pathlib.Path, rows: list[tuple[_Place, Row, bool]]) -> None:
        try:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was at this step before
            with Store(folder, {"run": self._run}, on_warning=self._say) as store:
                waiting = 0
                for at, row, is_last in rows:
                    store.put(_name(at, is_last), row.tokens)
                    waiting += row.tokens.nbytes
                    if waiting > _FLUSH:
                        store.flush()
                        waiting = 0
            index: dict[str, Any] = {
                "shard": np.asarray([at[0] for at, *_ in rows], np.int64),
                "key": np.asarray([np.frombuffer(at[1], np.uint32) for at, *_ in rows], np.uint32),
                "last": np.asarray([is_last for *_, is_last in rows], bool),
            }
            for i, name in enumerate(Age._fields, 1):
                index[name] = np.asarray([row[i] for _, row, _ in rows])
            file = io.BytesIO()
            np.savez(file, **index)
            files.write_whole(folder / _INDEX, file.getvalue())  # last: all of it is there
        except OSError as error:
            self._say(f"{folder}: visual tokens in host memory are not saved: {error}")

    def load(self, folder: pathlib.Path, step: int, wanted: dict[str, Any] | None) -> None:
        """Go on with what :meth:`save` wrote at a step; what is not there is made again, and said.

        Args:
            folder: that was written to.
            step: of the checkpoint.
            wanted: what :meth:`save` gave.
        """
        if wanted is None:  # of a run that kept nothing here
            return
        shards = {at for row in self._rows for at in self._slots.shards_of(row)}
        lost, there = 0, sorted((folder / str(step)).glob(f"*-of-{wanted['processes']}/{_INDEX}"))
        for path in there:
            with np.load(path) as index:
                of = dict(index)
            store = Store(path.parent, {"run": wanted["run"]}, on_warning=self._say)
            for i in np.flatnonzero(np.isin(of["shard"], list(shards))).tolist():
                at = (int(of["shard"][i]), of["key"][i].tobytes())
                data = store.get(_name(at, bool(of["last"][i])))
                if data is None:
                    lost += 1
                    continue
                version, due = int(of["version"][i]), int(of["due"][i])
                row = Row(data, version, due, float(of["drift"][i]), float(of["pull"][i]))
                (self._last if of["last"][i] else self._kept)[at] = row
        files_lost = wanted["processes"] - len(there)
        if lost or files_lost:
            self._say(
                f"{folder / str(step)}: of the visual tokens in host memory that the checkpoint "
                f"goes with {lost} are not whole, and those of {files_lost} of "
                f"{wanted['processes']} processes are not there; they are made again when their "
                "pictures are shown, so losses differ from those of the run unbroken"
            )

    def close(self) -> None:
        """Wait for the disk."""
        if self._writer is not None:
            self._writer.join()


def _name(at: _Place, is_last: bool) -> bytes:
    """A row's key in the store."""
    text = repr((at, is_last)).encode()
    return hashlib.blake2b(text, digest_size=16, person=b"warm").digest()


def saved_in(workdir: pathlib.Path) -> pathlib.Path:
    """Where a run's are written."""
    return workdir / "warm"
