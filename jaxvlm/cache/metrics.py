"""Metrics of the visual-token cache: hits, stale tokens, their age, and the time that hits save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.cache.lookup import LookupResult
from jaxvlm.types import Batch

LOST = "cache/lost"
"""Name of the metric that counts a step's images that came without pixels although their pages do
not hold them."""
_BINS = 5
"""Histogram bins of lags above 0: each ends at about twice its start, the last at the largest
allowed lag. A step's metrics are summed over the devices, and are at most 64 bytes."""


def metrics_of(
    looked_up: Sequence[tuple[Batch, LookupResult, Any]], bound: int = 0
) -> dict[str, Any]:
    """Compute the cache's metrics of a step.

    Args:
        looked_up: batches of the step, each with its lookup result and its tokens.
        bound: the policy's largest allowed staleness, in updates; 0: no histogram of lags.

    Returns:
        Scalars by metric name.
    """
    rows = min(len(batch.image_start) for batch, _, _ in looked_up)

    def every(of: Callable[[Batch, LookupResult], Any]) -> jax.Array:
        # Concatenated, so that devices reduce one number for all batches.
        each = [of(batch, seen).reshape(rows, -1) for batch, seen, _ in looked_up]
        return jnp.concatenate(each, axis=1)

    def lag(batch: Batch, seen: LookupResult) -> jax.Array:
        return jnp.where(seen.hit, seen.staleness, 0)

    hits = jnp.sum(every(lambda batch, seen: seen.hit))
    images = jnp.sum(every(lambda batch, seen: seen.present))
    all_of = jnp.maximum(images, 1)
    values = {
        "cache/hit_rate": hits / all_of,
        "cache/encoded": images - hits,
        "cache/stale": jnp.sum(every(lambda batch, seen: seen.stale & seen.cached)),
        "cache/staleness": jnp.sum(every(lag)) / jnp.maximum(hits, 1),
        "cache/staleness_max": jnp.max(every(lag)),
    }
    if bound:
        starts = lag_bins(bound)
        lags, read = every(lag), every(lambda batch, seen: seen.hit)
        upto = jnp.stack([hits, *(jnp.sum(read & (lags >= start)) for start in starts[1:])])
        each = (upto - jnp.append(upto[1:], 0)) / all_of
        values |= {f"cache/staleness_from_{start}": each[i] for i, start in enumerate(starts)}
    if looked_up[0][1].lost is not None:
        values[LOST] = jnp.sum(every(lambda batch, seen: seen.lost))
    if looked_up[0][0].is_stored is not None:
        values["cache/from_store"] = jnp.sum(every(lambda batch, seen: batch.is_stored)) / all_of
    return values


def lag_bins(bound: int) -> list[int]:
    """Return the smallest lag of each bin of the staleness histogram, ascending.

    Args:
        bound: the largest allowed staleness, in updates.
    """
    return sorted({0, 1, *(max(1, bound + 1 >> i) for i in range(1, _BINS))})


def saved(hit_rate: float, encoder: float, total: float, milliseconds: float) -> float | None:
    """Estimate by how many milliseconds the step's cache hits shortened it.

    Args:
        hit_rate: share of its images that were read from the cache.
        encoder: FLOPs of encoding all its images, the backward pass included where it is trained.
        total: FLOPs of a step that encodes all its images.
        milliseconds: duration of the step; the encoder is assumed to run at the same FLOP rate.

    Returns:
        Milliseconds; ``None`` where no FLOPs but the saved ones are counted, so there is no rate.
    """
    left = total - hit_rate * encoder
    return milliseconds * hit_rate * encoder / left if left > 0 else None
