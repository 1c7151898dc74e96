"""Which pictures of a batch a step encodes, and what it reads instead.

All that touches pages is local to a data shard: a picture's pages lie on the device that its row
lies on (``jaxvlm.data.slots``), so no collective carries a feature. One number is agreed on by all
shards, how many pictures the busiest has to encode: it decides which chunks the tower runs on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxvlm.cache.state import CacheState, page_keys
from jaxvlm.parallel.mesh import BATCH_AXES, batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.types import PAGE, Batch

_ROWS, _CHUNKS, _ALL = PartitionSpec(BATCH_AXES), PartitionSpec(None, BATCH_AXES), PartitionSpec()


class Seen(NamedTuple):
    """What a step knows of a batch's pictures before it encodes one. Of each, [B, I]."""

    first: Any
    """i32: the place of its first token among the tower's tokens of its row."""
    size: Any
    """i32: its tokens; 0 is no picture."""
    stale: Any
    """bool: it has to be encoded."""
    lag: Any
    """i32: updates of the tower since its tokens were made; 0 where it is stale."""

    @property
    def here(self) -> Any:
        """bool: there is a picture."""
        return self.size > 0


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Pictures encoded one by one, each in the smallest window that it fits, in chunks of windows.

    Args:
        encode: parameters and a batch of one picture a row -> its features, [n, 1, P, D] of
            pictures of one size, [n, W, D] of packed patches.
        mesh: of the run.
        windows: tokens that the tower makes of a picture, at most; ascending. One number, P, where
            pictures have one size.
        chunk: of the largest windows, in a chunk on each data shard, and of others so many as have
            the same tokens. One number for all batches of a run: bits depend on it.
        bound: updates of the tower that tokens may be behind.
    """

    encode: Callable[[Any, Batch], jax.Array]
    mesh: Mesh
    windows: tuple[int, ...]
    chunk: int
    bound: int = 0

    def look(self, state: CacheState, batch: Batch) -> Seen:
        """Which pictures have to be encoded: all that have no pages, or others' or old ones."""
        if batch.grid is None:
            number = jnp.arange(batch.image_start.shape[1], dtype=jnp.int32)
            size = jnp.where(batch.image_start >= 0, self.windows[-1], 0).astype(jnp.int32)
            first = jnp.broadcast_to(number * self.windows[-1], size.shape)
        else:
            size = jnp.prod(batch.grid, axis=-1)
            first = jnp.cumsum(size, axis=-1) - size

        def local(key: Any, made: Any, version: Any, pages: Any, wanted: Any, size: Any) -> Any:
            at, used = self._mine(pages, key), _used(pages, size)
            same = (pages >= 0) & jnp.all(key[at] == page_keys(wanted, pages.shape[-1]), axis=-1)
            lag = jnp.max(jnp.where(used, version - made[at], 0), axis=-1)
            return jnp.all(same | ~used, axis=-1), lag

        found, lag = self._local(local, (_ROWS, _ROWS, _ALL, _ROWS, _ROWS, _ROWS), (_ROWS, _ROWS))(
            state.key, state.row_version, state.version, batch.image_pages, batch.image_key, size
        )
        good = (size > 0) & found & (lag <= self.bound)
        return Seen(first, size, (size > 0) & ~good, jnp.where(good, lag, 0))

    def features(self, params: Any, state: CacheState, batch: Batch, seen: Seen) -> jax.Array:
        """The pictures' tokens: stale ones encoded, with gradient, the others read, without.

        Args:
            params: of the tower.
            state: of the cache.
            batch: with its pictures.
            seen: of :meth:`look`.

        Returns:
            ``Batch.features``; zeros where there is no picture.
        """
        fresh: list[jax.Array] = []
        place, done = jnp.zeros_like(seen.size), 0
        for low, high in itertools.pairwise((0, *self.windows)):
            asked = seen.stale & (low < seen.size) & (seen.size <= high)
            order, rank, most = self._order(batch, seen, asked, low, high)
            fresh.append(self._encode(params, batch, seen, order, most, high))
            place = jnp.where(asked, done + rank * high, place)
            done += order.size // batch_shards(self.mesh) * high
        made = self._merge(fresh, place, seen, state, batch)
        if batch.grid is None:
            made = made.reshape(*seen.size.shape, self.windows[-1], -1)
        # The rest of the step is to be compiled as if it had been given them.
        return jax.lax.optimization_barrier(made)

    def write(
        self, state: CacheState, batch: Batch, seen: Seen, features: jax.Array, ok: jax.Array
    ) -> CacheState:
        """The state with what was encoded in it, as of the tower's present version.

        Args:
            state: that was read.
            batch: as :meth:`features` took it.
            seen: likewise.
            features: what it gave.
            ok: whether the step is good; where not, nothing is written.
        """

        def local(old: CacheState, ok: Any, at: Any, keys: Any, seen: Seen, rows: Any) -> Any:
            count, room = at.shape[-1], old.pages.shape[0]
            used = _used(at, seen.size).reshape(-1, count)
            at, stale = at.reshape(-1, count), seen.stale.reshape(-1)
            write = stale & ok & (at[:, 0] >= 0)
            # A picture that is twice among them is written once: a set's places must differ.
            before = np.tri(len(at), k=-1, dtype=bool)
            again = (at[:, None, 0] == at[None, :, 0]) & write[None] & before
            write &= ~jnp.any(again, axis=1)
            beyond = room + jnp.arange(at.size).reshape(at.shape)
            where = jnp.where(write[:, None] & used, self._mine(at, old.pages), beyond).reshape(-1)

            def put(old: jax.Array, new: jax.Array) -> jax.Array:
                return old.at[where].set(new, mode="drop", unique_indices=True)

            def made(rows: jax.Array) -> jax.Array:
                return _windows(rows, seen, count * PAGE).reshape(empty.shape)

            empty = jnp.zeros((at.size, *old.pages.shape[1:]), rows.dtype)
            empty = jax.lax.pcast(empty, BATCH_AXES, to="varying")
            tokens = jax.lax.cond(jnp.any(write), made, lambda rows: empty, rows)
            keys = page_keys(keys, count).reshape(-1, 4)
            return old._replace(
                pages=put(old.pages, tokens.astype(old.pages.dtype)),
                key=put(old.key, keys),
                row_version=put(old.row_version, old.version),
            )

        lie = CacheState(_ROWS, _ROWS, _ROWS, _ALL)
        rows = features.reshape(len(features), -1, features.shape[-1])
        run = self._local(local, (lie, _ALL, _ROWS, _ROWS, _ROWS, _ROWS), lie)
        return run(state, ok, batch.image_pages, batch.image_key, seen, rows)

    def _order(
        self, batch: Batch, seen: Seen, asked: jax.Array, low: int, high: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A shard's pictures in chunks i32[K, n], those asked for first; the place of each in
        them, i32[B, I]; and how many the busiest shard has.
        """
        shards, places = batch_shards(self.mesh), seen.size.size
        room = places * self.windows[-1] if batch.grid is None else batch.patches[..., 0].size
        room //= shards
        size = self.chunk * (self.windows[-1] // high)
        chunks = -(-min(places // shards, room // (low + 1)) // size)

        def local(asked: jax.Array) -> Any:
            flat = asked.reshape(-1)
            order = jnp.argsort(~flat, stable=True)
            rank = jnp.argsort(order).reshape(asked.shape)
            order = jnp.pad(order, (0, max(0, chunks * size - len(flat))))[: chunks * size]
            return order.reshape(chunks, size), rank, jax.lax.pmax(jnp.sum(flat), BATCH_AXES)

        return self._local(local, (_ROWS,), (_CHUNKS, _ROWS, _ALL))(asked)

    def _encode(
        self, params: Any, batch: Batch, seen: Seen, order: jax.Array, most: jax.Array, window: int
    ) -> jax.Array:
        """[K, n, window, D]: of the chunks in which a shard has a picture, zeros of the others."""
        size = order.shape[1] // batch_shards(self.mesh)
        given = (batch.pixels,) if batch.grid is None else (batch.patches, batch.grid)

        def take(order: jax.Array, seen: Seen, given: Any) -> Any:
            if len(given) == 1:
                return [given[0].reshape(-1, 1, *given[0].shape[2:])[order]]
            return [_windows(given[0], seen, window, order), given[1].reshape(-1, 1, 3)[order]]

        def some(order: jax.Array) -> jax.Array:
            run = self._local(take, (_ROWS, _ROWS, _ROWS), [_ROWS] * len(given))
            names = ("pixels",) if batch.grid is None else ("patches", "grid")
            taken = dict(zip(names, run(order, seen, given)))
            made = self.encode(params, Batch(None, None, None, None)._replace(**taken))
            # What is kept is what is used: XLA may leave a cast out that this one cannot be.
            kind = jnp.finfo(made.dtype)
            return jax.lax.reduce_precision(made, kind.nexp, kind.nmant)

        empty = jax.eval_shape(some, order[0])

        def none(order: jax.Array) -> jax.Array:
            return jnp.zeros(empty.shape, empty.dtype)

        @jax.checkpoint
        def one(carry: None, chunk: Any) -> tuple[None, jax.Array]:
            number, pictures = chunk
            made = jax.lax.cond(number * size < most, some, none, pictures)
            return None, jax.lax.with_sharding_constraint(made, batch_sharding(self.mesh))

        made = jax.lax.scan(one, None, (jnp.arange(len(order)), order))[1]
        return made.reshape(*order.shape, window, -1)

    def _merge(
        self,
        fresh: list[jax.Array],
        place: jax.Array,
        seen: Seen,
        state: CacheState,
        batch: Batch,
    ) -> jax.Array:
        """[B, Q, D]: the tower's tokens of each row; a stale picture's from its place in fresh."""
        width = state.pages.shape[-1]
        if batch.grid is None:
            length = seen.size.shape[1] * self.windows[-1]
        else:
            length = batch.patches.shape[1]

        def local(fresh: Any, start: Any, seen: Seen, pages: Any, at: Any) -> Any:
            place = jnp.arange(length)
            begin, end = seen.first[:, None], (seen.first + seen.size)[:, None]
            inside = (begin <= place[:, None]) & (place[:, None] < end)  # [B, Q, I]
            which, here = jnp.argmax(inside, axis=-1), jnp.any(inside, axis=-1)

            def of_picture(x: jax.Array) -> jax.Array:
                return jnp.take_along_axis(x, which, axis=1)

            token = jnp.where(here, place - of_picture(seen.first), 0)
            stale = here & of_picture(seen.stale)
            page = jnp.take_along_axis(at, which[..., None], axis=1)
            page = jnp.take_along_axis(page, (token // PAGE)[..., None], axis=2)[..., 0]
            index = self._mine(page, pages) * PAGE + token % PAGE
            old = jax.lax.stop_gradient(pages).reshape(-1, width)[index]
            old = jnp.where((here & ~stale)[..., None], old, 0)

            def some(fresh: Any, old: Any) -> Any:
                fresh = jnp.concatenate([x.reshape(-1, width) for x in fresh])
                beyond = len(fresh) + jnp.arange(which.size).reshape(which.shape)
                index = jnp.where(stale, of_picture(start) + token, beyond)
                made = fresh.at[index].get(mode="fill", fill_value=0, unique_indices=True)
                return jnp.where(stale[..., None], made, old)

            return jax.lax.cond(jnp.any(stale), some, lambda fresh, old: old, fresh, old)

        run = self._local(local, (_CHUNKS, _ROWS, _ROWS, _ROWS, _ROWS), _ROWS)
        return run(fresh, place, seen, state.pages, batch.image_pages)

    def _mine(self, pages: jax.Array, of: jax.Array) -> jax.Array:
        """Numbers of pages as this shard, which has those ``of``, counts them; -1 becomes 0."""
        return jnp.maximum(pages - jax.lax.axis_index(BATCH_AXES) * of.shape[0], 0)

    def _local(self, run: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=out)


def _used(pages: jax.Array, size: jax.Array) -> jax.Array:
    """bool[B, I, n]: which of the places for a picture's pages its tokens need."""
    return jnp.arange(pages.shape[-1]) * PAGE < size[..., None]


def _windows(rows: jax.Array, seen: Seen, length: int, order: jax.Array | None = None) -> jax.Array:
    """[B * I, length, X]: of rows [B, Q, X], each picture's part, and zeros behind it.

    Args:
        rows: what lies as the tower's tokens do.
        seen: where each picture is.
        length: of a window.
        order: i32[n]: of the pictures that are asked for; ``None``: all.
    """
    count = seen.size.shape[1]
    number = jnp.arange(seen.size.size) if order is None else order
    size, first = (x.reshape(-1)[number, None] for x in (seen.size, seen.first))
    inside = jnp.arange(length)
    row, last = number[:, None] // count, rows.shape[1] - 1
    taken = rows[row, jnp.minimum(first + inside, last)]
    return jnp.where((inside < size)[..., None], taken, 0)
