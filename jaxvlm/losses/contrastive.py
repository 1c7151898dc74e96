"""InfoNCE: a query's positive against all else, the similarities made a tile at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxvlm.config import ConfigError
from jaxvlm.losses.pairs import facts, num_examples
from jaxvlm.losses.similarity import (
    check_choice,
    check_similarity,
    factor_of,
    own,
    prepared,
    tile_size,
)
from jaxvlm.losses.softmax import DIRECTIONS, About, Softmax
from jaxvlm.losses.standing import Standing
from jaxvlm.parallel.exchange import Side, meet
from jaxvlm.types import Pairs, Sums, Vectors

NEGATIVES = ("batch", "shard", "own")
MASKS = ("none", "absolute", "relative")


@dataclasses.dataclass(frozen=True)
class InfoNCE:
    """Cross-entropy of a query's positive among documents; the mean over queries.

    With ``l(x, y) = similarity(x, y) / temperature``, documents ``d_jk`` of example j (k = 0 is its
    positive) and one positive a query, example i's loss is ``log Z_i - l(q_i, d_i0)``::

        Z_i = sum_jk m e^l(q_i, d_jk)              query_to_document (always)
            + sum_j  m e^l(q_j, d_i0)              document_to_query
            + sum_j  m e^l(q_i, q_j),    j != i    query_to_query
            + sum_jk m e^l(d_i0, d_jk),  j != i    document_to_document

    as in GTE, whose first two sums both hold the positive, and Qwen3-Embedding, which has no
    document_to_query. Or each direction has a softmax of its own (CLIP), and ``log Z_i`` is their
    mean. Examples of one group are positives of each other; the loss is then the mean over
    positives p of ``log Z_i - l(q_i, p)``, all of them in Z (SupCon, L_out).

    m is 0 for what may be a positive in truth: a document that says what a positive of the query
    says (:mod:`jaxvlm.losses.pairs`), a query with the same content or group, and, with ``mask``,
    whatever has a similarity above ``s + margin`` (absolute: Qwen3-Embedding has 0.1) or
    ``s + margin * |s|`` (relative: NV-Retriever has -0.05), where s is that of q_i and d_i0.
    sentence-transformers writes these margins with the other sign. A positive is never masked, and
    no gradient is taken of a mask.

    Args:
        temperature: what similarities are divided by; 0: the model's learned scale, see
            :func:`jaxvlm.losses.similarity.factor_of`.
        max_scale: the largest factor that may be learned; 0: no bound.
        similarity: ``cosine`` | ``dot``; where tokens have vectors, MaxSim of these
            (:mod:`jaxvlm.losses.late`), in the first two directions; it is a sum over tokens, so a
            temperature near 1 is usual.
        directions: of :data:`jaxvlm.losses.softmax.DIRECTIONS`, the first among them.
        partition: ``joint``: one sum Z; ``each``: one a direction, of the first two.
        negatives: ``batch``: all documents of the global batch; ``shard``: those of the device's
            own examples, so that the loss depends on the mesh; ``own``: the example's own.
        mask: ``none`` | ``absolute`` | ``relative``.
        margin: see above; any sign.
        chunk: examples on a side of a tile of similarities; 0 chooses.
        mesh: of the run; ``None``: one device (of several, the compiler deals tiles as it likes).

    Sources: CPC, arXiv 1807.03748, equation 4; CLIP, arXiv 2103.00020, figure 3; GTE, arXiv
    2308.03281; Qwen3-Embedding, arXiv 2506.05176; SupCon, arXiv 2004.11362,
    equation 2; GISTEmbed, arXiv 2402.16829; NV-Retriever, arXiv 2407.15831.
    """

    temperature: float = 0.05
    max_scale: float = 100.0
    similarity: str = "cosine"
    directions: tuple[str, ...] = ("query_to_document",)
    partition: str = "joint"
    negatives: str = "batch"
    mask: str = "none"
    margin: float = 0.0
    chunk: int = 0
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        check_similarity(self.similarity)
        check_choice("partition", self.partition, ("joint", "each"))
        check_choice("negatives", self.negatives, NEGATIVES)
        check_choice("mask", self.mask, MASKS)
        for direction in self.directions:
            check_choice("directions", direction, DIRECTIONS)
        in_order = tuple(d for d in DIRECTIONS if d in self.directions)
        object.__setattr__(self, "directions", in_order)
        if in_order[:1] != DIRECTIONS[:1]:
            raise ConfigError(
                f"directions={in_order}: {DIRECTIONS[0]!r} holds the positives; add it"
            )
        if self.partition == "each" and set(in_order) & set(DIRECTIONS[2:]):
            raise ConfigError(
                f"partition='each' with directions={in_order}: {in_order[-1]!r} holds no positive "
                "of its own; take partition='joint'"
            )
        if self.negatives == "own" and len(in_order) > 1:
            raise ConfigError(
                f"negatives='own' with directions={in_order}: {in_order[1]!r} is about other "
                "examples; take negatives='batch', or that direction out"
            )
        if self.mask == "none" and self.margin:
            raise ConfigError(f"margin={self.margin} is not read with mask='none'")
        for field in ("temperature", "max_scale", "chunk"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field}={getattr(self, field)} must be 0 or more")

    @property
    def additive(self) -> bool:
        """Whether no example is told apart from another's documents."""
        return self.negatives == "own"

    def coefficients(self) -> Mapping[str, float]:
        """One term."""
        return {"loss": 1.0}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """The number of examples."""
        return {"loss": num_examples(batch)}

    def __call__(self, out: Vectors, batch: Pairs) -> Sums:
        """Sums over ``batch``, and how well its queries find their positives.

        Metrics are ``accuracy`` (a positive stands first among documents; level with a negative is
        not enough), ``positive_similarity``, and the ``scale`` that is learned.

        Raises:
            ConfigError: the vectors are not what the settings need.
        """
        vectors = prepared(out, batch, self.similarity)
        self._check(vectors)
        factor = factor_of(out, self.temperature, self.max_scale)
        limit = self._limit(vectors, jax.lax.stop_gradient(factor))
        of = _own if self.negatives == "own" else self._meet
        result = of(vectors, batch, factor, limit)
        count = num_examples(batch)
        similarity = jnp.sum(result["own"]) / jax.lax.stop_gradient(factor)
        metrics = {
            "accuracy": (jnp.sum(result["hit"]), count),
            "positive_similarity": (similarity, count),
        }
        if not self.temperature:
            metrics["scale"] = (factor, jnp.float32(1))
        return Sums({"loss": jnp.sum(result["loss"])}, metrics)

    def _check(self, vectors: Vectors) -> None:
        if vectors.query_seen is not None and (odd := set(self.directions) & set(DIRECTIONS[2:])):
            raise ConfigError(
                f"directions: {odd.pop()!r} is of a vector a row; MaxSim is of a query and a "
                "document"
            )
        if self.negatives == "own" and vectors.document.shape[1] == 1:
            raise ConfigError(
                "negatives='own': these examples have a positive alone (K=1); give them hard "
                "negatives, or take negatives='batch'"
            )

    def _limit(self, vectors: Vectors, factor: jax.Array) -> jax.Array:
        """f32[b]: the logit above which nothing is a negative."""
        if self.mask == "none":
            return jnp.full(vectors.query.shape[:1], jnp.inf, jnp.float32)
        seen = vectors.document_seen
        positives = vectors._replace(
            document=vectors.document[:, :1], document_seen=None if seen is None else seen[:, :1]
        )
        similarity = jax.lax.stop_gradient(own(positives)[:, 0])
        by = jnp.abs(similarity) if self.mask == "relative" else 1.0
        return factor * (similarity + self.margin * by)

    def _meet(
        self, vectors: Vectors, batch: Pairs, factor: jax.Array, limit: jax.Array
    ) -> dict[str, jax.Array]:
        of, relation = facts(batch)
        document, seen = vectors.document, vectors.document_seen
        positive_seen = None if seen is None else seen[:, 0]
        # Only what a direction needs goes round, and has a gradient.
        rows = {"query": vectors.query, "document": document[:, 0]}
        if not {"document_to_query", "document_to_document"} & set(self.directions):
            del rows["document"]
        columns = {"document": document, "query": vectors.query}
        if not {"document_to_query", "query_to_query"} & set(self.directions):
            del columns["query"]
        parts: tuple[tuple[str, ...], ...] = (self.directions,)
        if self.partition == "each":
            parts = tuple((direction,) for direction in self.directions)
        return meet(
            Softmax(parts),
            Side(rows, About(of, vectors.query_seen, positive_seen, limit)),
            Side(columns, About(of, vectors.query_seen, seen)),
            Side(factor, relation),
            tile_size(vectors, self.chunk),
            self.mesh,
            around=self.negatives == "batch",
        )


def _own(
    vectors: Vectors, batch: Pairs, factor: jax.Array, limit: jax.Array
) -> dict[str, jax.Array]:
    """As :class:`Softmax` gives it, of each example by itself."""
    there, key = jnp.asarray(batch.there), jnp.asarray(batch.document_key)
    logits = factor * own(vectors)
    positive = (jnp.arange(logits.shape[1]) == 0) & there[:, :1]
    negative = there & (key != key[:, :1]) & (logits <= limit[:, None])
    lowest = jnp.finfo(jnp.float32).min
    kept = jnp.where(negative | positive, logits, lowest)
    loss = jax.nn.logsumexp(kept, axis=1) - logits[:, 0]
    rival = jnp.max(jnp.where(negative, logits, -jnp.inf), axis=1)
    return Standing(logits[:, 0], logits[:, 0], rival).result(loss, there[:, 0])
