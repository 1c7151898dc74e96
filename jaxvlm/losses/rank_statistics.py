"""Rank statistics: how a query's positives rank among its negatives."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RankStatistics(NamedTuple):
    """Logits of positives and negatives of each row, f32[r]; tiles may come in any order."""

    own: jax.Array
    """The logit of the example's own positive."""
    best: jax.Array
    """The largest logit of a positive."""
    rival: jax.Array
    """The largest logit of a negative."""

    @staticmethod
    def start(rows: int) -> RankStatistics:
        """Return the statistics before the first column."""
        low = jnp.full((rows,), -jnp.inf, jnp.float32)
        return RankStatistics(jnp.zeros_like(low), low, low)

    def add(
        self, logits: jax.Array, negative: jax.Array, positive: jax.Array, own: jax.Array
    ) -> RankStatistics:
        """Add the columns of a tile.

        Args:
            logits: f32[r, c, K].
            negative: bool[r, c, K].
            positive: bool[r, c, K].
            own: bool[r, c], True for the row's own example.
        """

        def largest(of: jax.Array) -> jax.Array:
            return jnp.max(jnp.where(of, logits, -jnp.inf), axis=(1, 2))

        return RankStatistics(
            self.own + jnp.sum(jnp.where(own, logits[..., 0], 0.0), axis=1),
            jnp.maximum(self.best, largest(positive)),
            jnp.maximum(self.rival, largest(negative & ~positive)),
        )

    def hit(self) -> jax.Array:
        """Return 1 where a positive ranks first, f32[r]; a tie with a negative is not a hit."""
        return (self.best > self.rival).astype(jnp.float32)

    def result(self, loss: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
        """Return ``loss``, ``hit`` and ``own`` of each row, f32[r]; 0 where it is not ``valid``."""
        values = {"loss": loss, "hit": self.hit(), "own": self.own}
        return {name: jnp.where(valid, x, 0.0) for name, x in values.items()}
