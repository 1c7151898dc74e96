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
_MOST = 8


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
            the same tokens; 0: as many as its rows have room for, 8 at most.
        bound: updates of the tower that tokens may be behind.
    """

    encode: Callable[[Any, Batch], jax.Array]
    mesh: Mesh
    windows: tuple[int, ...]
    chunk: int = 0
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
            picked, rank, most = self._pick(batch, seen, asked, low, high)
            fresh.append(self._encode(params, picked, most, high))
            place = jnp.where(asked, done + rank * high, place)
            done += picked.tokens.size // batch_shards(self.mesh) * high
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

            tokens = _windows(rows, seen, count * PAGE).reshape(-1, *old.pages.shape[1:])
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

    def _pick(
        self, batch: Batch, seen: Seen, asked: jax.Array, low: int, high: int
    ) -> tuple[Batch, jax.Array, jax.Array]:
        """Chunks [K, n, ...] with those asked for first, the place of each, and most of a shard."""
        shards, places = batch_shards(self.mesh), seen.size.size
        room = places * self.windows[-1] if batch.grid is None else batch.patches[..., 0].size
        room //= shards
        size = self.chunk or max(1, min(_MOST, room // self.windows[-1]))
        size *= self.windows[-1] // high
        chunks = -(-min(places // shards, room // (low + 1)) // size)

        def local(given: tuple[Any, ...], seen: Seen, asked: jax.Array) -> Any:
            flat = asked.reshape(-1)
            order = jnp.argsort(~flat, stable=True)
            rank = jnp.argsort(order).reshape(asked.shape)
            order = jnp.pad(order, (0, max(0, chunks * size - len(flat))))[: chunks * size]
            if len(given) == 1:
                picked = [given[0].reshape(-1, 1, *given[0].shape[2:])[order]]
            else:
                picked = [_windows(given[0], seen, high, order)]
                picked += [given[1].reshape(-1, 1, 3)[order]]
            picked = [x.reshape(chunks, size, *x.shape[1:]) for x in picked]
            return picked, rank, jax.lax.pmax(jnp.sum(flat), BATCH_AXES)

        given = (batch.pixels,) if batch.grid is None else (batch.patches, batch.grid)
        run = self._local(local, (_ROWS, _ROWS, _ROWS), ([_CHUNKS] * len(given), _ROWS, _ALL))
        picked, rank, most = run(given, seen, asked)
        # The tower reads nothing else; a number a picture says how many there are.
        alone = Batch(jnp.zeros(picked[0].shape[:2], jnp.int32), None, None, None)
        if batch.grid is None:
            return alone._replace(pixels=picked[0]), rank, most
        return alone._replace(patches=picked[0], grid=picked[1]), rank, most

    def _encode(self, params: Any, picked: Batch, most: jax.Array, window: int) -> jax.Array:
        """[K, n, window, D]: of the chunks in which a shard has a picture, zeros of the others."""
        size = picked.tokens.shape[1] // batch_shards(self.mesh)
        empty = jax.eval_shape(self.encode, params, jax.tree.map(lambda x: x[0], picked))
        kind = jnp.finfo(empty.dtype)

        def some(pictures: Batch) -> jax.Array:
            made = self.encode(params, pictures)
            # What is kept is what is used: XLA may leave a cast out that this one cannot be.
            return jax.lax.reduce_precision(made, kind.nexp, kind.nmant)

        def none(pictures: Batch) -> jax.Array:
            return jnp.zeros(empty.shape, empty.dtype)

        @jax.checkpoint
        def one(carry: None, chunk: Any) -> tuple[None, jax.Array]:
            number, pictures = chunk
            made = jax.lax.cond(number * size < most, some, none, pictures)
            return None, jax.lax.with_sharding_constraint(made, batch_sharding(self.mesh))

        made = jax.lax.scan(one, None, (jnp.arange(len(picked.tokens)), picked))[1]
        return made.reshape(*picked.tokens.shape, window, -1)

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
            fresh = jnp.concatenate([x.reshape(-1, width) for x in fresh])
            kept, place = pages.reshape(-1, width), jnp.arange(length)
            begin, end = seen.first[:, None], (seen.first + seen.size)[:, None]
            inside = (begin <= place[:, None]) & (place[:, None] < end)  # [B, Q, I]
            which = jnp.argmax(inside, axis=-1)

            def of_picture(x: jax.Array) -> jax.Array:
                return jnp.take_along_axis(x, which, axis=1)

            token = jnp.where(jnp.any(inside, axis=-1), place - of_picture(seen.first), 0)
            stale = jnp.any(inside, axis=-1) & of_picture(seen.stale)
            beyond = len(fresh) + jnp.arange(which.size).reshape(which.shape)
            index = jnp.where(stale, of_picture(start) + token, beyond)
            made = fresh.at[index].get(mode="fill", fill_value=0, unique_indices=True)
            page = jnp.take_along_axis(at, which[..., None], axis=1)
            page = jnp.take_along_axis(page, (token // PAGE)[..., None], axis=2)[..., 0]
            old = kept[self._mine(page, pages) * PAGE + token % PAGE]
            read = jnp.any(inside, axis=-1) & ~of_picture(seen.stale)
            return jnp.where(read[..., None], jax.lax.stop_gradient(old), made)

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
