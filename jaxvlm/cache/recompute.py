"""Which pictures of a batch a step encodes, and what it reads instead.

All that touches pages is local to a data shard: a picture's pages lie on the device that its row
lies on (``jaxvlm.data.slots``), so no collective carries a feature. One number is agreed on by all
shards, how many pictures the busiest has to encode: it decides which chunks the tower runs on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxvlm.cache.state import PAGE, CacheState, page_keys
from jaxvlm.parallel.mesh import BATCH_AXES, batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.types import Batch

_ROWS, _CHUNKS, _ALL = PartitionSpec(BATCH_AXES), PartitionSpec(None, BATCH_AXES), PartitionSpec()


class Seen(NamedTuple):
    """What a step knows of a batch's pictures before it encodes one."""

    here: Any
    """bool[B, I]: there is a picture."""
    stale: Any
    """bool[B, I]: it has to be encoded."""
    lag: Any
    """i32[B, I]: updates of the tower since its tokens were made; 0 where there are none."""


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Pictures of one size, encoded in chunks of one shape.

    Args:
        encode: parameters and u8[n, H, W, 3] -> [n, P, D].
        mesh: of the run.
        chunk: pictures of a chunk on each data shard; 0: as many as its rows have places for,
            8 at most.
        bound: updates of the tower that tokens may be behind.
    """

    encode: Callable[[Any, jax.Array], jax.Array]
    mesh: Mesh
    chunk: int
    bound: int = 0

    def look(self, state: CacheState, batch: Batch) -> Seen:
        """Which pictures have to be encoded: all that have no pages, or others' or old ones."""
        here = batch.image_start >= 0

        def local(key: Any, made: Any, version: Any, pages: Any, wanted: Any) -> Any:
            at = jnp.maximum(pages - self._first(key), 0)
            keys = page_keys(wanted, pages.shape[-1])
            same = (pages >= 0) & jnp.all(key[at] == keys, axis=-1)
            lag = jnp.max(version - made[at], axis=-1)
            return jnp.all(same, axis=-1), lag

        run = self._local(local, (_ROWS, _ROWS, _ALL, _ROWS, _ROWS), (_ROWS, _ROWS))
        found, lag = run(
            state.key, state.row_version, state.version, batch.image_pages, batch.image_key
        )
        good = here & found & (lag <= self.bound)
        return Seen(here, here & ~good, jnp.where(good, lag, 0))

    def features(self, params: Any, state: CacheState, batch: Batch, seen: Seen) -> jax.Array:
        """The pictures' tokens: stale ones encoded, with gradient, the others read, without.

        Args:
            params: of the tower.
            state: of the cache.
            batch: with its pictures.
            seen: of :meth:`look`.

        Returns:
            [B, I, P, D]; zeros where there is no picture.
        """
        picked, rank, most = self._pick(batch.pixels, seen.stale)
        size, chunks = picked.shape[1] // self._shards, jnp.arange(len(picked))
        empty = jax.eval_shape(self.encode, params, picked[0])
        kind = jnp.finfo(empty.dtype)

        def some(pixels: jax.Array) -> jax.Array:
            made = self.encode(params, pixels)
            # What is kept is what is used: XLA may leave a cast out that this one cannot be.
            return jax.lax.reduce_precision(made, kind.nexp, kind.nmant)

        def none(pixels: jax.Array) -> jax.Array:
            return jnp.zeros(empty.shape, empty.dtype)

        @jax.checkpoint
        def one(carry: None, chunk: Any) -> tuple[None, jax.Array]:
            number, pixels = chunk
            made = jax.lax.cond(number * size < most, some, none, pixels)
            return None, jax.lax.with_sharding_constraint(made, batch_sharding(self.mesh))

        fresh = jax.lax.scan(one, None, (chunks, picked))[1]
        # The rest of the step is to be compiled as if it had been given them.
        return jax.lax.optimization_barrier(self._merge(fresh, rank, seen, state, batch))

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

        def local(
            pages: Any, key: Any, made: Any, version: Any, ok: Any, at: Any, keys: Any, stale: Any,
            features: Any,
        ) -> Any:  # fmt: skip
            count, room = at.shape[-1], pages.shape[0]
            at, stale = at.reshape(-1, count), stale.reshape(-1)
            write = stale & ok & (at[:, 0] >= 0)
            # A picture that is twice among them is written once: a set's places must differ.
            before = np.tri(len(at), k=-1, dtype=bool)
            again = (at[:, None, 0] == at[None, :, 0]) & write[None] & before
            write &= ~jnp.any(again, axis=1)
            beyond = room + jnp.arange(at.size).reshape(at.shape)
            where = jnp.where(write[:, None], at - self._first(key), beyond).reshape(-1)
            values = features.reshape(len(at), *features.shape[2:])
            values = jnp.pad(values, ((0, 0), (0, count * PAGE - values.shape[1]), (0, 0)))

            def put(old: jax.Array, new: jax.Array) -> jax.Array:
                return old.at[where].set(new, mode="drop", unique_indices=True)

            values = values.reshape(-1, PAGE, values.shape[-1]).astype(pages.dtype)
            keys = page_keys(keys, count).reshape(-1, 4)
            return put(pages, values), put(key, keys), put(made, version)

        specs = (_ROWS, _ROWS, _ROWS, _ALL, _ALL, _ROWS, _ROWS, _ROWS, _ROWS)
        pages, key, made = self._local(local, specs, (_ROWS, _ROWS, _ROWS))(
            state.pages, state.key, state.row_version, state.version, ok,
            batch.image_pages, batch.image_key, seen.stale, features,
        )  # fmt: skip
        return state._replace(pages=pages, key=key, row_version=made)

    def _pick(self, pixels: jax.Array, stale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Stale pictures first, in chunks u8[K, n, H, W, 3]; each one's place; most of a shard."""
        size = self.chunk or min(8, pixels.shape[1] * pixels.shape[0] // self._shards)

        def local(pixels: jax.Array, stale: jax.Array) -> Any:
            pixels, flat = pixels.reshape(-1, *pixels.shape[2:]), stale.reshape(-1)
            order = jnp.argsort(~flat, stable=True)
            rank = jnp.argsort(order).reshape(stale.shape)
            chunks = -(-len(flat) // size)
            order = jnp.pad(order, (0, chunks * size - len(flat)))
            picked = pixels[order].reshape(chunks, size, *pixels.shape[1:])
            return picked, rank, jax.lax.pmax(jnp.sum(flat), BATCH_AXES)

        return self._local(local, (_ROWS, _ROWS), (_CHUNKS, _ROWS, _ALL))(pixels, stale)

    def _merge(
        self, fresh: jax.Array, rank: jax.Array, seen: Seen, state: CacheState, batch: Batch
    ) -> jax.Array:
        def local(fresh: Any, rank: Any, here: Any, stale: Any, pages: Any, at: Any) -> Any:
            fresh = fresh.reshape(-1, *fresh.shape[2:])
            made = fresh.at[rank].get(mode="promise_in_bounds", unique_indices=True)
            old = pages[jnp.maximum(at - self._first(pages), 0)]
            old = old.reshape(*rank.shape, -1, pages.shape[-1])[:, :, : made.shape[2]]
            made = jnp.where(stale[..., None, None], made, jax.lax.stop_gradient(old))
            return jnp.where(here[..., None, None], made, 0)

        specs = (_CHUNKS, _ROWS, _ROWS, _ROWS, _ROWS, _ROWS)
        kept = (state.pages, batch.image_pages)
        return self._local(local, specs, _ROWS)(fresh, rank, seen.here, seen.stale, *kept)

    @property
    def _shards(self) -> int:
        return batch_shards(self.mesh)

    def _first(self, mine: jax.Array) -> jax.Array:
        """The number of the first of this shard's pages."""
        return jax.lax.axis_index(BATCH_AXES) * mine.shape[0]

    def _local(self, run: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=out)
