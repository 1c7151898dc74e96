"""Cache writer of a frozen vision encoder: keeps its tokens in host memory and on disk.

Tokens that steps encode are written by a thread; the input pipeline reads them back.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvlm.cache.identity import identity, segments_at_start
from jaxvlm.cache.policy import make_policy
from jaxvlm.cache.run_inputs import CacheInputs
from jaxvlm.cache.settings import is_outside_devices
from jaxvlm.cache.store.codec import error_bound
from jaxvlm.cache.store.rows import Store
from jaxvlm.cache.store.segment_files import Identity
from jaxvlm.cache.store.tiers import Tiers
from jaxvlm.cache.token_order import TokenLayout
from jaxvlm.config import ConfigError
from jaxvlm.data.image_inputs import Lookup
from jaxvlm.models.vlm import DTYPES
from jaxvlm.parallel.distributed.processes import barrier
from jaxvlm.parallel.sharding import owned_rows, sum_over_processes
from jaxvlm.types import Batch, Params

_FLUSH_SECONDS = 20.0
_WAITING = 4
"""Steps whose tokens may wait for the writer's thread. While as many wait, further steps' tokens
are dropped: training does not wait."""


class EncodedTokens(NamedTuple):
    """A step's visual tokens of a frozen vision encoder, for the cache writer."""

    tokens: Any
    """As ``Batch.features``, in the cache's token order."""
    encoded: Any
    """bool[B, I]: encoded in this step, not read from the cache."""


class CacheWriter:
    """Writes the tokens that steps encoded to host memory and disk, in a thread of its own.

    Args:
        tiers: host memory and disk.
        rows: indices of this process's sequences in the global batch, ascending.
        log: takes a line for the log.
        find: looks tokens up by key, also in other token orders; ``None``: ``tiers.get``.
    """

    def __init__(
        self, tiers: Tiers, rows: np.ndarray, log: Callable[[str], None], find: Lookup | None = None
    ):
        self.tiers, self._log, self._find = tiers, log, find or tiers.get
        self._local = {row: i for i, row in enumerate(rows.tolist())}
        self._failed, self._flushed = False, time.monotonic()
        self._change = 0.0
        self._audited: set[bytes] = set()
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[Batch, EncodedTokens] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name="tokens", daemon=True)
        self._thread.start()

    def write(self, batch: Batch, encoded_tokens: EncodedTokens) -> None:
        """Queue a step's tokens for writing; returns at once.

        Args:
            batch: this process's sequences, NumPy arrays; the same number for each example of the
                global batch.
            encoded_tokens: tokens that the step returned, sharded as a batch is.
        """
        fresh = batch.image_key[(batch.image_start >= 0) & ~batch.is_stored]
        if not self._failed and any(self._is_wanted(key.tobytes()) for key in fresh):
            with contextlib.suppress(queue.Full):  # then the image's next show is another chance
                self._queue.put_nowait((batch, encoded_tokens))

    def max_drift(self) -> float:
        """Return the largest relative difference, since the last call, between cached tokens and
        the same tokens encoded once more for an audit.
        """
        with self._lock:
            largest, self._change = self._change, 0.0
        return largest

    def close(self) -> None:
        """Wait until all queued tokens are written."""
        self._queue.put(None)
        self._thread.join()
        self.tiers.close()

    def _is_wanted(self, key: bytes) -> bool:
        if self.tiers.is_new(key):
            return False
        is_cached = self.tiers.has(key)
        return key not in self._audited if is_cached else self.tiers.takes

    def _work(self) -> None:
        while True:
            left = max(0.0, self._flushed + _FLUSH_SECONDS - time.monotonic())
            try:
                item: Any = self._queue.get(timeout=None if self._failed else left)
            except queue.Empty:
                item = ()
            if item is None:
                return
            if self._failed:  # drain the queue, so that close() does not wait for room in it
                continue
            try:
                if item:
                    self._write_images(*item)
                self._flush()
            except Exception as error:  # training goes on without the cache writer
                self._failed = True
                self._log(
                    "visual tokens are no longer written to the cache: "
                    f"{type(error).__name__}: {error}"
                )

    def _write_images(self, batch: Batch, encoded_tokens: EncodedTokens) -> None:
        per_row = len(batch.image_key) // len(self._local)  # documents of an example
        encoded = owned_rows(encoded_tokens.encoded)
        for row, data in owned_rows(encoded_tokens.tokens).items():
            at = self._local[row // per_row] * per_row + row % per_row
            for place in np.flatnonzero((batch.image_start[at] >= 0) & ~batch.is_stored[at]):
                key = batch.image_key[at, place].tobytes()
                if self._is_wanted(key):
                    tokens = tokens_of_image(data, batch, at, int(place))
                    self._put_or_audit(key, tokens, bool(encoded[row][place]))

    def _flush(self) -> None:
        """Flush the store every ``_FLUSH_SECONDS``, whether or not new tokens arrive, so that a
        killed run loses little and other runs see its tokens soon.
        """
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            if self.tiers.store:
                self.tiers.store.flush()
            self._flushed = time.monotonic()

    def _put_or_audit(self, key: bytes, tokens: np.ndarray, encoded: bool) -> None:
        cached = self._find(key)
        if cached is None:
            self.tiers.put(key, tokens)
            return
        if not encoded:  # read from its pages, so not a recomputation to compare with
            return
        self._audited.add(key)
        new, old = tokens.astype(np.float32), cached.astype(np.float32)
        change = float(np.linalg.norm(new - old)) / max(float(np.linalg.norm(old)), 1e-30)
        with self._lock:
            self._change = max(self._change, change)


def tokens_of_image(tokens: np.ndarray, batch: Batch, row: int, place: int) -> np.ndarray:
    """Return one image's tokens [P, D] of a sequence's, as a view.

    Args:
        tokens: [I, P, D], or [Q, D] of packed patches.
        batch: NumPy arrays, with ``grid`` where patches are packed.
        row: number of the sequence in ``batch``.
        place: number of the image in the sequence.
    """
    if tokens.ndim == 3:
        return tokens[place]
    sizes = batch.grid[row].prod(axis=1)
    first = int(sizes[:place].sum())
    return tokens[first : first + int(sizes[place])]


def processes_share_sequences(run: CacheInputs) -> bool:
    """Whether several processes hold the same sequences, so that their cache hits would have to
    agree.
    """
    count = sum_over_processes(np.asarray([len(run.rows)], np.float64))[0]
    return bool(count > run.config.data.batch_size)


def refuse_shared_sequences(run: CacheInputs) -> None:
    """Refuse a host or disk cache where several processes hold the same sequences.

    Raises:
        ConfigError: they do.
    """
    name = "store" if run.config.cache.store else "memory_mb"
    if processes_share_sequences(run):
        raise ConfigError(
            f"config.cache.{name}: processes that share sequences (config.mesh.tensor, context or "
            "pipeline spans several processes) may have different cache hits; leave it out, or "
            "keep these axes within a process"
        )


def open_cache_writer(
    run: CacheInputs,
    params: Callable[[], Params],
    encode_batch: int,
    layout: TokenLayout,
    log: Callable[[str], None],
) -> CacheWriter | None:
    """Open the cache writer of a run; ``None`` where tokens are cached on the devices alone, or the
    vision encoder is trained.

    Args:
        run: its settings and its dataset, which looks images up in the cache from now on.
        params: returns all of the model's parameters.
        encode_batch: images that the vision encoder takes at once on a data shard.
        layout: order of the cached tokens.
        log: takes a line for the log.

    Raises:
        ConfigError: processes share sequences, or the run's list of segment files can't be read.
    """
    config = run.config.cache
    if not is_outside_devices(config) or run.learns:
        return None
    refuse_shared_sequences(run)
    store = None
    if config.store:
        assert run.pages is not None
        images = (run.dataset.preparation, run.pages.windows)
        facts = identity(run.config, run.model, *images, params(), encode_batch)
        folder = pathlib.Path(config.store).expanduser()
        only = None
        if config.codec != "exact" and run.workdir:
            name = Identity.of(facts, config.codec).name
            if not jax.process_index():
                only = segments_at_start(run.workdir, folder / name, log)
            barrier("token store")  # the others read process 0's list
            if jax.process_index():
                only = segments_at_start(run.workdir, folder / name, lambda line: None)
        store = Store(folder, facts, config.codec, log, only=only)
        counts = store.counts()
        trusted = "" if config.identity == "all" else ", encoded on any kind of machine"
        log(
            f"visual tokens on disk: {store.folder}: {counts.rows:,} images of this vision encoder"
            f"{trusted}, {counts.bytes / 2**20:.1f} MiB"
        )
    tiers = Tiers(store, config.memory_mb, DTYPES[run.config.network.dtype])
    find = functools.partial(layout.find, tiers.get)
    run.dataset.look_up(find, make_policy(config).refresh_fraction)
    return CacheWriter(tiers, run.rows, log, find)


def default_drift_warning(codec: str) -> float:
    """Return the relative change of a frozen vision encoder's tokens above which neither rounding
    nor the codec explains it.
    """
    return max(1e-3, 10 * float(error_bound(codec, 1.0)))
