"""Visual tokens outside of the devices: in host memory and on disk, in and out of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import jaxvlm
from jaxvlm.build.model import Model
from jaxvlm.cache.store import Store
from jaxvlm.cache.tiers import Tiers
from jaxvlm.config import CacheConfig, ModelConfig
from jaxvlm.io.digest import digests
from jaxvlm.models.vlm import DTYPES
from jaxvlm.train.apart import is_tower
from jaxvlm.types import Batch, Params

if TYPE_CHECKING:
    from jaxvlm.build.run import Run

TRUST = ("all", "weights")
_WAITING = 4
"""Steps whose tokens may wait for the host; of more none are taken, a run does not wait."""


class Keeper:
    """Takes what steps encode, behind them, and gives what is known to the input pipeline.

    Args:
        tiers: where tokens are kept.
        rows: numbers of this process's rows in the global batch, ascending.
        say: takes lines for people.
    """

    def __init__(self, tiers: Tiers, rows: np.ndarray, say: Callable[[str], None]):
        self.tiers, self.rows, self._say = tiers, rows, say
        self.failed = False
        self.missed = 0
        """Steps whose tokens were not taken."""
        self._change = 0.0
        self._taken: set[bytes] = set()
        self._queue: queue.Queue[tuple[Batch, jax.Array] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name="tokens", daemon=True)
        self._thread.start()

    def take(self, batch: Batch, tokens: jax.Array) -> None:
        """Keep what a step made; returns at once.

        Args:
            batch: this process's rows, numpy.
            tokens: the step's ``Batch.features``, of all rows.
        """
        fresh = (batch.image_start >= 0) & ~batch.is_stored
        keys = {key.tobytes() for key in batch.image_key[fresh]}
        if not self.failed and self.tiers.takes and keys - self._taken:
            try:
                self._queue.put_nowait((batch, tokens))
            except queue.Full:
                self.missed += 1

    def change(self) -> float:
        """The largest relative distance, since the last call, of tokens that were made although
        they were kept from what was kept.
        """
        found, self._change = self._change, 0.0
        return found

    def close(self) -> None:
        """Wait until all that was taken is kept."""
        if not self.failed:
            self._queue.put(None)
            self._thread.join()
        self.tiers.close()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._keep(*item)
            except Exception as error:  # the run does not need it
                self.failed = True
                self._say(f"visual tokens are no longer kept: {type(error).__name__}: {error}")
                return

    def _keep(self, batch: Batch, tokens: jax.Array) -> None:
        for shard in tokens.addressable_shards:
            if shard.replica_id:
                continue
            first = shard.index[0].start or 0
            data: np.ndarray | None = None
            for at in range(shard.data.shape[0]):
                row = int(np.searchsorted(self.rows, first + at))
                for place in np.flatnonzero(batch.image_start[row] >= 0).tolist():
                    key = batch.image_key[row, place].tobytes()
                    if batch.is_stored[row, place] or key in self._taken:
                        continue
                    data = np.asarray(shard.data) if data is None else data
                    self._one(key, _of_picture(data[at], batch, row, place))

    def _one(self, key: bytes, tokens: np.ndarray) -> None:
        self._taken.add(key)
        known = self.tiers.get(key)
        if known is None:
            self.tiers.put(key, tokens)
            return
        new, old = tokens.astype(np.float32), known.astype(np.float32)
        apart = float(np.linalg.norm(new - old)) / max(float(np.linalg.norm(old)), 1e-30)
        self._change = max(self._change, apart)


def _of_picture(tokens: np.ndarray, batch: Batch, row: int, place: int) -> np.ndarray:
    """[P, D]: a picture's part of a row's tokens."""
    if batch.grid is None:
        return tokens[place]
    sizes = batch.grid[row].prod(axis=1)
    first = int(sizes[:place].sum())
    return tokens[first : first + int(sizes[place])]


def is_on(config: CacheConfig) -> bool:
    """Whether tokens are kept outside of the devices."""
    return bool(config.store) or config.memory_mb > 0


def open_keeper(run: Run, params: Params, chunk: int, say: Callable[[str], None]) -> Keeper | None:
    """The keeper of a run, or ``None`` where it wants none.

    Args:
        run: its settings; its data is told where to look.
        params: all of the model's.
        chunk: as the tower takes pictures.
        say: takes lines for people.
    """
    config = run.config.cache
    if not is_on(config):
        return None
    store = None
    if config.store:
        facts = identity(run, params, chunk)
        folder = pathlib.Path(config.store).expanduser()
        store = Store(folder, facts, config.codec, say)
        counts = store.counts()
        trusted = "" if config.trust == "all" else ", made on whatever machine"
        say(
            f"visual tokens on disk: {store.folder}: {counts.rows:,} pictures of this tower"
            f"{trusted}, {counts.bytes / 2**20:.1f} MiB"
        )
    tiers = Tiers(store, config.memory_mb, DTYPES[run.config.model.dtype])
    run.dataset.views.lookup = tiers.get
    run.dataset.audited = config.refresh
    return Keeper(tiers, run.rows, say)


def identity(run: Run, params: Params, chunk: int) -> dict[str, Any]:
    """What tokens depend on beside the picture: equal only where they would be equal."""
    config, model, slots = run.config, run.model, run.slots
    assert slots is not None
    facts: dict[str, Any] = {
        "weights": weights_digest(params),
        "tower": dataclasses.asdict(config.model.vision),
        "pictures": run.dataset.settings.prepare.fingerprint,
        "code": code_digest(),
    }
    if config.cache.trust == "all":
        device = jax.devices()[0]
        facts |= {
            "platform": f"{device.platform} {device.device_kind}",
            "jax": f"{jax.__version__} {jax.lib.__version__}",
            "dtype": config.model.dtype,
            "layout": _layout(model),
            "chunk": [*slots.windows, chunk],
        }
    return facts


def weights_digest(params: Params) -> str:
    """Of a tower's parameters, on whatever mesh; another one where any bit is another."""
    paths = sorted(path for path in params if is_tower(path))
    sums = digests([params[path] for path in paths])
    facts = [(p, str(params[p].dtype), params[p].shape, s) for p, s in zip(paths, sums)]
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def code_digest() -> str:
    """Of the files that a tower is made of."""
    root, digest = pathlib.Path(jaxvlm.__file__).parent, hashlib.blake2b(digest_size=16)
    for path in _sources(root, ("nn", "models", "cache")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _sources(root: pathlib.Path, folders: Sequence[str]) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def _layout(model: Model[ModelConfig]) -> dict[str, Any]:
    """How the tower lies on the mesh. The number of data shards alone changes nothing in it."""
    mesh = {axis: size for axis, size in model.mesh.shape.items() if axis != "data"}
    return {"mesh": mesh, "strategy": dataclasses.asdict(model.strategies["vision"])}
