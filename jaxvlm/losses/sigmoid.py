"""SigLIP's sigmoid loss: every pair of a query and a document is a yes or a no of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxvlm.config import ConfigError
from jaxvlm.losses.pairs import Facts, candidates, facts, num_examples, same_example
from jaxvlm.losses.similarity import check_similarity, crossed, factor_of, prepared, tile_size
from jaxvlm.losses.standing import Standing
from jaxvlm.parallel.exchange import Side, meet
from jaxvlm.types import Pairs, Sums, Vectors


@dataclasses.dataclass(frozen=True)
class Sigmoid:
    """``-log sigmoid(z (e^scale similarity + bias))`` of all pairs, over the number of queries.

    z is 1 for a query's positives, those of its group among them, and -1 for all other documents of
    the global batch, hard negatives too. A document that says what a positive says, under another
    example, is left out (:mod:`jaxvlm.losses.pairs`). ``scale`` and ``bias`` are the model's, and
    learned; the paper starts them at log 10 and -10.

    Args:
        similarity: ``cosine`` | ``dot``; where tokens have vectors, MaxSim of these.
        chunk: examples on a side of a tile of similarities; 0 chooses.
        mesh: of the run; ``None``: one device. Documents go from device to device.

    Source: SigLIP, arXiv 2303.15343, section 3.
    """

    similarity: str = "cosine"
    chunk: int = 0
    mesh: Mesh | None = None
    additive: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        check_similarity(self.similarity)
        if self.chunk < 0:
            raise ConfigError(f"chunk={self.chunk} must be 0 or more")

    def coefficients(self) -> Mapping[str, float]:
        """One term."""
        return {"loss": 1.0}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """The number of queries."""
        return {"loss": num_examples(batch)}

    def __call__(self, out: Vectors, batch: Pairs) -> Sums:
        """Sums over ``batch``, and how well its queries find their positives.

        Metrics are ``accuracy`` and ``positive_similarity`` as InfoNCE has them, and the ``scale``
        and ``bias`` that are learned.

        Raises:
            ConfigError: the model has no scale or no bias.
        """
        if out.scale is None or out.bias is None:
            raise ConfigError(
                "the sigmoid loss learns a scale and a bias, and this model has "
                f"no {'scale' if out.scale is None else 'bias'}; give it one, or take InfoNCE "
                "(two towers have a bias with config.dual.has_bias=True)"
            )
        vectors = prepared(out, batch, self.similarity)
        factor, bias = factor_of(out, 0.0, 0.0), jnp.asarray(out.bias, jnp.float32)
        of, relation = facts(batch)
        result = meet(
            _Yes(),
            Side(vectors.query, _Facts(of, vectors.query_seen)),
            Side(vectors.document, _Facts(of, vectors.document_seen)),
            Side((factor, bias), relation),
            tile_size(vectors, self.chunk),
            self.mesh,
        )
        count = num_examples(batch)
        similarity = (jnp.sum(result["own"]) - count * bias) / factor
        one = jnp.float32(1)
        metrics = {
            "accuracy": (jnp.sum(result["hit"]), count),
            "positive_similarity": (jax.lax.stop_gradient(similarity), count),
            "scale": (factor, one),
            "bias": (bias, one),
        }
        return Sums({"loss": jnp.sum(result["loss"])}, metrics)


class _Facts(NamedTuple):
    of: Facts
    seen: Any


class _Yes(NamedTuple):
    """The :class:`~jaxvlm.parallel.exchange.Meeting` of the sigmoid loss."""

    def start(self, rows: Side) -> Any:
        count = len(rows.facts.of.number)
        return jnp.zeros((count,), jnp.float32), Standing.start(count)

    def tile(self, rows: Side, columns: Side, shared: Side) -> jax.Array:
        """Logits f32[r, c, K]."""
        factor, bias = shared.vectors
        seen = rows.facts.seen, columns.facts.seen
        return factor * crossed(rows.vectors, seen[0], columns.vectors, seen[1]) + bias

    def add(self, carry: Any, tile: Any, rows: Side, columns: Side, shared: Side) -> Any:
        loss, standing = carry
        negative, positive = candidates(rows.facts.of, columns.facts.of, shared.facts)
        standing = standing.add(
            tile, negative, positive, same_example(rows.facts.of, columns.facts.of)
        )
        each = jax.nn.softplus(jnp.where(positive, -tile, tile))
        return loss + jnp.sum(jnp.where(negative | positive, each, 0.0), axis=(1, 2)), standing

    def finish(self, carry: Any, rows: Side) -> dict[str, jax.Array]:
        loss, standing = carry
        return standing.result(loss, rows.facts.of.there[:, 0])

    def slope(
        self, carry: Any, d_result: Any, tile: Any, rows: Side, columns: Side, shared: Side
    ) -> jax.Array:
        negative, positive = candidates(rows.facts.of, columns.facts.of, shared.facts)
        # Of softplus; the two ways of writing it keep small numbers exact.
        d = jnp.where(positive, -jax.nn.sigmoid(-tile), jax.nn.sigmoid(tile))
        there = rows.facts.of.there[:, :1, None]
        return jnp.where((negative | positive) & there, d * d_result["loss"][:, None, None], 0.0)
