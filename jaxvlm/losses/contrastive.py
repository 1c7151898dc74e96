"""InfoNCE: a softmax of a query's positive against negatives, computed in tiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxvlm.config import ConfigError, check_choice
from jaxvlm.losses.positives import index_positives, num_examples
from jaxvlm.losses.rank_statistics import RankStatistics
from jaxvlm.losses.similarity import (
    PairLoss,
    check_similarity,
    factor_of,
    own,
    prepared,
    tile_size,
)
from jaxvlm.losses.softmax import DIRECTIONS, SideMetadata, Softmax
from jaxvlm.parallel.all_pairs import PairSide, all_pairs
from jaxvlm.types import Embeddings, Pairs, Sums

NEGATIVES = ("batch", "shard", "own")
MASKS = ("none", "absolute", "relative")


@dataclasses.dataclass(frozen=True)
class InfoNCE(PairLoss):
    """Cross-entropy of a query's positive among documents; the mean over queries.

    With ``l(x, y) = similarity(x, y) / temperature``, documents ``d_jk`` of example j (k = 0 is its
    positive) and one positive for each query, example i's loss is ``log Z_i - l(q_i, d_i0)``::

        Z_i = sum_jk m e^l(q_i, d_jk)              query_to_document (always)
            + sum_j  m e^l(q_j, d_i0)              document_to_query
            + sum_j  m e^l(q_i, q_j),    j != i    query_to_query
            + sum_jk m e^l(d_i0, d_jk),  j != i    document_to_document

    as in GTE, whose first two sums both contain the positive, and Qwen3-Embedding, which has no
    document_to_query. Or each direction has a softmax of its own (CLIP), and ``log Z_i`` is their
    mean. Examples of one group are positives of each other; the loss is then the mean over
    positives p of ``log Z_i - l(q_i, p)``, all of them in Z (SupCon, L_out).

    m is 0 for false negatives: a document with the same content as a positive of the query
    (:mod:`jaxvlm.losses.positives`), a query with the same content or group, and, with
    ``false_negative_filter``, whatever has a similarity above ``s + margin`` (absolute:
    Qwen3-Embedding has 0.1) or ``s + margin * |s|`` (relative: NV-Retriever has -0.05), where s is
    the similarity of q_i and d_i0. sentence-transformers writes these margins with the other sign.
    A positive is never masked, and the mask has no gradient.

    Args:
        temperature: similarities are divided by it; 0: the model's learned scale, see
            :func:`jaxvlm.losses.similarity.factor_of`.
        max_scale: upper bound of the learned scale; 0: no bound.
        similarity: ``cosine`` | ``dot``; MaxSim where tokens have embeddings
            (:mod:`jaxvlm.losses.maxsim`), for the first two directions; it is a sum over tokens,
            so a temperature near 1 is usual.
        directions: of :data:`jaxvlm.losses.softmax.DIRECTIONS`; must contain the first.
        softmax_scope: ``joint``: one sum Z; ``each``: one for each direction, of the first two.
        negatives_from: ``batch``: all documents of the global batch; ``shard``: documents of the
            device's own examples, so that the loss depends on the mesh; ``own``: the example's own
            hard negatives.
        false_negative_filter: ``none`` | ``absolute`` | ``relative``.
        margin: see above; any sign.
        tile_size: examples on a side of a tile of similarities; 0 chooses.
        mesh: the device mesh; ``None``: one device (with several, the compiler shards tiles as it
            chooses).

    Sources: CPC, arXiv 1807.03748, equation 4; CLIP, arXiv 2103.00020, figure 3; GTE, arXiv
    2308.03281; Qwen3-Embedding, arXiv 2506.05176; SupCon, arXiv 2004.11362,
    equation 2; GISTEmbed, arXiv 2402.16829; NV-Retriever, arXiv 2407.15831.
    """

    temperature: float = 0.05
    max_scale: float = 100.0
    similarity: str = "cosine"
    directions: tuple[str, ...] = ("query_to_document",)
    softmax_scope: str = "joint"
    negatives_from: str = "batch"
    false_negative_filter: str = "none"
    margin: float = 0.0
    tile_size: int = 0
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        check_similarity(self.similarity)
        check_choice("softmax_scope", self.softmax_scope, ("joint", "each"))
        check_choice("negatives_from", self.negatives_from, NEGATIVES)
        check_choice("false_negative_filter", self.false_negative_filter, MASKS)
        for direction in self.directions:
            check_choice("directions", direction, DIRECTIONS)
        in_order = tuple(d for d in DIRECTIONS if d in self.directions)
        object.__setattr__(self, "directions", in_order)
        if in_order[:1] != DIRECTIONS[:1]:
            raise ConfigError(f"directions={in_order}: {DIRECTIONS[0]!r} has the positives; add it")
        if self.softmax_scope == "each" and set(in_order) & set(DIRECTIONS[2:]):
            raise ConfigError(
                f"softmax_scope='each' with directions={in_order}: {in_order[-1]!r} has no "
                "positives; set softmax_scope='joint'"
            )
        if self.negatives_from == "own" and len(in_order) > 1:
            raise ConfigError(
                f"negatives_from='own' with directions={in_order}: {in_order[1]!r} compares with "
                "other examples; set negatives_from='batch', or leave that direction out"
            )
        if self.false_negative_filter == "none" and self.margin:
            raise ConfigError(f"margin={self.margin} is not read with false_negative_filter='none'")
        if self.temperature and self.max_scale != type(self).max_scale:
            raise ConfigError(
                f"max_scale={self.max_scale} is not read with temperature={self.temperature}: no "
                "scale is learned; leave it out, or set temperature=0"
            )
        for field in ("temperature", "max_scale", "tile_size"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field}={getattr(self, field)} must be 0 or more")

    @property
    def additive(self) -> bool:
        """Whether the loss is a sum over examples: no example has another's as negatives."""
        return self.negatives_from == "own"

    @property
    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """Path of a parameter -> the least and the largest value that an update may leave it at."""
        if self.temperature or not self.max_scale:
            return {}
        return {"head/scale": (-math.inf, math.log(self.max_scale))}

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        """Return sums over ``batch``, and retrieval metrics.

        Metrics are ``accuracy`` (a positive ranks first among documents; a tie with a negative is
        not a hit), ``positive_similarity``, and the learned ``scale``.

        Raises:
            ConfigError: the embeddings do not fit the settings.
        """
        embeddings = prepared(out, batch, self.similarity)
        self._check(embeddings)
        factor = factor_of(out, self.temperature, self.max_scale)
        limit = self._limit(embeddings, jax.lax.stop_gradient(factor))
        run = _own if self.negatives_from == "own" else self._all_pairs
        result = run(embeddings, batch, factor, limit)
        count = num_examples(batch)
        similarity = jnp.sum(result["own"]) / jax.lax.stop_gradient(factor)
        metrics = {
            "accuracy": (jnp.sum(result["hit"]), count),
            "positive_similarity": (similarity, count),
        }
        if not self.temperature:
            metrics["scale"] = (factor, jnp.float32(1))
        return Sums({"loss": jnp.sum(result["loss"])}, metrics)

    def _check(self, embeddings: Embeddings) -> None:
        odd = set(self.directions) & set(DIRECTIONS[2:])
        if embeddings.query_mask is not None and odd:
            raise ConfigError(
                f"directions: {odd.pop()!r} needs one embedding for each query and document; "
                "MaxSim, with one for each token, compares queries with documents only"
            )
        if self.negatives_from == "own" and embeddings.document.shape[1] == 1:
            raise ConfigError(
                "negatives_from='own': these examples have only a positive (K=1); add hard "
                "negatives to the data, or set negatives_from='batch'"
            )

    def _limit(self, embeddings: Embeddings, factor: jax.Array) -> jax.Array:
        """Return the logit above which a document is a false negative, f32[b]."""
        if self.false_negative_filter == "none":
            return jnp.full(embeddings.query.shape[:1], jnp.inf, jnp.float32)
        mask = embeddings.document_mask
        positives = embeddings._replace(
            document=embeddings.document[:, :1], document_mask=None if mask is None else mask[:, :1]
        )
        similarity = jax.lax.stop_gradient(own(positives)[:, 0])
        by = jnp.abs(similarity) if self.false_negative_filter == "relative" else 1.0
        return factor * (similarity + self.margin * by)

    def _all_pairs(
        self, embeddings: Embeddings, batch: Pairs, factor: jax.Array, limit: jax.Array
    ) -> dict[str, jax.Array]:
        keys, index = index_positives(batch)
        document, mask = embeddings.document, embeddings.document_mask
        positive_mask = None if mask is None else mask[:, 0]
        # Only what a direction needs is passed around, and has a gradient.
        rows = {"query": embeddings.query, "document": document[:, 0]}
        if not {"document_to_query", "document_to_document"} & set(self.directions):
            del rows["document"]
        columns = {"document": document, "query": embeddings.query}
        if not {"document_to_query", "query_to_query"} & set(self.directions):
            del columns["query"]
        parts: tuple[tuple[str, ...], ...] = (self.directions,)
        if self.softmax_scope == "each":
            parts = tuple((direction,) for direction in self.directions)
        return all_pairs(
            Softmax(parts),
            PairSide(rows, SideMetadata(keys, embeddings.query_mask, positive_mask, limit)),
            PairSide(columns, SideMetadata(keys, embeddings.query_mask, mask)),
            PairSide(factor, index),
            tile_size(embeddings, self.tile_size),
            self.mesh,
            around=self.negatives_from == "batch",
        )


def _own(
    embeddings: Embeddings, batch: Pairs, factor: jax.Array, limit: jax.Array
) -> dict[str, jax.Array]:
    """Compute the results of :class:`Softmax` with each example's own documents alone."""
    valid, key = jnp.asarray(batch.valid), jnp.asarray(batch.document_key)
    logits = factor * own(embeddings)
    positive = (jnp.arange(logits.shape[1]) == 0) & valid[:, :1]
    negative = valid & (key != key[:, :1]) & (logits <= limit[:, None])
    lowest = jnp.finfo(jnp.float32).min
    kept = jnp.where(negative | positive, logits, lowest)
    loss = jax.nn.logsumexp(kept, axis=1) - logits[:, 0]
    rival = jnp.max(jnp.where(negative, logits, -jnp.inf), axis=1)
    return RankStatistics(logits[:, 0], logits[:, 0], rival).result(loss, valid[:, 0])
