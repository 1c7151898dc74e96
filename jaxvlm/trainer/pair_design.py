"""Whether a run on pairs can learn from its batches, judged before the first step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxvlm.config import Config
from jaxvlm.data.errors import DataError
from jaxvlm.data.pairs.dataset import PairDataset
from jaxvlm.losses import positives
from jaxvlm.types import Pairs

_STEPS, _QUERIES = 16, 128
"""Batches that are looked at, and queries of each that are compared with all its documents."""
_CONTRASTIVE = ("info_nce", "sigmoid")
"""Losses whose negatives are other documents of the batch, and whose positives labels add to."""
_SCORED = ("cosine", "cosent", "margin_mse", "distill")
"""Losses that learn scores."""


def check(config: Config, dataset: PairDataset, shards: int) -> list[str]:
    """Refuse data and batches that the loss learns nothing from, or reads otherwise than meant.

    Args:
        config: of the run; a loss of the user's own is not judged.
        dataset: that the run trains on.
        shards: number of parts that a batch is sharded into.

    Returns:
        Lines that say how labels and scores are understood, and how many queries have a negative.

    Raises:
        DataError: the design can't be trained; the message says what to change.
    """
    if config.loss.target:
        return []
    lines = check_fields(config, dataset)
    if config.loss.name in _CONTRASTIVE:
        lines += _judge_negatives(config, dataset, shards)
    return lines


def check_fields(config: Config, dataset: PairDataset) -> list[str]:
    """Refuse scores and labels that the loss does not read, or reads otherwise than meant.

    Args:
        config: of the run.
        dataset: that the run trains on.

    Returns:
        Lines that say how they are understood.

    Raises:
        DataError: which, and what to change.
    """
    name, corpus, lines = config.loss.name, dataset.corpus, []
    if config.loss.target:
        return []
    if corpus.has_scores:
        lines.append(_judge_scores(config, dataset))
    if corpus.label is not None:
        groups = len(np.unique(corpus.label[corpus.label >= 0]))
        if name not in _CONTRASTIVE:
            raise DataError(
                f"{dataset.name}: config.loss.name={name!r} does not read labels; leave them out "
                f"with config.data.ignored_fields=('label',){_again(dataset)}, or use info_nce or "
                "sigmoid"
            )
        lines.append(f"labels: {groups:,} groups of examples that are positives of each other")
    return lines


def _again(dataset: PairDataset) -> str:
    """What a field that is left out asks for besides, in a message."""
    return " when the data are packed" * dataset.is_packed


def unread(config: Config, dataset: PairDataset) -> list[str]:
    """Lines that name settings of texts where an encoder reads none on that side.

    They may be meant for later, when ``jaxvlm embed`` is given texts, so they are not refused.

    Args:
        config: of the run.
        dataset: that the run trains on.
    """
    lines = []
    for column in (dataset.queries, dataset.documents):
        if config.embedder != "dual" or len(column.encoded.tokens):
            continue
        for name in (f"{column.name}_instruction", f"max_{column.name}_length"):
            if value := getattr(config.data.pairs, name):
                lines.append(
                    f"config.data.pairs.{name}={value!r} is not read in training: every "
                    f"{column.name} is an image alone"
                )
    return lines


def _judge_scores(config: Config, dataset: PairDataset) -> str:
    name, score = config.loss.name, dataset.corpus.score
    low, high = float(score.min()), float(score.max())
    if name not in _SCORED:
        raise DataError(
            f"{dataset.name}: config.loss.name={name!r} does not read scores; leave the field out "
            "that has them ('score', 'scores', 'label', 'pos_scores' and 'neg_scores') with "
            f"config.data.ignored_fields{_again(dataset)}, which trains every pair as a match, or "
            f"use one of {', '.join(_SCORED)}"
        )
    if name == "cosine" and not -1 <= low <= high <= 1:
        raise DataError(
            f"{dataset.name}: config.loss.name='cosine' learns cosines, from -1 to 1, and the "
            f"scores are from {low:g} to {high:g}; divide them by {max(abs(low), abs(high)):g}, or "
            "use cosent, which reads their order alone"
        )
    if low == high:
        raise DataError(
            f"{dataset.name}: every score is {low:g}; config.loss.name={name!r} learns their "
            "differences"
        )
    kind = "similarities of pairs" if dataset.num_documents == 1 else "a teacher's scores"
    return f"scores: {kind}, from {low:g} to {high:g}"


def _judge_negatives(config: Config, dataset: PairDataset, shards: int) -> list[str]:
    loss = config.pair_loss
    scope = loss.negatives_from if config.loss.name == "info_nce" else "batch"
    steps = min(_STEPS, dataset.steps_per_epoch)
    has = np.concatenate([_has_negative(dataset.keys(s), scope, shards) for s in range(steps)])
    if not has.any():
        raise DataError(
            f"{dataset.name}: no query meets a negative: {_why(config, dataset, scope)}"
        )
    if has.all():
        return []
    return [f"{1 - has.mean():.1%} of queries meet no negative in their batch and teach nothing"]


def _why(config: Config, dataset: PairDataset, scope: str) -> str:
    corpus, size = dataset.corpus, config.data.batch_size
    if scope == "own":
        return (
            "with config.pair_loss.negatives_from='own' only an example's hard negatives are, and "
            "the examples have none; add some, or set 'batch'"
        )
    if corpus.label is not None and len(np.unique(corpus.label)) == 1:
        return (
            "all examples have one label, so each document is a positive of each query; leave the "
            f"label out with config.data.ignored_fields=('label',){_again(dataset)}, or give "
            "groups different labels"
        )
    if size == 1:
        return "a batch has one query and its positive; raise config.data.batch_size"
    if scope == "shard":
        return (
            "with config.pair_loss.negatives_from='shard' a device's own examples are, and it has "
            "one; raise config.data.batch_size, or set 'batch'"
        )
    return (
        "all documents of a batch are positives of all its queries; add examples with other "
        "positives, or hard negatives"
    )


def _has_negative(pairs: Pairs, scope: str, shards: int) -> np.ndarray:
    """Whether each of some queries of the batch has a negative, bool of their number."""
    if scope == "own":
        return pairs.valid[:, 1:].any(axis=1)
    parts = shards if scope == "shard" else 1
    found = []
    for part in range(parts):
        rows = slice(part * len(pairs.valid) // parts, (part + 1) * len(pairs.valid) // parts)
        local: Any = jax.tree.map(lambda x, rows=rows: x[rows], pairs)
        keys, index = positives.index_positives(local)
        some = jax.tree.map(lambda x: x[:_QUERIES], keys)
        negative, _ = positives.candidates(some, keys, index)
        found.append(np.asarray(negative).any(axis=(1, 2)))
    return np.concatenate(found)
