"""Host cache of a trained vision encoder: tokens of images that have no pages on the devices.

A step is given the tokens that the step before the previous one, and those before it, encoded,
whatever has finished by then, so that losses do not depend on threads or timing. The step decides
whether tokens are stale, as it does for pages; so it is given the images' pixels too.
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

from jaxvlm.cache import host_cache_files, writer
from jaxvlm.cache.cached_step import TrainableTokens
from jaxvlm.cache.host_cache_files import HostEntries, HostPage, HostTokens
from jaxvlm.cache.run_inputs import CacheInputs
from jaxvlm.cache.settings import token_layout
from jaxvlm.cache.token_order import ROW_MAJOR, TokenLayout
from jaxvlm.data.page_allocation import PageAllocation
from jaxvlm.parallel.sharding import owned_rows, sum_over_processes
from jaxvlm.types import PAGE, Age, Batch

_log = logging.getLogger(__name__)
HOST_CACHE = "host_cache"
"""Folder in a run's workdir that its host cache is saved to."""
_MODEL_ORDER = TokenLayout(ROW_MAJOR, ROW_MAJOR, 0)


def open_host_cache(run: CacheInputs, log: Callable[[str], None]) -> HostCache | None:
    """Open the host cache of a run; ``None`` where its vision encoder is frozen, or no image has
    pages in host memory.

    Args:
        run: its settings and page allocation.
        log: takes a line for the log.

    Raises:
        ConfigError: processes share sequences.
    """
    if not (run.learns and isinstance(run.pages, PageAllocation) and run.pages.tiles_beyond):
        return None
    writer.refuse_shared_sequences(run)
    layout = token_layout(run.config.cache, run.config.network)
    return HostCache(run.pages, run.rows, log, layout)


class HostCache:
    """Tokens of this process's images in host memory, each at the page allocated to it.

    Args:
        pages: allocation that says which images have pages in host memory.
        rows: indices of this process's sequences in the global batch, ascending.
        log: takes a line for the log of process 0; other processes log warnings instead.
        layout: order of the cached tokens; tokens stored in another order are converted.
    """

    def __init__(
        self,
        pages: PageAllocation,
        rows: np.ndarray,
        log: Callable[[str], None],
        layout: TokenLayout = _MODEL_ORDER,
    ):
        self._pages, self._log, self._layout = pages, log, layout
        if number := jax.process_index():  # the log shows lines of process 0 alone
            self._log = lambda line: _log.warning("process %d: %s", number, line)
        self._rows = rows.tolist()
        self._tokens = HostEntries({}, {})
        self._pending: collections.deque[tuple[Batch, TrainableTokens]] = collections.deque()
        self._writer: threading.Thread | None = None
        mine = np.random.default_rng().integers(2**48) if not jax.process_index() else 0
        self._run = int(sum_over_processes(np.asarray([mine], np.float64))[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the cached tokens."""
        return sum(entry.tokens.nbytes for entry in self._tokens.current.values())

    def fill(self, batch: Batch) -> Batch:
        """Add the cached tokens of a batch's images to it.

        Args:
            batch: of this process, NumPy arrays; its pages may be those of host memory. Its array
                ``stored`` is written to.

        Returns:
            The batch for the devices; its ``image_pages`` are those on the devices alone.
        """
        if batch.image_pages is None:
            return batch
        is_stored = np.zeros(batch.image_start.shape, bool)
        kinds = (*[np.int32] * 2, *[np.float32] * 2)
        age = Age(*(np.zeros(is_stored.shape, kind) for kind in kinds))
        for row, place, at in self._host_images(batch):
            entry = self._entry(at, _key(batch, row, place))
            if entry is None:
                continue
            part = writer.tokens_of_image(batch.stored[row], batch, row, place)
            if part.shape != entry.tokens.shape:  # another preparation has another key
                raise AssertionError("an image's number of tokens does not change")
            part[:] = entry.tokens
            is_stored[row, place] = True
            for field, value in zip(age, entry.age, strict=True):
                field[row, place] = value
        pages = np.where(batch.image_pages >= self._pages.count, -1, batch.image_pages)
        return batch._replace(
            image_pages=pages.astype(np.int32), is_stored=is_stored, stored_age=age
        )

    def _entry(self, at: HostPage, key: bytes) -> HostTokens | None:
        """Look up the image with a key at its page; converts tokens stored in another order."""
        entry = self._tokens.current.get(at)
        if entry is None or entry.key == key:
            return entry
        stored = {entry.key: entry.tokens}
        data = self._layout.find(stored.get, key)
        if data is None:
            return None
        entry = self._tokens.current[at] = entry._replace(key=key, tokens=data)
        return entry

    def write(self, batch: Batch, encoded_tokens: TrainableTokens | None) -> None:
        """Take a step's tokens right after its dispatch; waits for the step before it.

        Args:
            batch: as given to :meth:`fill`.
            encoded_tokens: tokens that the step returned; ``None``: it has no images.
        """
        self._finish_pending()
        if encoded_tokens is not None:
            for x in jax.tree.leaves(encoded_tokens):
                x.copy_to_host_async()
            self._pending.append((batch, encoded_tokens))

    def _finish_pending(self) -> None:
        """Make the tokens of the steps dispatched so far visible to the next :meth:`fill`."""
        self._tokens.current.update(self._tokens.next)
        self._tokens.next.clear()
        while self._pending:
            self._tokens.current.update(self._changed(*self._pending.popleft()))

    def _changed(self, batch: Batch, encoded_tokens: TrainableTokens) -> dict[HostPage, HostTokens]:
        """Return the entries that a step changed."""
        local = {row: i for i, row in enumerate(self._rows)}
        new: dict[HostPage, HostTokens] = {}

        def own(x: jax.Array) -> list[np.ndarray]:
            by_row = {local[row]: data for row, data in owned_rows(x).items()}
            return [by_row[i] for i in range(len(by_row))]

        features = own(encoded_tokens.tokens)
        encoded, shown = own(encoded_tokens.encoded), own(encoded_tokens.shown)
        ages = [own(x) for x in encoded_tokens.age]
        for row, place, at in self._host_images(batch):
            if encoded[row][place] and at not in new:
                data = np.array(writer.tokens_of_image(features[row], batch, row, place))
                age = Age(*(x[row][place].item() for x in ages))
                new[at] = HostTokens(_key(batch, row, place), data, age)
        for row, place, at in self._host_images(batch):
            old = self._entry(at, _key(batch, row, place))
            if shown[row][place] and at not in new and old:
                norm = Age(*ages).grad_norm[row][place].item()
                new[at] = old._replace(age=old.age._replace(grad_norm=norm))
        return new

    def _host_images(self, batch: Batch) -> list[tuple[int, int, HostPage]]:
        """List (sequence, image, page) of the images that have pages in host memory."""
        first = batch.image_pages[..., 0]
        on_host = (batch.image_start >= 0) & (first >= self._pages.count)
        at = np.stack(divmod(first - self._pages.count, max(self._pages.beyond, 1)), -1)
        return [
            (row, place, (int(at[row, place, 0]), int(at[row, place, 1])))
            for row, place in np.argwhere(on_host).tolist()
        ]

    @property
    def checkpoint_record(self) -> dict[str, Any]:
        """Record to save in the checkpoint, for :meth:`load`; the same on every process."""
        return {"run": self._run, "processes": jax.process_count()}

    def save(self, folder: pathlib.Path, step: int) -> None:
        """Start writing the tokens that a run needs to resume from a step's checkpoint.

        Waits for the previous save. Tokens stay in memory until they are written, even after newer
        ones have replaced them.

        Args:
            folder: of all saves; each is in a sub-folder named by its step.
            step: that is done.
        """
        entries = HostEntries(dict(self._tokens.current), dict(self._tokens.next))
        for item in self._pending:
            entries.next.update(self._changed(*item))
        self.close()
        args = (_part(folder, step), entries, self._run, self._log)
        self._writer = threading.Thread(target=host_cache_files.write, args=args, name="host_cache")
        self._writer.start()

    def load(self, folder: pathlib.Path, step: int, wanted: dict[str, Any] | None) -> None:
        """Load the tokens that :meth:`save` wrote with a checkpoint.

        Logs what can't be read; those tokens are recomputed when their images are shown. To be
        called by all processes.

        Args:
            folder: as given to :meth:`save`.
            step: of the checkpoint.
            wanted: :attr:`checkpoint_record` from the checkpoint; ``None``: it has none.
        """
        if wanted is None:  # the run had no host cache
            return
        room = {row: self._pages.room_beyond(row) for row in self._rows}

        def has_room(at: HostPage, length: int) -> bool:
            # Not all have room where memory, processes or settings differ from the saved run's.
            return at[0] in room and -(-length // PAGE) <= room[at[0]].get(at[1], -1)

        lost, unreadable = 0, []
        for number in range(wanted["processes"]):
            part = _part(folder, step, number, wanted["processes"])
            try:
                read, damaged = host_cache_files.read(part, wanted["run"], has_room, self._log)
            except ValueError as error:
                unreadable.append(str(error))
                continue
            lost += damaged
            self._tokens.current.update(read.current)
            self._tokens.next.update(read.next)
        lost = int(sum_over_processes(np.asarray([lost], np.float64))[0])
        effect = (
            "they are recomputed when their images are shown, so losses differ from those of an "
            "uninterrupted run"
        )
        whose = f"{folder / str(step)}: the host cache saved with the checkpoint lacks the tokens"
        if unreadable:  # on this process; others may read what it can't
            count = f"{len(unreadable)} of {wanted['processes']}"
            self._log(
                f"{whose} of {count} processes, which can't be read ({unreadable[0]}); {effect}"
            )
        if lost and not jax.process_index():
            self._log(f"{whose} of {lost} images, which are damaged or missing; {effect}")

    def close(self) -> None:
        """Wait until the last save is on disk."""
        if self._writer is not None:
            self._writer.join()


def _key(batch: Batch, row: int, place: int) -> bytes:
    return batch.image_key[row, place].tobytes()


def _part(folder: pathlib.Path, step: int, number: int = -1, count: int = 0) -> pathlib.Path:
    """Return the folder of a process's part of a save; of this process unless ``count`` is set."""
    if not count:
        number, count = jax.process_index(), jax.process_count()
    return folder / str(step) / f"{number}-of-{count}"
