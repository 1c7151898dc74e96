"""Writing encoded tokens, their versions and their drift into the cache's pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxvlm.cache.lookup import (
    ALL,
    ROWS,
    LookupResult,
    local_index,
    on_shards,
    pages_used,
    slice_images,
)
from jaxvlm.cache.policy import Policy
from jaxvlm.cache.state import CacheState, page_keys
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.types import PAGE, Age, Batch

SLOWEST = 1e-12
"""Smallest learning rate that drift is divided or multiplied by."""


class PageWrites(NamedTuple):
    """Writes a step's encoded tokens into pages."""

    mesh: Mesh
    policy: Policy
    """When tokens are stale; it says whether drift and gradient norms are measured."""
    rate: Callable[[jax.Array], jax.Array]
    """The vision encoder's version -> the learning rate of its next update."""

    def write(
        self,
        state: CacheState,
        batch: Batch,
        seen: LookupResult,
        features: jax.Array,
        gradient: jax.Array | None,
        ok: jax.Array,
    ) -> tuple[CacheState, jax.Array, Age]:
        """Write the encoded tokens into their pages, with the vision encoder's present version.

        Args:
            state: that was read.
            batch: as given to :meth:`jaxvlm.cache.encode.EncodeStep.features`.
            seen: its lookup result.
            features: tokens [B, ...] of the batch's images.
            gradient: of the loss with respect to ``features``; ``None``: the encoder is frozen.
            ok: bool[]: whether the step's update is applied; if not, nothing is written.

        Returns:
            The new state; f32[], the largest relative change of cached tokens that were recomputed;
            the age [B, I] of the tokens encoded, with ``grad_norm`` of the tokens read too.
        """
        rows, pages = features.reshape(len(features), -1, features.shape[-1]), batch.image_pages
        new_pages, change = self._write_pages(state, seen, pages, rows, ok)
        if batch.stored_age is not None:
            before = batch.stored.reshape(rows.shape).astype(jnp.float32)
            norm = jnp.maximum(self._norms(seen, before), 1e-15)
            change = jnp.where(batch.is_stored, self._norms(seen, rows - before) / norm, change)
        state = state._replace(pages=new_pages)
        recomputed = seen.stale & seen.cached
        refresh_at, drift = jnp.zeros_like(seen.size), seen.drift
        if self.policy.measures:
            state, refresh_at, drift = self._update_drift(state, seen, change, recomputed & ok)
        grad_norm = jnp.zeros(seen.size.shape, jnp.float32)
        if gradient is not None and self.policy.by_importance:
            grad_norm = self._norms(seen, gradient.reshape(rows.shape))
        state = self._write_metadata(state, batch, seen, (refresh_at, drift, grad_norm), ok)
        age = Age(jnp.broadcast_to(state.version, seen.size.shape), refresh_at, drift, grad_norm)
        return state._replace(step=state.step + 1), jnp.max(jnp.where(recomputed, change, 0)), age

    def _update_drift(
        self, state: CacheState, seen: LookupResult, change: jax.Array, recomputed: jax.Array
    ) -> tuple[CacheState, jax.Array, jax.Array]:
        """Update the drift estimates from the change of the tokens that were recomputed.

        Returns:
            The state with a new ``mean_drift``; [B, I] refresh version and drift of each image.
        """
        moved = recomputed & (seen.staleness > 0) & jnp.isfinite(change)
        rate = jnp.maximum(self.rate(state.version), SLOWEST)
        # Kept above 0, since 0 means that nothing was measured.
        measured = jnp.maximum(change / jnp.maximum(seen.staleness, 1) / rate, 1e-20)
        drift = jnp.where((seen.drift > 0) & moved, (seen.drift + measured) / 2, measured)
        drift = jnp.where(moved, drift, seen.drift)
        mean = jnp.sum(jnp.where(moved, drift, 0)) / jnp.maximum(jnp.sum(moved), 1)
        running_mean = jnp.where(state.mean_drift > 0, 0.9 * state.mean_drift + 0.1 * mean, mean)
        refresh_at = self.policy.next_refresh(state.version, drift * rate)
        mean_drift = jnp.where(jnp.any(moved), running_mean, state.mean_drift)
        return state._replace(mean_drift=mean_drift), refresh_at, drift

    def _write_pages(
        self,
        state: CacheState,
        seen: LookupResult,
        pages: jax.Array,
        rows: jax.Array,
        ok: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Write the encoded tokens into their pages.

        A shard that encoded nothing touches no page: copying all its tokens would cost as much as
        a whole lookup may.

        Returns:
            The new pages; f32[B, I], the relative change of each image's tokens.
        """

        def local(old: Any, at: Any, seen: LookupResult, rows: Any, ok: Any) -> Any:
            def write(carry: Any) -> Any:
                is_needed, old, _ = carry
                tokens = slice_images(rows, seen, at.shape[2] * PAGE)
                tokens = tokens.reshape(*at.shape, *old.shape[1:])
                used = pages_used(at, seen.size)[..., None, None]
                before = jnp.where(used, old[local_index(at, old)], 0).astype(jnp.float32)
                difference = jnp.sum((tokens - before) ** 2, axis=(2, 3, 4))
                norm = jnp.maximum(jnp.sum(before**2, (2, 3, 4)), 1e-30)
                indices = self._page_indices(at, seen.size, seen.encoded & ok, old)
                new = tokens.reshape(-1, *old.shape[1:]).astype(old.dtype)
                written = _scatter(old, indices, new)
                return jnp.zeros_like(is_needed), written, jnp.sqrt(difference / norm)

            # A loop of one iteration or none: XLA updates the pages of a loop in place, but copies
            # those of a conditional.
            none = jax.lax.pcast(jnp.zeros(at.shape[:2], jnp.float32), BATCH_AXES, to="varying")
            start = jnp.any(seen.stale), old, none
            _, pages, change = jax.lax.while_loop(lambda carry: carry[0], write, start)
            return pages, change

        run = on_shards(self.mesh, local, (*(ROWS,) * 4, ALL), (ROWS, ROWS))
        return run(state.pages, pages, seen, rows, ok)

    def _norms(self, seen: LookupResult, rows: jax.Array) -> jax.Array:
        """Return the norm f32[B, I] of each image's part of packed sequences [B, Q, D]."""

        def local(seen: LookupResult, rows: Any) -> Any:
            squares = jnp.sum(rows.astype(jnp.float32) ** 2, axis=-1)
            upto = jnp.pad(jnp.cumsum(squares, axis=-1), ((0, 0), (1, 0)))
            ends = [jnp.take_along_axis(upto, x, 1) for x in (seen.first, seen.first + seen.size)]
            return jnp.sqrt(jnp.maximum(ends[1] - ends[0], 0))

        return on_shards(self.mesh, local, (ROWS, ROWS), ROWS)(seen, rows)

    def _write_metadata(
        self, state: CacheState, batch: Batch, seen: LookupResult, noted: Any, ok: jax.Array
    ) -> CacheState:
        """Write the key, version and ``noted`` fields of each image into those of its pages.

        Args:
            state: that was read.
            batch: with its images' keys and pages.
            seen: its lookup result.
            noted: [B, I] each: refresh version, drift, gradient norm.
            ok: bool[]: whether the step's update is applied.
        """

        def local(
            old: Any, version: Any, ok: Any, at: Any, keys: Any, seen: LookupResult, new: Any
        ) -> Any:
            (key, page_version, *others), count = old, at.shape[-1]
            encoded = self._page_indices(at, seen.size, seen.encoded & ok, key)
            shown = encoded
            if self.policy.by_importance:
                shown = self._page_indices(at, seen.size, (seen.stale | seen.cached) & ok, key)
            key = _scatter(key, encoded, page_keys(keys, count).reshape(-1, 4))
            each = [jnp.repeat(x.reshape(-1), count) for x in new]
            indices = (encoded, encoded, shown)
            return [
                key,
                _scatter(page_version, encoded, version),
                *(_scatter(x, index, y) for x, index, y in zip(others, indices, each)),
            ]

        fields = ("key", "page_version", "refresh_at", "drift", "grad_norm")
        old = [getattr(state, name) for name in fields]
        specs = ([ROWS] * 5, ALL, ALL, ROWS, ROWS, ROWS, ROWS)
        run = on_shards(self.mesh, local, specs, [ROWS] * 5)
        new = run(old, state.version, ok, batch.image_pages, batch.image_key, seen, noted)
        return state._replace(**dict(zip(fields, new, strict=True)))

    def _page_indices(
        self, at: jax.Array, size: jax.Array, chosen: jax.Array, of: jax.Array
    ) -> jax.Array:
        """Return indices i32[B * I * n] into this shard's array ``of`` for each image's pages.

        Images that are not ``chosen`` get indices past the end, which a scatter drops. Of several
        images with the same pages only the first is written: a scatter's indices must be unique.
        """
        count = at.shape[-1]
        used, at = pages_used(at, size).reshape(-1, count), at.reshape(-1, count)
        beyond = len(of) + jnp.arange(at.size).reshape(at.shape)
        chosen = chosen.reshape(-1) & (at[:, 0] >= 0)
        before = np.tri(len(at), k=-1, dtype=bool)
        same = (at[:, None, 0] == at[None, :, 0]) & chosen[None] & before
        chosen &= ~jnp.any(same, axis=1)
        return jnp.where(chosen[:, None] & used, local_index(at, of), beyond).reshape(-1)


def _scatter(old: jax.Array, where: jax.Array, new: jax.Array) -> jax.Array:
    """Scatter ``new`` into ``old`` at unique indices; indices past the end are dropped."""
    return old.at[where].set(new, mode="drop", unique_indices=True)
