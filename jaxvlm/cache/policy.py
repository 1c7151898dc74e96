"""When tokens that are kept are made anew: after so many updates, when they are due, or by draw."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_EVEN = 0.5
"""Share of a draw's probability that is the same for all, so that no picture has next to none."""
NEVER = 2**30


class Policy(NamedTuple):
    """What makes a picture's kept tokens stale. Static; lags are in updates of the tower."""

    bound: int = 0
    """Tokens with a higher lag are never read."""
    ahead: int = NEVER
    """Above this lag they are made anew where a chunk that runs anyway has room."""
    tolerance: float = 0.0
    """They are due when they have probably changed by this, relative to their norm; 0: never."""
    share: float = 0.0
    """Of the pictures whose tokens could be read, how many are drawn to be encoded."""
    seed: int = 0
    """Of the draws."""
    by_need: bool = False
    """Drawn by how much it would change the loss, not evenly."""
    at_once: int = 0
    """Steps in a row of which all pictures are drawn, and none of others; 0: some of each step."""

    @property
    def measures(self) -> bool:
        """Whether it goes by how far tokens have moved."""
        return self.tolerance > 0 or self.by_need

    def next_due(self, version: jax.Array, drift: jax.Array) -> jax.Array:
        """i32: the version from which on tokens made at ``version`` are due.

        Intervals are powers of two: what is known of the drift is not worth more.

        Args:
            version: i32.
            drift: f32, of the same shape: relative change that one update makes.
        """
        if not self.tolerance:
            return jnp.full_like(drift, NEVER, jnp.int32)
        updates = self.tolerance / jnp.maximum(drift, self.tolerance / (self.bound + 1))
        return version + jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(updates, 1)))).astype(jnp.int32)


def draw_step(
    allowed: jax.Array, share: float, turn: Any, seed: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Whole steps, at equal distances from a start that the seed draws: all, or nothing.

    Args:
        allowed: bool[n]: what may be drawn.
        share: of the steps.
        turn: i32[]: the step.
        seed: of the run.

    Returns:
        As :func:`draw`: bool[n]; f32[n], ``share`` where it is allowed.
    """
    start = jax.random.uniform(jax.random.key(seed))
    # In numbers below 1, so that no step is lost to rounding in a long run.
    here = jnp.mod(jnp.mod(turn, 1 << 12) * share + (turn >> 12) * ((share * (1 << 12)) % 1), 1)
    drawn = jnp.mod(here + start, 1) + share >= 1
    return allowed & drawn, jnp.where(allowed, share, 0.0)


def draw(
    allowed: jax.Array, need: jax.Array | None, share: float, turn: Any, seed: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Systematic sampling: one random start, then steps of 1 along the added up probabilities.

    Args:
        allowed: bool[n]: what may be drawn.
        need: f32[n], not negative: probabilities are half even, half proportional to it where that
            is below 1; ``None``: even.
        share: of ``allowed`` that is drawn.
        turn: i32[]: draws of different turns are independent.
        seed: of the run.

    Returns:
        bool[n]: ``share * sum(allowed)`` of them are set, or where that is no whole number one of
        its neighbours, so that it is the mean; f32[n], the probability with which each was, at
        least half of ``share`` where it is allowed, else 0.

    Source: Madow, On the theory of systematic sampling II (1949).
    """
    chance = jnp.where(allowed, share, 0.0)
    if need is not None:
        chance = _EVEN * chance + (1 - _EVEN) * _proportional(allowed, need, jnp.sum(chance))
    start = jax.random.uniform(jax.random.fold_in(jax.random.key(seed), turn))
    steps = jnp.floor(jnp.cumsum(chance) + start)
    return steps > jnp.concatenate([jnp.zeros(1), steps[:-1]]), chance


def _proportional(allowed: jax.Array, need: jax.Array, k: jax.Array) -> jax.Array:
    """f32[n]: proportional to ``need``, at most 1, and k in all."""
    size = jnp.where(allowed, need + 1e-6 * jnp.max(need) + 1e-30, 0)
    size /= jnp.maximum(jnp.max(size), 1e-30)
    falling = -jnp.sort(-size)
    # The j largest have 1; the rest share what is left of k.
    rest = jnp.cumsum(falling[::-1])[::-1]
    factor = (k - jnp.arange(len(size))) / jnp.maximum(rest, 1e-30)
    return jnp.minimum(1, size * factor[jnp.argmax(factor * falling <= 1)])
