"""Losses over a query's own documents: triplet, cosine regression, CoSENT, MarginMSE, distillation.

Some learn gold similarities or a teacher's scores.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.config import ConfigError, check_choice
from jaxvlm.losses.positives import num_examples
from jaxvlm.losses.similarity import PairLoss, check_similarity, own, prepared
from jaxvlm.types import Embeddings, Pairs, Sums

DISTANCES = ("cosine", "euclidean")
_NEVER = float(np.finfo(np.float32).min) / 4


@dataclasses.dataclass(frozen=True)
class Triplet(PairLoss):
    """``max(0, distance(q, positive) - distance(q, negative) + margin)``, the mean over negatives.

    Args:
        margin: by how much the positive should be nearer than a negative.
        distance: ``euclidean``, without normalization; ``cosine``: 1 - cosine.

    Source: FaceNet, arXiv 1503.03832; over an example's own negatives.
    """

    margin: float = 5.0
    distance: str = "euclidean"
    additive: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        check_choice("distance", self.distance, DISTANCES)
        if self.margin < 0:
            raise ConfigError(f"margin={self.margin} must be 0 or more")

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """Return the number of negatives."""
        return {"loss": jnp.sum(_negatives(batch, "the triplet loss"), dtype=jnp.float32)}

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        """Return sums over ``batch``, and ``accuracy``: the fraction of negatives farther away."""
        negative = _negatives(batch, "the triplet loss")
        distance = self._distance(out, batch)
        gap = distance[:, :1] - distance[:, 1:]
        each = jnp.where(negative, jax.nn.relu(gap + self.margin), 0.0)
        nearer = jnp.sum(negative & (gap < 0), dtype=jnp.float32)
        metrics = {"accuracy": (nearer, jnp.sum(negative, dtype=jnp.float32))}
        return Sums({"loss": jnp.sum(each)}, metrics)

    def _distance(self, out: Embeddings, batch: Pairs) -> jax.Array:
        """f32[b, K]."""
        embeddings = prepared(out, batch, "cosine" if self.distance == "cosine" else "dot")
        if self.distance == "cosine":
            return 1.0 - own(embeddings)
        if embeddings.query_mask is not None:
            raise ConfigError(
                "distance='euclidean' needs one embedding for each item, not one for each token; "
                "set distance='cosine'"
            )
        square = jnp.sum(jnp.square(embeddings.query[:, None] - embeddings.document), axis=-1)
        far = square > 1e-24  # the square root has no gradient at 0
        return jnp.where(far, jnp.sqrt(jnp.where(far, square, 1.0)), 0.0)


@dataclasses.dataclass(frozen=True)
class CosineRegression(PairLoss):
    """``(cosine(q, d) - teacher)^2``, the mean over all documents of all examples.

    Source: Sentence-BERT, arXiv 1908.10084, section 3; sentence-transformers' CosineSimilarityLoss.
    """

    additive: bool = dataclasses.field(default=True, init=False)

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """Return the number of documents."""
        return {"loss": jnp.sum(jnp.asarray(batch.valid), dtype=jnp.float32)}

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        """Return sums over ``batch``."""
        gold = _teacher(batch, "cosine regression")
        off = own(prepared(out, batch, "cosine")) - gold
        return Sums({"loss": jnp.sum(jnp.where(batch.valid, jnp.square(off), 0.0))}, {})


@dataclasses.dataclass(frozen=True)
class CoSENT(PairLoss):
    """``log(1 + sum exp(scale (s_i - s_j)))`` over all i, j where the teacher ranks j higher.

    i and j are pairs of a query and one of its documents, s their cosine: every pair of the batch
    is ranked against every other. The n pairs are sorted, so no n x n matrix is needed.

    Args:
        scale: factor of the cosines.

    Source: CoSENT, doi 10.1109/TASLP.2024.3402087; sentence-transformers' CoSENTLoss.
    """

    scale: float = 20.0
    additive: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ConfigError(f"scale={self.scale} must be above 0")

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """Return 1: the loss is one logarithm over the whole batch."""
        return {"loss": jnp.float32(1)}

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        """Return the logarithm over ``batch``."""
        valid = jnp.asarray(batch.valid).reshape(-1)
        gold = jnp.where(valid, _teacher(batch, "CoSENT").reshape(-1), -jnp.inf)
        score = self.scale * own(prepared(out, batch, "cosine")).reshape(-1)
        order = jnp.argsort(gold)  # padding comes first: nothing ranks below it
        gold, score, valid = gold[order], score[order], valid[order]
        # The log of the sum of exp(-s) from each position to the end, and of an empty sum.
        higher = jax.lax.cumlogsumexp(jnp.where(valid, -score, _NEVER), reverse=True)
        higher = jnp.append(higher, _NEVER)
        each = score + higher[jnp.searchsorted(gold, gold, side="right")]
        each = jnp.append(jnp.where(valid, each, _NEVER), 0.0)
        return Sums({"loss": jax.nn.logsumexp(each)}, {})


@dataclasses.dataclass(frozen=True)
class MarginMSE(PairLoss):
    """``((s_positive - s_negative) - (t_positive - t_negative))^2``, the mean over negatives.

    Args:
        similarity: ``dot`` | ``cosine``, for s; t is the teacher's score, of any scale.

    Source: arXiv 2010.02666.
    """

    similarity: str = "dot"
    additive: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        check_similarity(self.similarity)

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """Return the number of negatives."""
        return {"loss": jnp.sum(_negatives(batch, "MarginMSE"), dtype=jnp.float32)}

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        """Return sums over ``batch``."""
        negative, teacher = _negatives(batch, "MarginMSE"), _teacher(batch, "MarginMSE")
        score = own(prepared(out, batch, self.similarity))
        off = (score[:, :1] - score[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
        return Sums({"loss": jnp.sum(jnp.where(negative, jnp.square(off), 0.0))}, {})


@dataclasses.dataclass(frozen=True)
class Distill(PairLoss):
    """``T^2 KL(softmax(teacher / teacher_T) || softmax(s / T))`` over an example's documents.

    The mean over examples; s are similarities of a query with its own documents.

    Args:
        similarity: ``dot`` | ``cosine``.
        temperature: T, the temperature of the model's similarities.
        teacher_temperature: the temperature of the teacher's scores.

    Sources: arXiv 1503.02531, section 2; over documents, arXiv 2010.11386.
    """

    similarity: str = "dot"
    temperature: float = 1.0
    teacher_temperature: float = 1.0
    additive: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        check_similarity(self.similarity)
        for field in ("temperature", "teacher_temperature"):
            if not 0 < getattr(self, field) < math.inf:
                raise ConfigError(f"{field}={getattr(self, field)} must be above 0")

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        """Return sums over ``batch``, and ``agreement``: how often both rank the same one first."""
        _negatives(batch, "distillation")
        valid = jnp.asarray(batch.valid) & jnp.asarray(batch.valid)[:, :1]

        def log_shares(score: jax.Array, temperature: float) -> jax.Array:
            return jax.nn.log_softmax(jnp.where(valid, score / temperature, _NEVER), axis=1)

        ours = log_shares(own(prepared(out, batch, self.similarity)), self.temperature)
        teacher = log_shares(_teacher(batch, "distillation"), self.teacher_temperature)
        each = jnp.where(valid, jnp.exp(teacher) * (teacher - ours), 0.0)
        same = (jnp.argmax(ours, axis=1) == jnp.argmax(teacher, axis=1)) & valid[:, 0]
        metrics = {"agreement": (jnp.sum(same, dtype=jnp.float32), num_examples(batch))}
        return Sums({"loss": self.temperature**2 * jnp.sum(each)}, metrics)


def _negatives(batch: Pairs, what: str) -> jax.Array:
    """Return the mask of hard negatives, bool[b, K - 1]."""
    valid = jnp.asarray(batch.valid)
    if valid.shape[1] == 1:
        raise ConfigError(
            f"{what} compares a positive with hard negatives, and these examples have none (K=1); "
            "add negatives to the data, or use InfoNCE"
        )
    return valid[:, 1:] & valid[:, :1]


def _teacher(batch: Pairs, what: str) -> jax.Array:
    """Return the teacher's scores, f32[b, K]; 0 for padding."""
    if batch.teacher is None:
        raise ConfigError(
            f"{what} learns a teacher's scores, or gold similarities, and these examples have none "
            "(Pairs.teacher); add them to the data, or use another loss"
        )
    valid, teacher = jnp.asarray(batch.valid), jnp.asarray(batch.teacher, jnp.float32)
    if teacher.shape != valid.shape:
        raise ConfigError(
            f"teacher scores of shape {teacher.shape} must have one score for each document: "
            f"{valid.shape}"
        )
    return jnp.where(valid, teacher, 0.0)
