"""The visual-token cache of a loaded model: an image's tokens are computed once and read again."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import weakref
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxvlm.cache.cached_step import make_encode_step, split_vision
from jaxvlm.cache.identity import identity
from jaxvlm.cache.policy import make_policy
from jaxvlm.cache.settings import token_layout, with_encode_batch
from jaxvlm.cache.store.rows import Store
from jaxvlm.cache.store.segment_files import Identity
from jaxvlm.cache.store.tiers import Tiers
from jaxvlm.cache.writer import tokens_of_image
from jaxvlm.checkpoint.run_record import local_folder
from jaxvlm.config import CacheConfig, Config, ConfigError
from jaxvlm.data.conversations.packing import bucket
from jaxvlm.data.images.image_files import ImageFormat
from jaxvlm.data.page_allocation import TokenShape
from jaxvlm.models.vlm import DTYPES
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import (
    local_rows,
    max_over_processes,
    owned_rows,
    sum_over_processes,
    to_global,
)
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.submodels import feature_shape
from jaxvlm.types import Batch, Params

_log = logging.getLogger(__name__)


class Counts(NamedTuple):
    """Images, or their tiles, whose tokens a process needed so far: each once for a batch."""

    read: int = 0
    """Those whose tokens were cached."""
    encoded: int = 0
    """Those that the vision encoder took."""

    def text(self) -> str:
        """A line for people."""
        return f"visual tokens: {self.read:,} images read, {self.encoded:,} encoded"


class VisualTokens:
    """Visual tokens of images, in host memory and on disk; see ``docs/cache.md``.

    Images are encoded one at a time on each data shard (``config.cache.encode_batch`` at a time,
    where a run sets it), so that an image's tokens do not depend on the other images of a batch.

    Args:
        config: settings of the model; of ``config.cache`` the order of the tokens, ``identity`` and
            ``encode_batch`` are read.
        model: model on its mesh.
        params: its parameters.
        image_format: how the model takes images.
        memory_mb: maximum size of the tokens in this process's memory, in 2**20 bytes.
        store: folder of tokens on disk; "": none. Tokens that a training run wrote for the same
            vision encoder on the same mesh are read too, and never changed.

    Raises:
        ConfigError: a setting that can't be used.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        params: Params,
        image_format: ImageFormat,
        memory_mb: int = 0,
        store: str = "",
    ):
        _check(model, memory_mb, store)
        self.room = memory_mb, store
        """What it was given."""
        chosen = CacheConfig(
            policy="strict",
            memory_mb=memory_mb,
            store=store,
            encode_batch=config.cache.encode_batch or 1,
            token_order=config.cache.token_order,
            identity=config.cache.identity,
        )
        self._cache, self._model = chosen, model
        self._params, _ = split_vision(params)
        self._patching = image_format.patching
        self._layout = token_layout(chosen, model.config)
        tokens, width = feature_shape(model.config)
        self.shape = TokenShape(width, np.dtype(DTYPES[model.config.dtype]))
        """Of the tokens."""
        self.tokens = tokens
        """P, tokens of an image or a tile; 0: one for each patch of an image of any size."""
        self.counts = Counts()
        opened = self._open(dataclasses.replace(config, cache=chosen), config, image_format)
        self._tiers = [Tiers(opened[0], memory_mb, self.shape.dtype)]
        self._tiers += [Tiers(other, 0, self.shape.dtype) for other in opened[1:]]
        # Rows are written by a thread, for which the end of the process does not wait.
        self._closing = weakref.finalize(self, _close, self._tiers)
        self._encode = functools.cache(self._program)

    def _open(self, own: Config, run: Config, image_format: ImageFormat) -> list[Store | None]:
        """The store to read and write, and one to read: the tokens that the run wrote."""
        if not own.cache.store:
            return [None]
        folder = pathlib.Path(own.cache.store).expanduser()
        windows = (self.tokens,) if self.tokens else ()
        of_run = with_encode_batch(run, self._model.mesh).encode_batch
        facts = [
            identity(own, self._model, image_format.prepare, windows, self._params, encode_batch)
            for encode_batch in (own.cache.encode_batch, of_run)
        ]
        names = [Identity.of(made_by, own.cache.codec).name for made_by in facts]
        also = names[1] != names[0] and (folder / names[1]).is_dir()
        return [Store(folder, made_by) for made_by in facts[: 1 + also]]

    def is_of(self, params: Params) -> bool:
        """Whether the tokens are those of these parameters: of the same arrays."""
        return all(params[path] is x for path, x in self._params.items())

    def close(self) -> None:
        """Wait until all tokens are on disk."""
        self._closing()

    def lookup(self, key: bytes) -> np.ndarray | None:
        """Find an image's or a tile's tokens.

        Args:
            key: 16 bytes of its key, see :func:`jaxvlm.data.images.image_files.key`.

        Returns:
            [P, D], in the order of the cache, or ``None``.
        """
        own = self._layout.cache_key(np.frombuffer(key, np.uint32)).tobytes()
        for tiers in self._tiers:
            found = self._layout.find(tiers.get, own)
            if found is not None:
                return found
        return None

    def complete(self, batch: Batch) -> Batch:
        """Replace the images of a batch by their tokens; all processes call it together.

        Args:
            batch: this process's sequences, NumPy arrays, with ``image_key``; images whose tokens
                are in ``stored`` need no pixels.

        Returns:
            The batch with ``features``, and without images.
        """
        if batch.image_key is None:
            return batch
        here = batch.image_start >= 0
        wanted, seen = dict[bytes, list[tuple[int, int]]](), set[bytes]()
        cached = np.zeros(here.shape, bool) if batch.is_stored is None else batch.is_stored
        tokens = batch.stored
        if tokens is None:
            shape = (*here.shape, self.tokens) if self.tokens else batch.patches.shape[:2]
            tokens = np.zeros((*shape, self.shape.width), self.shape.dtype)
        for row, place in np.argwhere(here).tolist():
            key = batch.image_key[row, place].tobytes()
            seen.add(key)
            if cached[row, place]:
                continue
            found = self.lookup(key)
            if found is not None:
                tokens_of_image(tokens[row], batch, row, place)[:] = found
            else:
                wanted.setdefault(key, []).append((row, place))
        fresh = self._encoded(batch, {key: places[0] for key, places in wanted.items()})
        for key, places in wanted.items():
            own = self._layout.cache_key(np.frombuffer(key, np.uint32)).tobytes()
            self._tiers[0].put(own, fresh[key])
            for row, place in places:
                tokens_of_image(tokens[row], batch, row, place)[:] = fresh[key]
        read, encoded = self.counts
        self.counts = Counts(read + len(seen) - len(wanted), encoded + len(wanted))
        names = ("pixels", "patches", "image_key", "stored", "is_stored")
        return batch._replace(**dict.fromkeys(names), features=self._layout.from_cache(tokens))

    def _encoded(
        self, batch: Batch, wanted: dict[bytes, tuple[int, int]]
    ) -> dict[bytes, np.ndarray]:
        """Encode images: key -> [P, D], in the order of the cache.

        Args:
            batch: this process's sequences.
            wanted: key of an image -> its sequence and its number there.
        """
        mesh, found = self._model.mesh, dict[bytes, np.ndarray]()
        size = self._cache.encode_batch * batch_shards(mesh)
        rows = local_rows(mesh, size)
        left = [(self._window(batch, *place), key) for key, place in wanted.items()]
        while True:
            # The processes run the same programs: in turn, the largest window that is left.
            window = max_over_processes(max((window for window, _ in left), default=0))
            if not window:
                return found
            now = [key for own, key in left if own == window][: len(rows)]
            left = [item for item in left if item[1] not in now]
            images = self._images(batch, [wanted[key] for key in now], len(rows), window)
            tokens = owned_rows(
                self._encode(window)(self._params, to_global(mesh, images, size)), True
            )
            for key, row in zip(now, rows.tolist(), strict=False):
                count = 0 if self.tokens else int(batch.grid[wanted[key]].prod())
                found[key] = tokens[row][:count] if count else tokens[row][0]

    def _window(self, batch: Batch, row: int, place: int) -> int:
        """The number of tokens that an image is padded to."""
        if self._patching is None:
            return self.tokens
        # Few numbers are compiled.
        return bucket(int(batch.grid[row, place].prod()), self._patching.padded_count(1))

    def _images(
        self, batch: Batch, places: list[tuple[int, int]], count: int, window: int
    ) -> Batch:
        """Images of a batch as ``count`` sequences of one image; those left over are empty."""
        start = np.full((count, 1), -1, np.int32)
        start[: len(places)] = 0
        images = Batch(None, None, None, None, image_start=start, is_stored=start > 0)
        if self._patching is None:
            pixels = np.zeros((count, 1, *batch.pixels.shape[2:]), np.uint8)
            for i, where in enumerate(places):
                pixels[i, 0] = batch.pixels[where]
            return images._replace(pixels=pixels)
        patches = np.zeros((count, window, batch.patches.shape[-1]), np.uint8)
        grid = np.zeros((count, 1, 3), np.int32)
        for i, (row, place) in enumerate(places):
            own = tokens_of_image(batch.patches[row], batch, row, place)
            patches[i, : len(own)], grid[i, 0] = own, batch.grid[row, place]
        return images._replace(patches=patches, grid=grid)

    def _program(self, window: int) -> Callable[[Params, Batch], jax.Array]:
        """The compiled program that encodes images of at most ``window`` tokens."""
        step = make_encode_step(self._cache, self._model, (window,), make_policy(self._cache))

        def encode(params: Params, batch: Batch) -> jax.Array:
            return step.features(params, None, batch, step.lookup(None, batch))

        return jax.jit(encode)


def _check(model: Model, memory_mb: int, store: str) -> None:
    """Refuse settings of the cache that can't be used."""
    if not (memory_mb or store):
        raise ConfigError("a cache needs room: cache_memory_mb above 0, or a cache_store")
    if not isinstance(memory_mb, int) or memory_mb < 0:
        raise ConfigError(f"cache_memory_mb={memory_mb!r} must be a whole number, at least 0")
    local_folder("cache_store", store)
    folder = pathlib.Path(store or ".").expanduser()
    if any(path.exists() and not path.is_dir() for path in (folder, *folder.parents)):
        raise ConfigError(f"cache_store={store}: a file is there; give a folder")
    shards = batch_shards(model.mesh)
    held = sum_over_processes(np.asarray([len(local_rows(model.mesh, shards))], np.float64))[0]
    if store and held > shards:
        raise ConfigError(
            f"cache_store={store}: processes that share sequences (tensor, context or pipeline "
            "spans several processes) may find different tokens there; leave it out, or keep "
            "these axes within a process"
        )


def _close(tiers: list[Tiers]) -> None:
    for each in tiers:
        each.close()
