"""SigLIP's sigmoid loss: a binary classification of every pair of a query and a document."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxvlm.config import ConfigError
from jaxvlm.losses import positives
from jaxvlm.losses.rank_statistics import RankStatistics
from jaxvlm.losses.similarity import (
    PairLoss,
    check_similarity,
    crossed,
    factor_of,
    prepared,
    tile_size,
)
from jaxvlm.parallel.all_pairs import PairSide, PairSides, all_pairs
from jaxvlm.types import Embeddings, Pairs, Sums


@dataclasses.dataclass(frozen=True)
class Sigmoid(PairLoss):
    """``-log sigmoid(z (e^scale similarity + bias))`` of all pairs, over the number of queries.

    z is 1 for a query's positives, including those of its group, and -1 for all other documents of
    the global batch, hard negatives included. A document of another example with the same content
    as a positive is left out (:mod:`jaxvlm.losses.positives`). ``scale`` and ``bias`` are learned
    parameters of the model; the paper starts them at log 10 and -10.

    Args:
        similarity: ``cosine`` | ``dot``; MaxSim where tokens have embeddings.
        tile_size: examples on a side of a tile of similarities; 0 chooses.
        mesh: the device mesh; ``None``: one device. Documents are passed around the devices.

    Source: SigLIP, arXiv 2303.15343, section 3.
    """

    similarity: str = "cosine"
    tile_size: int = 0
    mesh: Mesh | None = None
    additive: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        check_similarity(self.similarity)
        if self.tile_size < 0:
            raise ConfigError(f"tile_size={self.tile_size} must be 0 or more")

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        """Return sums over ``batch``, and retrieval metrics.

        Metrics are ``accuracy`` and ``positive_similarity`` as in InfoNCE, and the learned
        ``scale`` and ``bias``.

        Raises:
            ConfigError: the model has no scale or no bias.
        """
        if out.scale is None or out.bias is None:
            raise ConfigError(
                "the sigmoid loss needs a learned scale and bias, and this model has "
                f"no {'scale' if out.scale is None else 'bias'}; add one, or use InfoNCE (a dual "
                "encoder has a bias with config.dual.has_bias=True)"
            )
        embeddings = prepared(out, batch, self.similarity)
        factor, bias = factor_of(out, 0.0, 0.0), jnp.asarray(out.bias, jnp.float32)
        keys, index = positives.index_positives(batch)
        result = all_pairs(
            _SigmoidTile(),
            PairSide(embeddings.query, _KeysAndMask(keys, embeddings.query_mask)),
            PairSide(embeddings.document, _KeysAndMask(keys, embeddings.document_mask)),
            PairSide((factor, bias), index),
            tile_size(embeddings, self.tile_size),
            self.mesh,
        )
        count = positives.num_examples(batch)
        similarity = (jnp.sum(result["own"]) - count * bias) / factor
        one = jnp.float32(1)
        metrics = {
            "accuracy": (jnp.sum(result["hit"]), count),
            "positive_similarity": (jax.lax.stop_gradient(similarity), count),
            "scale": (factor, one),
            "bias": (bias, one),
        }
        return Sums({"loss": jnp.sum(result["loss"])}, metrics)


class _KeysAndMask(NamedTuple):
    keys: positives.ExampleKeys
    mask: Any


class _SigmoidTile(NamedTuple):
    """The :class:`~jaxvlm.parallel.all_pairs.PairTile` of the sigmoid loss."""

    def start(self, rows: PairSide) -> Any:
        count = len(rows.metadata.keys.number)
        return jnp.zeros((count,), jnp.float32), RankStatistics.start(count)

    def tile(self, sides: PairSides) -> jax.Array:
        """Return logits f32[r, c, K]."""
        (query, row), (document, column), ((factor, bias), _) = sides
        return factor * crossed(query, row.mask, document, column.mask) + bias

    def add(self, carry: Any, tile: Any, sides: PairSides) -> Any:
        loss, ranks = carry
        (rows, _), (columns, _), index = (side.metadata for side in sides)
        negative, positive = positives.candidates(rows, columns, index)
        ranks = ranks.add(tile, negative, positive, positives.same_example(rows, columns))
        each = jax.nn.softplus(jnp.where(positive, -tile, tile))
        return loss + jnp.sum(jnp.where(negative | positive, each, 0.0), axis=(1, 2)), ranks

    def finish(self, carry: Any, rows: PairSide) -> dict[str, jax.Array]:
        loss, ranks = carry
        return ranks.result(loss, rows.metadata.keys.valid[:, 0])

    def slope(self, carry: Any, d_result: Any, tile: Any, sides: PairSides) -> jax.Array:
        (rows, _), (columns, _), index = (side.metadata for side in sides)
        negative, positive = positives.candidates(rows, columns, index)
        # The derivative of softplus, in the form that is exact for small values of each sign.
        d = jnp.where(positive, -jax.nn.sigmoid(-tile), jax.nn.sigmoid(tile))
        valid = rows.valid[:, :1, None]
        return jnp.where((negative | positive) & valid, d * d_result["loss"][:, None, None], 0.0)
