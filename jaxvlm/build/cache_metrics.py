"""What a step did with its pictures' tokens, and what these take: a run's metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.cache.seen import Seen
from jaxvlm.types import Batch

LOST = "cache/lost"
"""Among a step's metrics: its pictures that came without pixels, and were not in their pages."""
_BINS = 5
"""Of lags above 0: each ends at about twice its start, the last one at the bound. A step's metrics
are added up over the devices, and are 64 bytes of numbers at most."""


def metrics_of(known: Sequence[tuple[Batch, Seen, Any]], bound: int = 0) -> dict[str, Any]:
    """What a step did with its pictures.

    Args:
        known: batches, and what was seen in each.
        bound: the most updates that tokens may be behind.
    """
    rows = min(len(batch.image_start) for batch, _, _ in known)

    def every(of: Callable[[Batch, Seen], Any]) -> jax.Array:
        # Side by side, so that devices send one number of all.
        each = [of(batch, seen).reshape(rows, -1) for batch, seen, _ in known]
        return jnp.concatenate(each, axis=1)

    def lag(batch: Batch, seen: Seen) -> jax.Array:
        return jnp.where(seen.found, seen.lag, 0)

    found = jnp.sum(every(lambda batch, seen: seen.found))
    here = jnp.sum(every(lambda batch, seen: seen.here))
    all_of = jnp.maximum(here, 1)
    values = {
        "cache/found": found / all_of,
        "cache/encoded": here - found,
        "cache/stale": jnp.sum(every(lambda batch, seen: seen.stale & seen.known)),
        "cache/lag": jnp.sum(every(lag)) / jnp.maximum(found, 1),
        "cache/lag_most": jnp.max(every(lag)),
    }
    if bound:
        starts = lag_bins(bound)
        lags, read = every(lag), every(lambda batch, seen: seen.found)
        upto = jnp.stack([found, *(jnp.sum(read & (lags >= start)) for start in starts[1:])])
        each = (upto - jnp.append(upto[1:], 0)) / all_of
        values |= {f"cache/lag_from_{start}": each[i] for i, start in enumerate(starts)}
    if known[0][1].lost is not None:
        values[LOST] = jnp.sum(every(lambda batch, seen: seen.lost))
    if known[0][0].is_stored is not None:
        values["cache/stored"] = jnp.sum(every(lambda batch, seen: batch.is_stored)) / all_of
    return values


def lag_bins(bound: int) -> list[int]:
    """The least lag of each bin of the histogram of what is read, ascending."""
    return sorted({0, 1, *(max(1, bound + 1 >> i) for i in range(1, _BINS))})


def saved(found: float, tower: float, total: float, milliseconds: float) -> float | None:
    """Milliseconds that a step would have been longer, had it encoded what it found; ``None`` where
    nothing else is counted, at whose rate that could be said.

    Args:
        found: share of its pictures.
        tower: FLOPs of encoding all of them, backwards too where it learns.
        total: of the step that does.
        milliseconds: that it took, at whose rate the tower is taken to work.
    """
    left = total - found * tower
    return milliseconds * found * tower / left if left > 0 else None
