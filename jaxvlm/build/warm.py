"""Tokens of a tower that learns, in host memory: of pictures that have no pages on the devices.

What a step is given is what the step before the last one and those before it made, whatever is
done by then, so that a run's losses depend on no thread and no clock. Whether tokens are too old
the step decides, as of those in pages; so it is given the pixels too.
"""

from __future__ import annotations

import collections
import logging
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxvlm.build import tokens, warm_files
from jaxvlm.build.cache_inputs import CacheInputs
from jaxvlm.build.cached import MadeNow
from jaxvlm.build.caching import kept_of
from jaxvlm.build.warm_files import Place, Row, Rows
from jaxvlm.cache.order import ROW_MAJOR, Kept
from jaxvlm.data.slots import Slots
from jaxvlm.parallel.sharding import owned_rows, sum_over_processes
from jaxvlm.types import PAGE, Age, Batch

_log = logging.getLogger(__name__)
_AS_MADE = Kept(ROW_MAJOR, ROW_MAJOR, 0)


def open_warm(run: CacheInputs, say: Callable[[str], None]) -> Warm | None:
    """The tokens of a run in host memory, or ``None`` where its tower rests or none are kept.

    Raises:
        ConfigError: processes share rows.
    """
    if not (run.learns and isinstance(run.slots, Slots) and run.slots.tiles_beyond):
        return None
    tokens.refuse_shared_rows(run)
    kept = kept_of(run.config.cache, run.config.network)
    return Warm(run.slots, run.rows, say, kept)


class Warm:
    """The pictures of this process, each at the pages in host memory that are its own.

    Args:
        slots: which pictures have room here.
        rows: numbers of this process's rows in the global batch, ascending.
        say: takes lines for people; of process 0.
        kept: in which order tokens lie; those of another one are put in it.
    """

    def __init__(
        self,
        slots: Slots,
        rows: np.ndarray,
        say: Callable[[str], None],
        kept: Kept = _AS_MADE,
    ):
        self._slots, self._say, self._order = slots, say, kept
        if number := jax.process_index():  # whose lines nobody else would see
            self._say = lambda line: _log.warning("process %d: %s", number, line)
        self._rows = rows.tolist()
        self._known = Rows({}, {})
        self._under_way: collections.deque[tuple[Batch, MadeNow]] = collections.deque()
        self._writer: threading.Thread | None = None
        mine = np.random.default_rng().integers(2**48) if not jax.process_index() else 0
        self._run = int(sum_over_processes(np.asarray([mine], np.float64))[0])

    @property
    def nbytes(self) -> int:
        """Of the tokens that are kept."""
        return sum(row.tokens.nbytes for row in self._known.seen.values())

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
            found = self._row(at, _key(batch, row, place))
            if found is None:
                continue
            part = tokens.of_picture(batch.stored[row], batch, row, place)
            if part.shape != found.tokens.shape:  # another preparation has another key
                raise AssertionError("a picture's tokens are as many as they were")
            part[:] = found.tokens
            here[row, place] = True
            for field, value in zip(age, found.age, strict=True):
                field[row, place] = value
        pages = np.where(batch.image_pages >= self._slots.count, -1, batch.image_pages)
        return batch._replace(image_pages=pages.astype(np.int32), is_stored=here, stored_age=age)

    def _row(self, at: Place, key: bytes) -> Row | None:
        """What is known of a picture."""
        found = self._known.seen.get(at)
        if found is None or found.key == key:
            return found
        known = {found.key: found.tokens}
        data = self._order.find(known.get, key)
        if data is None:
            return None
        found = self._known.seen[at] = found._replace(key=key, tokens=data)
        return found

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
        self._known.seen.update(self._known.next)
        self._known.next.clear()
        while self._under_way:
            self._known.seen.update(self._made(*self._under_way.popleft()))

    def _made(self, batch: Batch, made: MadeNow) -> dict[Place, Row]:
        """The rows that a step changed."""
        local = {row: i for i, row in enumerate(self._rows)}
        new: dict[Place, Row] = {}

        def own(x: jax.Array) -> list[np.ndarray]:
            found = {local[row]: data for row, data in owned_rows(x).items()}
            return [found[i] for i in range(len(found))]

        features = own(made.tokens)
        encoded, shown = own(made.encoded), own(made.shown)
        ages = [own(x) for x in made.age]
        for row, place, at in self._places(batch):
            if encoded[row][place] and at not in new:
                data = np.array(tokens.of_picture(features[row], batch, row, place))
                age = Age(*(x[row][place].item() for x in ages))
                new[at] = Row(_key(batch, row, place), data, age)
        for row, place, at in self._places(batch):
            old = self._row(at, _key(batch, row, place))
            if shown[row][place] and at not in new and old:
                pull = Age(*ages).pull[row][place].item()
                new[at] = old._replace(age=old.age._replace(pull=pull))
        return new

    def _places(self, batch: Batch) -> list[tuple[int, int, Place]]:
        """(row, place, where it is kept) of the pictures that have room here."""
        first = batch.image_pages[..., 0]
        beyond = (batch.image_start >= 0) & (first >= self._slots.count)
        at = np.stack(divmod(first - self._slots.count, max(self._slots.beyond, 1)), -1)
        return [
            (row, place, (int(at[row, place, 0]), int(at[row, place, 1])))
            for row, place in np.argwhere(beyond).tolist()
        ]

    @property
    def told(self) -> dict[str, Any]:
        """What :meth:`load` asks for, to be kept with the checkpoint; the same on every process."""
        return {"run": self._run, "processes": jax.process_count()}

    def save(self, folder: pathlib.Path, step: int) -> None:
        """Begin to write what a run needs that goes on from a step's checkpoint.

        Waits for the writing before it. While rows are written they stay in memory, though newer
        ones take their places.

        Args:
            folder: of such writings, by step.
            step: that is done.
        """
        rows = Rows(dict(self._known.seen), dict(self._known.next))
        for item in self._under_way:
            rows.next.update(self._made(*item))
        self.close()
        args = (_part(folder, step), rows, self._run, self._say)
        self._writer = threading.Thread(target=warm_files.write, args=args, name="warm")
        self._writer.start()

    def load(self, folder: pathlib.Path, step: int, wanted: dict[str, Any] | None) -> None:
        """Go on with what :meth:`save` wrote at a step; what is not there is made again, and said.

        All processes call it.

        Args:
            folder: that was written to.
            step: of the checkpoint.
            wanted: what :attr:`told` was.
        """
        if wanted is None:  # of a run that kept nothing here
            return
        shards = {shard for row in self._rows for shard in self._slots.shards_of(row)}
        room = {shard: self._slots.room_beyond(shard) for shard in shards}

        def has_room(at: Place, length: int) -> bool:
            # Of more or less memory, of other processes and of other settings not all have.
            return at[0] in room and -(-length // PAGE) <= room[at[0]].get(at[1], -1)

        lost, gone = 0, []
        for number in range(wanted["processes"]):
            part = _part(folder, step, number, wanted["processes"])
            try:
                found, damaged = warm_files.read(part, wanted["run"], has_room, self._say)
            except ValueError as error:
                gone.append(str(error))
                continue
            lost += damaged
            self._known.seen.update(found.seen)
            self._known.next.update(found.next)
        lost = int(sum_over_processes(np.asarray([lost], np.float64))[0])
        made_again = (
            "they are made again when their pictures are shown, so losses differ from those of "
            "the run unbroken"
        )
        whose = f"{folder / str(step)}: of the visual tokens in host memory of the checkpoint"
        if gone:  # here; others may read what this process can't
            count = f"{len(gone)} of {wanted['processes']}"
            self._say(f"{whose} those of {count} processes can't be read ({gone[0]}); {made_again}")
        if lost and not jax.process_index():
            self._say(f"{whose} those of {lost} pictures are damaged or gone; {made_again}")

    def close(self) -> None:
        """Wait for the disk."""
        if self._writer is not None:
            self._writer.join()


def _key(batch: Batch, row: int, place: int) -> bytes:
    return batch.image_key[row, place].tobytes()


def _part(folder: pathlib.Path, step: int, number: int = -1, count: int = 0) -> pathlib.Path:
    """A process's part of a writing; this one's, where not said otherwise."""
    if not count:
        number, count = jax.process_index(), jax.process_count()
    return folder / str(step) / f"{number}-of-{count}"


def saved_in(workdir: pathlib.Path) -> pathlib.Path:
    """Where a run's are written."""
    return workdir / "warm"
