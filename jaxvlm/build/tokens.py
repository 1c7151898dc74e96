"""Visual tokens outside of the devices: in host memory and on disk, in and out of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.build.cache_inputs import CacheInputs
from jaxvlm.build.model import Model
from jaxvlm.build.parts import features_of
from jaxvlm.cache import files
from jaxvlm.cache.codec import error_bound
from jaxvlm.cache.files import Identity
from jaxvlm.cache.order import Kept
from jaxvlm.cache.store import Store
from jaxvlm.cache.tiers import Tiers
from jaxvlm.config import CacheConfig, ConfigError, DualConfig, LoraConfig, VisionConfig
from jaxvlm.data.views import Lookup
from jaxvlm.io.digest import bit_words, flat_index, mix
from jaxvlm.models.vlm import DTYPES
from jaxvlm.parallel.sharding import owned_rows, sum_over_processes
from jaxvlm.train.apart import is_tower
from jaxvlm.types import Batch, Params

TRUST = ("all", "weights")
_SEEDS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
_FLUSH_SECONDS = 20.0
_WAITING = 4
"""Steps whose tokens may wait for the host; of more none are taken, a run does not wait."""


class Made(NamedTuple):
    """What a step gives of its pictures' tokens."""

    tokens: Any
    """``Batch.features``, as they are kept."""
    encoded: Any
    """bool[B, I]: made in this step, not read."""


class Keeper:
    """Takes what steps encode, behind them, and gives what is known to the input pipeline.

    Args:
        tiers: where tokens are kept.
        rows: numbers of this process's rows in the global batch, ascending.
        say: takes lines for people.
        find: what is kept by a key, in another order too; ``None``: as ``tiers`` have it.
    """

    def __init__(
        self, tiers: Tiers, rows: np.ndarray, say: Callable[[str], None], find: Lookup | None = None
    ):
        self.tiers, self._say, self._find = tiers, say, find or tiers.get
        self._local = {row: i for i, row in enumerate(rows.tolist())}
        self._failed, self._flushed = False, time.monotonic()
        self._change = 0.0
        self._audited: set[bytes] = set()
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[Batch, Made] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name="tokens", daemon=True)
        self._thread.start()

    def take(self, batch: Batch, made: Made) -> None:
        """Keep what a step has of its pictures; returns at once.

        Args:
            batch: this process's rows, numpy; as many to each row of the global batch.
            made: what the step gave, split as a batch is.
        """
        fresh = batch.image_key[(batch.image_start >= 0) & ~batch.is_stored]
        if not self._failed and any(self._wants(key.tobytes()) for key in fresh):
            with contextlib.suppress(queue.Full):  # then the next pass has another chance
                self._queue.put_nowait((batch, made))

    def change(self) -> float:
        """The largest relative distance, since the last call, of tokens that were made although
        they were kept from what was kept.
        """
        with self._lock:
            found, self._change = self._change, 0.0
        return found

    def close(self) -> None:
        """Wait until all that was taken is kept."""
        self._queue.put(None)
        self._thread.join()
        self.tiers.close()

    def _wants(self, key: bytes) -> bool:
        if self.tiers.is_new(key):
            return False
        known = self.tiers.has(key)
        return key not in self._audited if known else self.tiers.takes

    def _work(self) -> None:
        while True:
            left = max(0.0, self._flushed + _FLUSH_SECONDS - time.monotonic())
            try:
                item: Any = self._queue.get(timeout=None if self._failed else left)
            except queue.Empty:
                item = ()
            if item is None:
                return
            if self._failed:  # what waits is let go, so that nobody waits for room
                continue
            try:
                if item:
                    self._keep(*item)
                self._flush()
            except Exception as error:  # the run does not need it
                self._failed = True
                self._say(f"visual tokens are no longer kept: {type(error).__name__}: {error}")

    def _keep(self, batch: Batch, made: Made) -> None:
        per_row = len(batch.image_key) // len(self._local)  # documents of an example
        encoded = owned_rows(made.encoded)
        for row, data in owned_rows(made.tokens).items():
            at = self._local[row // per_row] * per_row + row % per_row
            for place in np.flatnonzero((batch.image_start[at] >= 0) & ~batch.is_stored[at]):
                key = batch.image_key[at, place].tobytes()
                if self._wants(key):
                    tokens = of_picture(data, batch, at, int(place))
                    self._one(key, tokens, bool(encoded[row][place]))

    def _flush(self) -> None:
        """Now and then, whether or not there is more to keep: a run that is killed, or another
        beside it, should lose little.
        """
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            if self.tiers.store:
                self.tiers.store.flush()
            self._flushed = time.monotonic()

    def _one(self, key: bytes, tokens: np.ndarray, encoded: bool) -> None:
        known = self._find(key)
        if known is None:
            self.tiers.put(key, tokens)
            return
        if not encoded:  # read from its pages: that says nothing of what the tower makes
            return
        self._audited.add(key)
        new, old = tokens.astype(np.float32), known.astype(np.float32)
        apart = float(np.linalg.norm(new - old)) / max(float(np.linalg.norm(old)), 1e-30)
        with self._lock:
            self._change = max(self._change, apart)


def of_picture(tokens: np.ndarray, batch: Batch, row: int, place: int) -> np.ndarray:
    """[P, D]: a picture's part of a row's tokens, a view."""
    if tokens.ndim == 3:
        return tokens[place]
    sizes = batch.grid[row].prod(axis=1)
    first = int(sizes[:place].sum())
    return tokens[first : first + int(sizes[place])]


def is_on(config: CacheConfig) -> bool:
    """Whether tokens are kept outside of the devices."""
    return bool(config.store) or config.memory_mb > 0


def share_rows(run: CacheInputs) -> bool:
    """Whether processes share rows, and so what each of them finds of their pictures must agree."""
    count = sum_over_processes(np.asarray([len(run.rows)], np.float64))[0]
    return bool(count > run.config.data.batch_size)


def refuse_shared_rows(run: CacheInputs) -> None:
    """Refuse tokens outside of the devices where processes share rows.

    Raises:
        ConfigError: they do.
    """
    name = "store" if run.config.cache.store else "memory_mb"
    if share_rows(run):
        raise ConfigError(
            f"config.cache.{name}: processes that share rows (config.mesh.tensor, context or stage "
            "over several) may find other tokens each; leave it out, or keep these axes inside of "
            "a process"
        )


def open_keeper(
    run: CacheInputs,
    params: Callable[[], Params],
    chunk: int,
    kept: Kept,
    say: Callable[[str], None],
) -> Keeper | None:
    """The keeper of a run, or ``None`` where it wants none.

    Args:
        run: its settings; its data is told where to look.
        params: gives all of the model's.
        chunk: as the tower takes pictures.
        kept: how tokens lie.
        say: takes lines for people.
    """
    config = run.config.cache
    if not is_on(config) or run.learns:
        return None
    refuse_shared_rows(run)
    store = None
    if config.store:
        facts = identity(run, params(), chunk)
        folder = pathlib.Path(config.store).expanduser()
        only = None
        if config.codec != "exact" and run.workdir:
            name = Identity.of(facts, config.codec).name
            if not jax.process_index():
                only = there_before(run.workdir, folder / name, say)
            sum_over_processes(np.zeros(1))  # what process 0 saw, all read
            if jax.process_index():
                only = there_before(run.workdir, folder / name, lambda line: None)
        store = Store(folder, facts, config.codec, say, only=only)
        counts = store.counts()
        trusted = "" if config.trust == "all" else ", made on whatever machine"
        say(
            f"visual tokens on disk: {store.folder}: {counts.rows:,} pictures of this tower"
            f"{trusted}, {counts.bytes / 2**20:.1f} MiB"
        )
    tiers = Tiers(store, config.memory_mb, DTYPES[run.config.network.dtype])
    find = functools.partial(kept.find, tiers.get)
    run.dataset.look_up(find, config.refresh)
    return Keeper(tiers, run.rows, say, find)


def there_before(
    workdir: pathlib.Path, folder: pathlib.Path, say: Callable[[str], None]
) -> set[str]:
    """Names of the segment files that ``folder`` held when the run in ``workdir`` began.

    Tokens behind a codec that changes numbers are not read by the run that made them, however often
    it is stopped: its losses would depend on when it was.

    Raises:
        ConfigError: the run's list of them can't be read.
    """
    path = workdir / "tokens.json"
    try:
        begun = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        known = begun.get(folder.name)
        known = known if known is None else set(map(str, known))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{path}: can't be read ({error}): which tokens of {folder} this run may read is not "
            "known; remove it, and all that are there are read, the run's own too: its losses are "
            "not the unbroken run's then"
        ) from None
    there = set[str]()
    try:
        there = {file.name for file in files.list_folder(folder).segments}
    except FileNotFoundError:
        pass
    except OSError:
        return there  # the store says why
    if known is None:
        known = there
        files.write_whole(path, json.dumps(begun | {folder.name: sorted(there)}).encode())
        if there and any(x.name.isdigit() for x in (workdir / "checkpoints").glob("*")):
            say(
                f"{path} does not say which tokens of {folder} were there when this run began: all "
                "are read; if it made some of them, its losses are not the unbroken run's"
            )
    if gone := known - there:
        say(
            f"{folder}: {len(gone)} of {len(known)} files of tokens that were there when this run "
            "began are gone, or written anew by `jaxvlm cache prune`; pictures that were in no "
            "other are encoded, and its losses are not the unbroken run's then"
        )
    return known


def alarm_of(codec: str) -> float:
    """Relative change of a frozen tower's tokens that neither rounding nor the codec makes."""
    return max(1e-3, 10 * float(error_bound(codec, 1.0)))


def _without_dropout(part: VisionConfig | LoraConfig) -> dict[str, Any]:
    """Its settings; what is frozen, and so kept, drops nothing."""
    return dataclasses.asdict(dataclasses.replace(part, dropout=0.0))


def identity(run: CacheInputs, params: Params, chunk: int) -> dict[str, Any]:
    """What tokens depend on beside the picture: equal only where they would be equal."""
    config, model, slots = run.config, run.model, run.slots
    network = config.network
    assert slots is not None
    facts: dict[str, Any] = {
        "weights": weights_digest(params),
        "tower": _without_dropout(network.vision),
        "width": features_of(network)[1],
        "pooled": isinstance(network, DualConfig),
        # Those of a trunk's top change nothing below it.
        "adapters": {} if model.has_trunk else _without_dropout(network.lora),
        "pictures": run.dataset.preparation.fingerprint,
        "libraries": {name: version(name) for name in ("pillow", "transformers")},
        "tokens": files.TOKENS_VERSION,
    }
    if config.cache.trust == "all":
        device = jax.devices()[0]
        facts |= {
            "platform": f"{device.device_kind} {device.client.platform_version}",
            "jax": f"{jax.__version__} {jax.lib.__version__}",
            "flags": [
                os.environ.get("XLA_FLAGS", ""),
                str(jax.config.values["jax_default_matmul_precision"]),
            ],
            "dtype": network.dtype,
            "attention": network.attention,
            "layout": _layout(model),
            "chunk": [*slots.windows, chunk],
        }
    return facts


def weights_digest(params: Params) -> str:
    """Of a tower's parameters, on whatever mesh."""
    paths = sorted(path for path in params if is_tower(path))
    sums = _mixed(tuple(params[path] for path in paths))
    facts = [(p, str(params[p].dtype), params[p].shape) for p in paths]
    return hashlib.blake2b(repr((facts, np.asarray(sums).tolist())).encode()).hexdigest()[:32]


@jax.jit
def _mixed(leaves: tuple[jax.Array, ...]) -> jax.Array:
    """u32[leaves, 4]: sums of words that are mixed with their places, so that changes in several
    do not cancel as they may in a sum of products; in any order, so on any mesh.
    """
    lanes = []
    for leaf in leaves:
        words = bit_words(leaf)
        place = flat_index(words.shape)
        lane = [
            jnp.sum(mix(words ^ mix(place + jnp.uint32(seed))), dtype=jnp.uint32) for seed in _SEEDS
        ]
        lanes.append(jnp.stack(lane))
    return jnp.stack(lanes)


def _layout(model: Model) -> dict[str, Any]:
    """How the tower lies on the mesh. The number of data shards alone changes nothing in it."""
    mesh = {axis: size for axis, size in model.mesh.shape.items() if axis != "data"}
    return {"mesh": mesh, "strategy": dataclasses.asdict(model.strategies["vision"])}
