"""Losses of each query with its own documents: triplets, gold similarities, a teacher's scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.losses.pairs import num_examples
from jaxvlm.losses.similarity import check_choice, check_similarity, own, prepared
from jaxvlm.types import Pairs, Sums, Vectors

DISTANCES = ("cosine", "euclidean")
_NEVER = float(np.finfo(np.float32).min) / 4


@dataclasses.dataclass(frozen=True)
class Triplet:
    """``max(0, distance(q, positive) - distance(q, negative) + margin)``, the mean over negatives.

    Args:
        margin: how much nearer the positive should be.
        distance: ``euclidean``, of vectors as they are; ``cosine``: 1 - cosine.

    Source: FaceNet, arXiv 1503.03832; over an example's own negatives.
    """

    margin: float = 5.0
    distance: str = "euclidean"
    additive: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        check_choice("distance", self.distance, DISTANCES)
        if self.margin < 0:
            raise ConfigError(f"margin={self.margin} must be 0 or more")

    def coefficients(self) -> Mapping[str, float]:
        """One term."""
        return {"loss": 1.0}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """The number of negatives."""
        return {"loss": jnp.sum(_negatives(batch, "the triplet loss"), dtype=jnp.float32)}

    def __call__(self, out: Vectors, batch: Pairs) -> Sums:
        """Sums over ``batch``, and ``accuracy``: the share of negatives that are farther."""
        negative = _negatives(batch, "the triplet loss")
        distance = self._distance(out, batch)
        gap = distance[:, :1] - distance[:, 1:]
        each = jnp.where(negative, jax.nn.relu(gap + self.margin), 0.0)
        nearer = jnp.sum(negative & (gap < 0), dtype=jnp.float32)
        metrics = {"accuracy": (nearer, jnp.sum(negative, dtype=jnp.float32))}
        return Sums({"loss": jnp.sum(each)}, metrics)

    def _distance(self, out: Vectors, batch: Pairs) -> jax.Array:
        """f32[b, K]."""
        vectors = prepared(out, batch, "cosine" if self.distance == "cosine" else "dot")
        if self.distance == "cosine":
            return 1.0 - own(vectors)
        if vectors.query_seen is not None:
            raise ConfigError("distance='euclidean' is of a vector a row; take distance='cosine'")
        square = jnp.sum(jnp.square(vectors.query[:, None] - vectors.document), axis=-1)
        far = square > 1e-24  # the root has no gradient at 0
        return jnp.where(far, jnp.sqrt(jnp.where(far, square, 1.0)), 0.0)


@dataclasses.dataclass(frozen=True)
class CosineRegression:
    """``(cosine(q, d) - teacher)^2``, the mean over all documents of all examples.

    Source: Sentence-BERT, arXiv 1908.10084, section 3; sentence-transformers' CosineSimilarityLoss.
    """

    additive: bool = dataclasses.field(default=True, init=False)

    def coefficients(self) -> Mapping[str, float]:
        """One term."""
        return {"loss": 1.0}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """The number of documents."""
        return {"loss": jnp.sum(jnp.asarray(batch.there), dtype=jnp.float32)}

    def __call__(self, out: Vectors, batch: Pairs) -> Sums:
        """Sums over ``batch``."""
        gold = _teacher(batch, "the regression of cosines")
        off = own(prepared(out, batch, "cosine")) - gold
        return Sums({"loss": jnp.sum(jnp.where(batch.there, jnp.square(off), 0.0))}, {})


@dataclasses.dataclass(frozen=True)
class CoSENT:
    """``log(1 + sum exp(scale (s_i - s_j)))`` over all i, j of which the teacher puts j higher.

    i and j are pairs of a query and one of its documents, s their cosine: every pair of the batch
    is ranked against every other. The n pairs are sorted; no n by n matrix is made.

    Args:
        scale: of the cosines.

    Source: CoSENT, doi 10.1109/TASLP.2024.3402087; sentence-transformers' CoSENTLoss.
    """

    scale: float = 20.0
    additive: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ConfigError(f"scale={self.scale} must be above 0")

    def coefficients(self) -> Mapping[str, float]:
        """One term."""
        return {"loss": 1.0}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """1: it is one logarithm of the whole batch."""
        return {"loss": jnp.float32(1)}

    def __call__(self, out: Vectors, batch: Pairs) -> Sums:
        """The logarithm."""
        there = jnp.asarray(batch.there).reshape(-1)
        gold = jnp.where(there, _teacher(batch, "CoSENT").reshape(-1), -jnp.inf)
        score = self.scale * own(prepared(out, batch, "cosine")).reshape(-1)
        order = jnp.argsort(gold)  # those that are not there come first: nobody stands below them
        gold, score, there = gold[order], score[order], there[order]
        # log of the sum of exp(-s) from each place on, and of nothing behind the last.
        behind = jax.lax.cumlogsumexp(jnp.where(there, -score, _NEVER), reverse=True)
        behind = jnp.append(behind, _NEVER)
        each = score + behind[jnp.searchsorted(gold, gold, side="right")]
        each = jnp.append(jnp.where(there, each, _NEVER), 0.0)
        return Sums({"loss": jax.nn.logsumexp(each)}, {})


@dataclasses.dataclass(frozen=True)
class MarginMSE:
    """``((s_positive - s_negative) - (t_positive - t_negative))^2``, the mean over negatives.

    Args:
        similarity: ``dot`` | ``cosine``; t is the teacher's, and of any size.

    Source: arXiv 2010.02666.
    """

    similarity: str = "dot"
    additive: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        check_similarity(self.similarity)

    def coefficients(self) -> Mapping[str, float]:
        """One term."""
        return {"loss": 1.0}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """The number of negatives."""
        return {"loss": jnp.sum(_negatives(batch, "MarginMSE"), dtype=jnp.float32)}

    def __call__(self, out: Vectors, batch: Pairs) -> Sums:
        """Sums over ``batch``."""
        negative, teacher = _negatives(batch, "MarginMSE"), _teacher(batch, "MarginMSE")
        score = own(prepared(out, batch, self.similarity))
        off = (score[:, :1] - score[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
        return Sums({"loss": jnp.sum(jnp.where(negative, jnp.square(off), 0.0))}, {})


@dataclasses.dataclass(frozen=True)
class Distill:
    """``T^2 KL(softmax(teacher / teacher_T) || softmax(s / T))`` over an example's documents.

    The mean over examples; s are similarities of the query with its own documents.

    Args:
        similarity: ``dot`` | ``cosine``.
        temperature: T, of the model's similarities.
        teacher_temperature: of the teacher's scores.

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

    def coefficients(self) -> Mapping[str, float]:
        """One term."""
        return {"loss": 1.0}

    def weights(self, batch: Pairs) -> dict[str, Any]:
        """The number of examples."""
        return {"loss": num_examples(batch)}

    def __call__(self, out: Vectors, batch: Pairs) -> Sums:
        """Sums over ``batch``, and ``agreement``: how often both put the same document first."""
        _negatives(batch, "distillation")
        there = jnp.asarray(batch.there) & jnp.asarray(batch.there)[:, :1]

        def log_shares(score: jax.Array, temperature: float) -> jax.Array:
            return jax.nn.log_softmax(jnp.where(there, score / temperature, _NEVER), axis=1)

        ours = log_shares(own(prepared(out, batch, self.similarity)), self.temperature)
        teacher = log_shares(_teacher(batch, "distillation"), self.teacher_temperature)
        each = jnp.where(there, jnp.exp(teacher) * (teacher - ours), 0.0)
        same = (jnp.argmax(ours, axis=1) == jnp.argmax(teacher, axis=1)) & there[:, 0]
        metrics = {"agreement": (jnp.sum(same, dtype=jnp.float32), num_examples(batch))}
        return Sums({"loss": self.temperature**2 * jnp.sum(each)}, metrics)


def _negatives(batch: Pairs, what: str) -> jax.Array:
    """bool[b, K - 1]: the hard negatives that are there."""
    there = jnp.asarray(batch.there)
    if there.shape[1] == 1:
        raise ConfigError(
            f"{what} compares a positive with hard negatives, and these examples have none (K=1); "
            "add negatives to the data, or take InfoNCE"
        )
    return there[:, 1:] & there[:, :1]


def _teacher(batch: Pairs, what: str) -> jax.Array:
    """f32[b, K]: 0 where no document is."""
    if batch.teacher is None:
        raise ConfigError(
            f"{what} learns a teacher's scores, or gold similarities, and these examples have none "
            "(Pairs.teacher); add them to the data, or take another loss"
        )
    there, teacher = jnp.asarray(batch.there), jnp.asarray(batch.teacher, jnp.float32)
    if teacher.shape != there.shape:
        raise ConfigError(f"teacher {teacher.shape} must have a score for each of {there.shape}")
    return jnp.where(there, teacher, 0.0)
