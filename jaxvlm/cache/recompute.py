"""Which pictures of a batch a step encodes, and what it reads instead.

All that touches pages is local to a data shard: a picture's pages lie on the device that its row
lies on (``jaxvlm.data.slots``), so no collective carries a feature. One number is agreed on by all
shards, how many pictures the busiest has to encode: it decides which chunks the tower runs on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxvlm.cache.policy import NEVER, Policy, draw, draw_step
from jaxvlm.cache.seen import Seen, cut_out, inside_of, pages_used, with_stored
from jaxvlm.cache.state import CacheState, page_keys
from jaxvlm.parallel.mesh import BATCH_AXES, batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.types import PAGE, Age, Batch

_SLOWEST = 1e-12  # of learning rates
_ROWS, _CHUNKS, _ALL = PartitionSpec(BATCH_AXES), PartitionSpec(None, BATCH_AXES), PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Pictures encoded one by one, each in the smallest window that it fits, in chunks of windows.

    Args:
        encode: parameters and a batch of one picture a row -> its features, [n, 1, P, D] of
            pictures of one size, [n, W, D] of packed patches, [n, 1, 1, D] where it is ``pooled``.
        mesh: of the run.
        windows: tokens that the tower makes of a picture, at most; ascending. One number, P, where
            pictures have one size.
        chunk: of the largest windows, in a chunk on each data shard, and of others so many as have
            the same tokens. One number for all batches of a run: bits depend on it.
        policy: when tokens are stale.
        rate: the tower's version -> the learning rate of its next update.
        pooled: whether the tower makes one vector of a picture, of which a row has one at most; its
            window is 1, however many patches it has.
    """

    encode: Callable[[Any, Batch], jax.Array]
    mesh: Mesh
    windows: tuple[int, ...]
    chunk: int
    policy: Policy
    rate: Callable[[jax.Array], jax.Array] = jnp.ones_like
    pooled: bool = False

    def look(self, state: CacheState | None, batch: Batch) -> Seen:
        """Which pictures have to be encoded: all that have no pages, or others' or old ones.

        Args:
            state: of the cache; ``None``: there are no pages, all is encoded that is not stored.
            batch: with its pictures.
        """
        policy = self.policy
        if not self._is_cut(batch):
            number = jnp.arange(batch.image_start.shape[1], dtype=jnp.int32)
            size = jnp.where(batch.image_start >= 0, self.windows[-1], 0).astype(jnp.int32)
            first = jnp.broadcast_to(number * self.windows[-1], size.shape)
        else:
            size = jnp.prod(batch.grid, axis=-1)
            first = jnp.cumsum(size, axis=-1) - size
        if state is None:
            none, real = jnp.zeros_like(size), jnp.ones(size.shape, jnp.float32)
            stale = (size > 0) & ~batch.is_stored
            return Seen(first, size, stale, none > 0, none, 0 * real, real)
        kept = with_stored(self._kept(state, batch, size), batch, state.version)
        known, lag, due, drift, pull = kept
        fixed = batch.is_stored if batch.stored_age is None else None
        good = (size > 0) & known & (lag <= policy.bound)
        if policy.tolerance:
            # What was never measured moves like the others; while none was, it is due at once.
            guess = jnp.where(state.typical > 0, state.typical, jnp.inf)
            guess *= jnp.maximum(self.rate(state.version), _SLOWEST)
            guess = policy.next_due(state.version - lag, jnp.broadcast_to(guess, lag.shape))
            good &= state.version < jnp.where(drift > 0, due, guess)
        if fixed is not None:
            good |= (size > 0) & fixed
        stale = (size > 0) & ~good
        weight = jnp.ones(size.shape, jnp.float32)
        if policy.share:
            drift_now = jnp.where(drift > 0, drift, state.typical)
            need = (pull * drift_now * lag).reshape(-1) if policy.by_need else None
            allowed = good if fixed is None else good & ~fixed
            if policy.at_once:
                turn = state.turn // policy.at_once
                drawn, chance = draw_step(allowed.reshape(-1), policy.share, turn, policy.seed)
            else:
                drawn, chance = draw(
                    allowed.reshape(-1), need, policy.share, state.turn, policy.seed
                )
            drawn, chance = drawn.reshape(size.shape), chance.reshape(size.shape)
            stale, weight = stale | drawn, jnp.where(drawn, 1 / chance, 1)
        seen = Seen(first, size, stale, known, lag, drift, weight)
        seen = self._refresh_ahead(seen) if policy.ahead < policy.bound else seen
        return seen if batch.in_pages is None else seen._replace(lost=seen.stale & batch.in_pages)

    def _is_cut(self, batch: Batch) -> bool:
        """Whether pictures have as many tokens as patches, which lie packed in rows."""
        return batch.grid is not None and not self.pooled

    def _kept(self, state: CacheState, batch: Batch, size: jax.Array) -> tuple[jax.Array, ...]:
        """[B, I] each: known, lag; due, drift and pull, zeros where it is not known."""

        def local(key: Any, rows: Any, version: Any, pages: Any, wanted: Any, size: Any) -> Any:
            at, used = self._mine(pages, key), pages_used(pages, size)
            same = (pages >= 0) & jnp.all(key[at] == page_keys(wanted, pages.shape[-1]), axis=-1)
            known = jnp.all(same | ~used, axis=-1) & (size > 0)
            made, *others = (x[at] for x in rows)
            lag = jnp.max(jnp.where(used, version - made, 0), axis=-1)
            return [known] + [jnp.where(known, x, 0) for x in (lag, *(x[..., 0] for x in others))]

        rows = (state.row_version, state.due, state.drift, state.pull)
        specs = (_ROWS, _ROWS, _ALL, _ROWS, _ROWS, _ROWS)
        given = (state.key, rows, state.version, batch.image_pages, batch.image_key, size)
        return tuple(self._local(local, specs, [_ROWS] * 5)(*given))

    def _refresh_ahead(self, seen: Seen) -> Seen:
        """The oldest pictures fill what is left of the last chunk that runs anyway."""

        def local(seen: Seen) -> jax.Array:
            stale = seen.stale.reshape(-1)
            age = jnp.where(seen.found, seen.lag, -1).reshape(-1)
            for low, high in itertools.pairwise((0, *self.windows)):
                fits = ((low < seen.size) & (seen.size <= high)).reshape(-1)
                own, size = jnp.sum(stale & fits), self.chunk * (self.windows[-1] // high)
                room = -(-jax.lax.pmax(own, BATCH_AXES) // size) * size - own
                rank = jnp.argsort(jnp.argsort(jnp.where(fits, -age, NEVER), stable=True))
                stale |= fits & (age > self.policy.ahead) & (rank < room)
            return stale.reshape(seen.stale.shape)

        return seen._replace(stale=self._local(local, (_ROWS,), _ROWS)(seen))

    def features(
        self,
        params: Any,
        state: CacheState | None,
        batch: Batch,
        seen: Seen,
        learns: bool = False,
    ) -> jax.Array:
        """The pictures' tokens: stale ones encoded, with gradient, the others read, without.

        Args:
            params: of the tower.
            state: as :meth:`look` took it.
            batch: with its pictures.
            seen: of :meth:`look`.
            learns: whether gradients of ``params`` are asked for.

        Returns:
            ``Batch.features``; zeros where there is no picture.
        """
        cuts = []
        place, done = jnp.zeros_like(seen.size), 0
        for low, high in itertools.pairwise((0, *self.windows)):
            asked = seen.stale & (low < seen.size) & (seen.size <= high)
            order, rank, most = self._order(batch, seen, asked, low, high)
            cuts.append((order, most, high))
            place = jnp.where(asked, done + rank * high, place)
            done += order.size // batch_shards(self.mesh) * high

        def encoded() -> jax.Array:
            fresh = [self._encode(params, batch, seen, *cut) for cut in cuts]
            return self._merge(fresh, place, seen, state, batch)

        kept = batch.stored if state is None else state.pages
        if learns or kept is None:  # the gradient goes back through the chunks alone
            made = encoded()
        else:  # where none is encoded, there are no zeros in the place of chunks either
            none = jnp.zeros((0, batch_shards(self.mesh), 1, kept.shape[-1]), kept.dtype)
            made = jax.lax.cond(
                jnp.any(jnp.stack([most for _, most, _ in cuts]) > 0),
                encoded,
                lambda: self._merge([none], place, seen, state, batch),
            )
        # The rest of the step is to be compiled as if it had been given them. They are shaped into
        # pictures behind this: XLA would copy all of them to make rows of these again.
        made = jax.lax.optimization_barrier(made)
        return made if self._is_cut(batch) else made.reshape(*seen.size.shape, self.windows[-1], -1)

    def weighed(self, seen: Seen, gradient: jax.Array) -> jax.Array:
        """The gradient at the tokens, divided by the probability with which it got here."""
        if not self.policy.share:
            return gradient

        def local(seen: Seen, rows: jax.Array) -> jax.Array:
            weight = jnp.einsum("bqi,bi->bq", inside_of(seen, rows.shape[1]), seen.weight)
            return rows * weight[..., None].astype(rows.dtype)

        rows = gradient.reshape(len(gradient), -1, gradient.shape[-1])
        return self._local(local, (_ROWS, _ROWS), _ROWS)(seen, rows).reshape(gradient.shape)

    def write(
        self,
        state: CacheState,
        batch: Batch,
        seen: Seen,
        features: jax.Array,
        gradient: jax.Array | None,
        ok: jax.Array,
    ) -> tuple[CacheState, jax.Array, Age]:
        """The state with what was encoded in it, as of the tower's present version.

        Args:
            state: that was read.
            batch: as :meth:`features` took it.
            seen: likewise.
            features: what it gave.
            gradient: of the loss, at them; ``None``: the tower does not learn.
            ok: whether the step is good; where not, nothing is written.

        Returns:
            The state; f32[], the largest relative change of tokens that were kept and made anew;
            the age of what was made, its ``pull`` of what was read too.
        """
        rows, pages = features.reshape(len(features), -1, features.shape[-1]), batch.image_pages
        kept, change = self._rewrite(state, seen, pages, rows, ok)
        if batch.stored_age is not None:
            before = batch.stored.reshape(rows.shape).astype(jnp.float32)
            apart = self._norms(seen, rows - before) / jnp.maximum(self._norms(seen, before), 1e-15)
            change = jnp.where(batch.is_stored, apart, change)
        state = state._replace(pages=kept)
        again = seen.stale & seen.known
        due, drift = jnp.zeros_like(seen.size), seen.drift
        if self.policy.measures:
            state, due, drift = self._measure(state, seen, change, again & ok)
        pull = jnp.zeros(seen.size.shape, jnp.float32)
        if gradient is not None and self.policy.by_need:
            pull = self._norms(seen, gradient.reshape(rows.shape))
        state = self._note(state, batch, seen, (due, drift, pull), ok)
        age = Age(jnp.broadcast_to(state.version, seen.size.shape), due, drift, pull)
        return state._replace(turn=state.turn + 1), jnp.max(jnp.where(again, change, 0)), age

    def _measure(
        self, state: CacheState, seen: Seen, change: jax.Array, again: jax.Array
    ) -> tuple[CacheState, jax.Array, jax.Array]:
        """The state with a new ``typical``; [B, I] due and drift of what was made anew."""
        moved = again & (seen.lag > 0) & jnp.isfinite(change)
        rate = jnp.maximum(self.rate(state.version), _SLOWEST)
        # Above 0, which says that nothing was measured.
        measured = jnp.maximum(change / jnp.maximum(seen.lag, 1) / rate, 1e-20)
        drift = jnp.where((seen.drift > 0) & moved, (seen.drift + measured) / 2, measured)
        drift = jnp.where(moved, drift, seen.drift)
        mean = jnp.sum(jnp.where(moved, drift, 0)) / jnp.maximum(jnp.sum(moved), 1)
        settled = jnp.where(state.typical > 0, 0.9 * state.typical + 0.1 * mean, mean)
        due = self.policy.next_due(state.version, drift * rate)
        typical = jnp.where(jnp.any(moved), settled, state.typical)
        return state._replace(typical=typical), due, drift

    def _rewrite(
        self, state: CacheState, seen: Seen, pages: jax.Array, rows: jax.Array, ok: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The pages with what was encoded in theirs; f32[B, I], how far it is from what was there.

        A shard that encoded nothing touches no page: to copy all tokens would cost what looking
        for them may.
        """

        def local(old: Any, at: Any, seen: Seen, rows: Any, ok: Any) -> Any:
            def made(carry: Any) -> Any:
                asked, old, _ = carry
                tokens = cut_out(rows, seen, at.shape[2] * PAGE).reshape(*at.shape, *old.shape[1:])
                here = pages_used(at, seen.size)[..., None, None]
                before = jnp.where(here, old[self._mine(at, old)], 0).astype(jnp.float32)
                apart = jnp.sum((tokens - before) ** 2, axis=(2, 3, 4))
                norm = jnp.maximum(jnp.sum(before**2, (2, 3, 4)), 1e-30)
                where = self._places(at, seen.size, seen.encoded & ok, old)
                new = tokens.reshape(-1, *old.shape[1:]).astype(old.dtype)
                return jnp.zeros_like(asked), _put(old, where, new), jnp.sqrt(apart / norm)

            # One turn or none: a loop's pages are written in place, a conditional's are copied.
            none = jax.lax.pcast(jnp.zeros(at.shape[:2], jnp.float32), BATCH_AXES, to="varying")
            start = jnp.any(seen.stale), old, none
            _, pages, change = jax.lax.while_loop(lambda carry: carry[0], made, start)
            return pages, change

        run = self._local(local, (*(_ROWS,) * 4, _ALL), (_ROWS, _ROWS))
        return run(state.pages, pages, seen, rows, ok)

    def _norms(self, seen: Seen, rows: jax.Array) -> jax.Array:
        """f32[B, I]: of each picture's part of rows [B, Q, D]."""

        def local(seen: Seen, rows: Any) -> Any:
            squares = jnp.sum(rows.astype(jnp.float32) ** 2, axis=-1)
            upto = jnp.pad(jnp.cumsum(squares, axis=-1), ((0, 0), (1, 0)))
            ends = [jnp.take_along_axis(upto, x, 1) for x in (seen.first, seen.first + seen.size)]
            return jnp.sqrt(jnp.maximum(ends[1] - ends[0], 0))

        return self._local(local, (_ROWS, _ROWS), _ROWS)(seen, rows)

    def _note(
        self, state: CacheState, batch: Batch, seen: Seen, noted: Any, ok: jax.Array
    ) -> CacheState:
        """Whose tokens lie in the pages written, how old, and what is ``noted`` of each: due,
        drift, pull.
        """

        def local(old: Any, version: Any, ok: Any, at: Any, keys: Any, seen: Seen, new: Any) -> Any:
            (key, made_at, *others), count = old, at.shape[-1]
            made = self._places(at, seen.size, seen.encoded & ok, key)
            shown = made
            if self.policy.by_need:
                shown = self._places(at, seen.size, (seen.stale | seen.known) & ok, key)
            key = _put(key, made, page_keys(keys, count).reshape(-1, 4))
            each = [jnp.repeat(x.reshape(-1), count) for x in new]
            places = (made, made, shown)
            return [
                key,
                _put(made_at, made, version),
                *(_put(x, where, y) for x, where, y in zip(others, places, each)),
            ]

        old = [state.key, state.row_version, state.due, state.drift, state.pull]
        specs = ([_ROWS] * 5, _ALL, _ALL, _ROWS, _ROWS, _ROWS, _ROWS)
        key, version, due, drift, pull = self._local(local, specs, [_ROWS] * 5)(
            old, state.version, ok, batch.image_pages, batch.image_key, seen, noted
        )
        return state._replace(key=key, row_version=version, due=due, drift=drift, pull=pull)

    def _places(
        self, at: jax.Array, size: jax.Array, chosen: jax.Array, of: jax.Array
    ) -> jax.Array:
        """i32[B * I * n]: where the pages of ``chosen`` pictures [B, I] lie in this shard's ``of``,
        and places beyond it for others.

        Of the first alone of those that have the same pages: a set's places must differ.
        """
        count = at.shape[-1]
        used, at = pages_used(at, size).reshape(-1, count), at.reshape(-1, count)
        beyond = len(of) + jnp.arange(at.size).reshape(at.shape)
        chosen = chosen.reshape(-1) & (at[:, 0] >= 0)
        before = np.tri(len(at), k=-1, dtype=bool)
        same = (at[:, None, 0] == at[None, :, 0]) & chosen[None] & before
        chosen &= ~jnp.any(same, axis=1)
        return jnp.where(chosen[:, None] & used, self._mine(at, of), beyond).reshape(-1)

    def _order(
        self, batch: Batch, seen: Seen, asked: jax.Array, low: int, high: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A shard's pictures in chunks i32[K, n], those asked for first; the place of each in
        them, i32[B, I]; and how many the busiest shard has.
        """
        shards, places = batch_shards(self.mesh), seen.size.size
        cut = self._is_cut(batch)
        room = batch.patches[..., 0].size if cut else places * self.windows[-1]
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
            if self.pooled:
                return [x[order] for x in given]
            return [cut_out(given[0], seen, window, order), given[1].reshape(-1, 1, 3)[order]]

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
        state: CacheState | None,
        batch: Batch,
    ) -> jax.Array:
        """[B, Q, D]: the tower's tokens of each row; a stale picture's from its place in fresh."""
        width = fresh[0].shape[-1]
        if not self._is_cut(batch):
            length = seen.size.shape[1] * self.windows[-1]
        else:
            length = batch.patches.shape[1]

        def kept(which: Any, token: Any, pages: Any = None, at: Any = None) -> jax.Array:
            if pages is None:
                return jnp.zeros((*which.shape, width), fresh[0].dtype)
            page = jnp.take_along_axis(at, which[..., None], axis=1)
            page = jnp.take_along_axis(page, (token // PAGE)[..., None], axis=2)[..., 0]
            # Of each token once: XLA would fuse it with the copy, and work it out for each number.
            index = jax.lax.optimization_barrier(self._mine(page, pages) * PAGE + token % PAGE)
            return jax.lax.stop_gradient(pages).reshape(-1, width)[index]

        def local(fresh: Any, start: Any, seen: Seen, pages: Any, given: Any) -> Any:
            inside = inside_of(seen, length)
            which, here = jnp.argmax(inside, axis=-1), jnp.any(inside, axis=-1)

            def of_picture(x: jax.Array) -> jax.Array:
                return jnp.take_along_axis(x, which, axis=1)

            token = jnp.where(here, jnp.arange(length) - of_picture(seen.first), 0)
            stale = here & of_picture(seen.stale)

            def read(fresh: Any) -> Any:
                old = kept(which, token, *pages)
                if given:
                    stored, is_stored = given
                    stored = stored.reshape(old.shape).astype(old.dtype)
                    old = jnp.where(of_picture(is_stored)[..., None], stored, old)
                return jnp.where((here & ~stale)[..., None], old, 0)

            def some(fresh: Any) -> Any:
                rows = jnp.concatenate([x.reshape(-1, width) for x in fresh])
                beyond = len(rows) + jnp.arange(which.size).reshape(which.shape)
                index = jnp.where(stale, of_picture(start) + token, beyond)
                made = rows.at[index].get(mode="fill", fill_value=0, unique_indices=True)
                if seen.lost is not None:
                    made = jnp.where(of_picture(seen.lost)[..., None], jnp.nan, made)
                return jnp.where(stale[..., None], made, read(fresh))

            if not fresh[0].size:
                return read(fresh)
            return jax.lax.cond(jnp.any(stale), some, read, fresh)  # one copy where all are read

        pages = () if state is None else (state.pages, batch.image_pages)
        given = () if batch.stored is None else (batch.stored, batch.is_stored)
        run = self._local(local, (_CHUNKS, _ROWS, _ROWS, _ROWS, _ROWS), _ROWS)
        return run(fresh, place, seen, pages, given)

    def _mine(self, pages: jax.Array, of: jax.Array) -> jax.Array:
        """Numbers of pages as this shard, which has those ``of``, counts them; -1 becomes 0."""
        return jnp.maximum(pages - jax.lax.axis_index(BATCH_AXES) * of.shape[0], 0)

    def _local(self, run: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=out)


def _put(old: jax.Array, where: jax.Array, new: jax.Array) -> jax.Array:
    """``old`` with ``new`` at its places, which differ; those beyond it are left out."""
    return old.at[where].set(new, mode="drop", unique_indices=True)
