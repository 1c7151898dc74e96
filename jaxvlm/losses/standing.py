"""Where a query's positives stand among the documents that it is told apart from."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Standing(NamedTuple):
    """Of each row, f32[r]; put together from tiles in any order."""

    own: jax.Array
    """The logit of the example's own positive."""
    best: jax.Array
    """The largest logit of a positive."""
    rival: jax.Array
    """The largest logit of a negative."""

    @staticmethod
    def start(rows: int) -> Standing:
        """Before the first column."""
        low = jnp.full((rows,), -jnp.inf, jnp.float32)
        return Standing(jnp.zeros_like(low), low, low)

    def add(
        self, logits: jax.Array, negative: jax.Array, positive: jax.Array, own: jax.Array
    ) -> Standing:
        """With more columns.

        Args:
            logits: f32[r, c, K].
            negative: bool[r, c, K].
            positive: bool[r, c, K].
            own: bool[r, c]: the row's own example.
        """

        def largest(of: jax.Array) -> jax.Array:
            return jnp.max(jnp.where(of, logits, -jnp.inf), axis=(1, 2))

        return Standing(
            self.own + jnp.sum(jnp.where(own, logits[..., 0], 0.0), axis=1),
            jnp.maximum(self.best, largest(positive)),
            jnp.maximum(self.rival, largest(negative & ~positive)),
        )

    def hit(self) -> jax.Array:
        """f32[r]: 1 where a positive stands first; level with a negative is not enough."""
        return (self.best > self.rival).astype(jnp.float32)

    def result(self, loss: jax.Array, there: jax.Array) -> dict[str, jax.Array]:
        """``loss``, ``hit`` and ``own`` of each row, f32[r]; 0 where it is not ``there``."""
        made = {"loss": loss, "hit": self.hit(), "own": self.own}
        return {name: jnp.where(there, x, 0.0) for name, x in made.items()}
