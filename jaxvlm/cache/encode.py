"""Encode the images of a batch that miss the cache or are stale, and read the tokens of the others.

Everything that touches pages is local to a data shard: an image's pages are on the device that
holds its sequence (``jaxvlm.data.page_allocation``), so no collective carries a feature. All shards
agree on one number, how many images the busiest shard has to encode: it decides which encode
batches the vision encoder runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxvlm.cache.lookup import (
    ALL,
    BATCHES,
    ROWS,
    LookupResult,
    image_membership,
    local_index,
    on_shards,
    pages_used,
    slice_images,
    with_stored_tokens,
)
from jaxvlm.cache.page_writes import SLOWEST
from jaxvlm.cache.policy import NEVER, Policy
from jaxvlm.cache.state import CacheState, page_keys
from jaxvlm.parallel.mesh import BATCH_AXES, batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.types import PAGE, Batch


@dataclasses.dataclass(frozen=True)
class EncodeStep:
    """Encodes images one by one, each padded to the smallest window that it fits in, in encode
    batches of equal windows.

    Args:
        encode: parameters and a batch of one image per sequence -> its features: [n, 1, P, D] for
            images of one size, [n, W, D] for packed patches, [n, 1, 1, D] where ``pooled``.
        mesh: of the run.
        windows: numbers of tokens that an image is padded to, ascending; the last is that of the
            largest image. One number, P, where images have one size.
        encode_batch: images of the largest window in an encode batch on each data shard; of smaller
            windows as many as have the same number of tokens. The same for all batches of a run,
            since the bits of the tokens depend on it.
        policy: when tokens are stale.
        rate: the vision encoder's version -> the learning rate of its next update.
        pooled: whether the vision encoder computes one embedding of an image, and a sequence has
            one image at most; the window is 1, however many patches the image has.
    """

    encode: Callable[[Any, Batch], jax.Array]
    mesh: Mesh
    windows: tuple[int, ...]
    encode_batch: int
    policy: Policy
    rate: Callable[[jax.Array], jax.Array] = jnp.ones_like
    pooled: bool = False

    def lookup(self, state: CacheState | None, batch: Batch) -> LookupResult:
        """Look the batch's images up in the cache: hits, misses and stale ones.

        Args:
            state: of the cache; ``None``: there are no pages, and every image is encoded whose
                tokens did not come with the batch.
            batch: with its images.
        """
        policy = self.policy
        if not self._is_packed(batch):
            number = jnp.arange(batch.image_start.shape[1], dtype=jnp.int32)
            size = jnp.where(batch.image_start >= 0, self.windows[-1], 0).astype(jnp.int32)
            first = jnp.broadcast_to(number * self.windows[-1], size.shape)
        else:
            size = jnp.prod(batch.grid, axis=-1)
            first = jnp.cumsum(size, axis=-1) - size
        if state is None:
            none, real = jnp.zeros_like(size), jnp.ones(size.shape, jnp.float32)
            stale = (size > 0) & ~batch.is_stored
            return LookupResult(first, size, stale, none > 0, none, 0 * real, real)
        entries = with_stored_tokens(self._lookup_pages(state, batch, size), batch, state.version)
        cached, lag, refresh_at, drift, grad_norm = entries
        fixed = batch.is_stored if batch.stored_age is None else None
        good = (size > 0) & cached & (lag <= policy.max_staleness)
        if policy.drift_threshold:
            # Images without a measured drift are assumed to drift like the mean; while none was
            # measured, they are stale at once.
            default = jnp.where(state.mean_drift > 0, state.mean_drift, jnp.inf)
            default *= jnp.maximum(self.rate(state.version), SLOWEST)
            default = policy.next_refresh(state.version - lag, jnp.broadcast_to(default, lag.shape))
            good &= state.version < jnp.where(drift > 0, refresh_at, default)
        if fixed is not None:
            good |= (size > 0) & fixed
        stale = (size > 0) & ~good
        weight = jnp.ones(size.shape, jnp.float32)
        if policy.refresh_fraction:
            drift_now = jnp.where(drift > 0, drift, state.mean_drift)
            need = (grad_norm * drift_now * lag).reshape(-1) if policy.by_importance else None
            allowed = good if fixed is None else good & ~fixed
            drawn, chance = policy.draw(allowed.reshape(-1), need, state.step)
            drawn, chance = drawn.reshape(size.shape), chance.reshape(size.shape)
            stale, weight = stale | drawn, jnp.where(drawn, 1 / chance, 1)
        seen = LookupResult(first, size, stale, cached, lag, drift, weight)
        if policy.prefetch_staleness < policy.max_staleness:
            seen = self._refresh_early(seen)
        return seen if batch.in_pages is None else seen._replace(lost=seen.stale & batch.in_pages)

    def _is_packed(self, batch: Batch) -> bool:
        """Whether an image has one token per patch, packed in its sequence."""
        return batch.grid is not None and not self.pooled

    def _lookup_pages(
        self, state: CacheState, batch: Batch, size: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Look images up in this shard's pages.

        Returns:
            [B, I] each: whether it is cached, its staleness, refresh version, drift and gradient
            norm; zeros where it is not cached.
        """

        def local(key: Any, rows: Any, version: Any, pages: Any, wanted: Any, size: Any) -> Any:
            at, used = local_index(pages, key), pages_used(pages, size)
            same = (pages >= 0) & jnp.all(key[at] == page_keys(wanted, pages.shape[-1]), axis=-1)
            cached = jnp.all(same | ~used, axis=-1) & (size > 0)
            version_at, *others = (x[at] for x in rows)
            lag = jnp.max(jnp.where(used, version - version_at, 0), axis=-1)
            return [cached] + [jnp.where(cached, x, 0) for x in (lag, *(x[..., 0] for x in others))]

        rows = (state.page_version, state.refresh_at, state.drift, state.grad_norm)
        specs = (ROWS, ROWS, ALL, ROWS, ROWS, ROWS)
        given = (state.key, rows, state.version, batch.image_pages, batch.image_key, size)
        return tuple(on_shards(self.mesh, local, specs, [ROWS] * 5)(*given))

    def _refresh_early(self, seen: LookupResult) -> LookupResult:
        """Mark the oldest hits as stale, as far as the last encode batch that runs has room."""

        def local(seen: LookupResult) -> jax.Array:
            stale = seen.stale.reshape(-1)
            age = jnp.where(seen.hit, seen.staleness, -1).reshape(-1)
            for low, high in itertools.pairwise((0, *self.windows)):
                fits = ((low < seen.size) & (seen.size <= high)).reshape(-1)
                own, size = jnp.sum(stale & fits), self.encode_batch * (self.windows[-1] // high)
                room = -(-jax.lax.pmax(own, BATCH_AXES) // size) * size - own
                rank = jnp.argsort(jnp.argsort(jnp.where(fits, -age, NEVER), stable=True))
                stale |= fits & (age > self.policy.prefetch_staleness) & (rank < room)
            return stale.reshape(seen.stale.shape)

        return seen._replace(stale=on_shards(self.mesh, local, (ROWS,), ROWS)(seen))

    def features(
        self,
        params: Any,
        state: CacheState | None,
        batch: Batch,
        seen: LookupResult,
        learns: bool = False,
    ) -> jax.Array:
        """Return the images' tokens: stale ones encoded, with a gradient, hits read, without one.

        Args:
            params: of the vision encoder.
            state: as given to :meth:`lookup`.
            batch: with its images.
            seen: result of :meth:`lookup`.
            learns: whether gradients of ``params`` are needed.

        Returns:
            ``Batch.features``; zeros where there is no image.
        """
        batches = []
        place, done = jnp.zeros_like(seen.size), 0
        for low, high in itertools.pairwise((0, *self.windows)):
            to_encode = seen.stale & (low < seen.size) & (seen.size <= high)
            order, rank, most = self._encode_batches(batch, seen, to_encode, low, high)
            batches.append((order, most, high))
            place = jnp.where(to_encode, done + rank * high, place)
            done += order.size // batch_shards(self.mesh) * high

        def encoded() -> jax.Array:
            fresh = [self._encode(params, batch, seen, *item) for item in batches]
            return self._merge(fresh, place, seen, state, batch)

        stored = batch.stored if state is None else state.pages
        if learns or stored is None:  # the gradient flows through the encode batches alone
            tokens = encoded()
        else:  # where nothing is encoded, no arrays of zeros stand in for encode batches either
            none = jnp.zeros((0, batch_shards(self.mesh), 1, stored.shape[-1]), stored.dtype)
            tokens = jax.lax.cond(
                jnp.any(jnp.stack([most for _, most, _ in batches]) > 0),
                encoded,
                lambda: self._merge([none], place, seen, state, batch),
            )
        # The rest of the step is to be compiled as if it were given the tokens as an input. The
        # reshape into images comes after the barrier: before it, XLA would copy all tokens to
        # reshape them back into sequences.
        tokens = jax.lax.optimization_barrier(tokens)
        if self._is_packed(batch):
            return tokens
        return tokens.reshape(*seen.size.shape, self.windows[-1], -1)

    def reweighted(self, seen: LookupResult, gradient: jax.Array) -> jax.Array:
        """Divide the gradient at each drawn image's tokens by the probability of its draw."""
        if not self.policy.refresh_fraction:
            return gradient

        def local(seen: LookupResult, rows: jax.Array) -> jax.Array:
            weight = jnp.einsum("bqi,bi->bq", image_membership(seen, rows.shape[1]), seen.weight)
            return rows * weight[..., None].astype(rows.dtype)

        rows = gradient.reshape(len(gradient), -1, gradient.shape[-1])
        return on_shards(self.mesh, local, (ROWS, ROWS), ROWS)(seen, rows).reshape(gradient.shape)

    def _encode_batches(
        self, batch: Batch, seen: LookupResult, to_encode: jax.Array, low: int, high: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sort a shard's images into encode batches, those to be encoded first.

        Args:
            batch: with its images.
            seen: its lookup result.
            to_encode: bool[B, I]: images of this window to be encoded.
            low: the next smaller window's tokens, or 0.
            high: this window's tokens.

        Returns:
            i32[K, n], image numbers by encode batch; i32[B, I], each image's position in them;
            i32[], how many images the busiest shard has to encode.
        """
        shards, places = batch_shards(self.mesh), seen.size.size
        cut = self._is_packed(batch)
        room = batch.patches[..., 0].size if cut else places * self.windows[-1]
        room //= shards
        size = self.encode_batch * (self.windows[-1] // high)
        batches = -(-min(places // shards, room // (low + 1)) // size)

        def local(to_encode: jax.Array) -> Any:
            flat = to_encode.reshape(-1)
            order = jnp.argsort(~flat, stable=True)
            rank = jnp.argsort(order).reshape(to_encode.shape)
            order = jnp.pad(order, (0, max(0, batches * size - len(flat))))[: batches * size]
            return order.reshape(batches, size), rank, jax.lax.pmax(jnp.sum(flat), BATCH_AXES)

        return on_shards(self.mesh, local, (ROWS,), (BATCHES, ROWS, ALL))(to_encode)

    def _encode(
        self,
        params: Any,
        batch: Batch,
        seen: LookupResult,
        order: jax.Array,
        most: jax.Array,
        window: int,
    ) -> jax.Array:
        """Run the vision encoder on the encode batches in which some shard has a stale image.

        Returns:
            [K, n, window, D]: tokens by encode batch; zeros for encode batches that did not run.
        """
        size = order.shape[1] // batch_shards(self.mesh)
        given = (batch.pixels,) if batch.grid is None else (batch.patches, batch.grid)

        def take(order: jax.Array, seen: LookupResult, given: Any) -> Any:
            if len(given) == 1:
                return [given[0].reshape(-1, 1, *given[0].shape[2:])[order]]
            if self.pooled:
                return [x[order] for x in given]
            return [slice_images(given[0], seen, window, order), given[1].reshape(-1, 1, 3)[order]]

        def some(order: jax.Array) -> jax.Array:
            run = on_shards(self.mesh, take, (ROWS, ROWS, ROWS), [ROWS] * len(given))
            names = ("pixels",) if batch.grid is None else ("patches", "grid")
            taken = dict(zip(names, run(order, seen, given)))
            tokens = self.encode(params, Batch(None, None, None, None)._replace(**taken))
            # Round explicitly, so that the tokens used now are bitwise those that are cached: XLA
            # may elide a cast, but not this operation.
            info = jnp.finfo(tokens.dtype)
            return jax.lax.reduce_precision(tokens, info.nexp, info.nmant)

        empty = jax.eval_shape(some, order[0])

        def none(order: jax.Array) -> jax.Array:
            return jnp.zeros(empty.shape, empty.dtype)

        @jax.checkpoint
        def one(carry: None, item: Any) -> tuple[None, jax.Array]:
            number, images = item
            tokens = jax.lax.cond(number * size < most, some, none, images)
            return None, jax.lax.with_sharding_constraint(tokens, batch_sharding(self.mesh))

        tokens = jax.lax.scan(one, None, (jnp.arange(len(order)), order))[1]
        return tokens.reshape(*order.shape, window, -1)

    def _merge(
        self,
        fresh: list[jax.Array],
        place: jax.Array,
        seen: LookupResult,
        state: CacheState | None,
        batch: Batch,
    ) -> jax.Array:
        """Assemble each sequence's tokens from encoded and cached ones.

        Args:
            fresh: encoded tokens by window, [K, n, window, D] each.
            place: i32[B, I]: where a stale image's tokens start in ``fresh``, flattened.
            seen: lookup result of the batch.
            state: of the cache; ``None``: there are no pages.
            batch: with its images' pages, and their tokens where they came with the batch.

        Returns:
            [B, Q, D].
        """
        width, packed = fresh[0].shape[-1], self._is_packed(batch)
        length = batch.patches.shape[1] if packed else seen.size.shape[1] * self.windows[-1]

        def read_pages(image: Any, token: Any, pages: Any = None, at: Any = None) -> jax.Array:
            if pages is None:
                return jnp.zeros((*image.shape, width), fresh[0].dtype)
            page = jnp.take_along_axis(at, image[..., None], axis=1)
            page = jnp.take_along_axis(page, (token // PAGE)[..., None], axis=2)[..., 0]
            # Compute the index once per token: without the barrier, XLA would fuse it into the
            # gather and compute it again for each channel.
            index = jax.lax.optimization_barrier(local_index(page, pages) * PAGE + token % PAGE)
            return jax.lax.stop_gradient(pages).reshape(-1, width)[index]

        def local(fresh: Any, start: Any, seen: LookupResult, pages: Any, given: Any) -> Any:
            inside = image_membership(seen, length)
            image, is_token = jnp.argmax(inside, axis=-1), jnp.any(inside, axis=-1)

            def of_image(x: jax.Array) -> jax.Array:
                return jnp.take_along_axis(x, image, axis=1)

            token = jnp.where(is_token, jnp.arange(length) - of_image(seen.first), 0)
            stale = is_token & of_image(seen.stale)

            def read(fresh: Any) -> Any:
                old = read_pages(image, token, *pages)
                if given:
                    stored, is_stored = given
                    stored = stored.reshape(old.shape).astype(old.dtype)
                    old = jnp.where(of_image(is_stored)[..., None], stored, old)
                return jnp.where((is_token & ~stale)[..., None], old, 0)

            def some(fresh: Any) -> Any:
                rows = jnp.concatenate([x.reshape(-1, width) for x in fresh])
                beyond = len(rows) + jnp.arange(image.size).reshape(image.shape)
                index = jnp.where(stale, of_image(start) + token, beyond)
                encoded = rows.at[index].get(mode="fill", fill_value=0, unique_indices=True)
                if seen.lost is not None:
                    encoded = jnp.where(of_image(seen.lost)[..., None], jnp.nan, encoded)
                return jnp.where(stale[..., None], encoded, read(fresh))

            if not fresh[0].size:
                return read(fresh)
            return jax.lax.cond(jnp.any(stale), some, read, fresh)  # one copy where all are read

        pages = () if state is None else (state.pages, batch.image_pages)
        stored_tokens = () if batch.stored is None else (batch.stored, batch.is_stored)
        run = on_shards(self.mesh, local, (BATCHES, ROWS, ROWS, ROWS, ROWS), ROWS)
        return run(fresh, place, seen, pages, stored_tokens)
