"""Exact match of greedy answers, scored without generating them.

Greedy decoding gives exactly the reference answer if and only if, with the reference as input, the
argmax at every answer position (including its end token) is the reference token. So one forward
pass scores all answers of a packed batch. A record of several turns counts once, as correct if
every turn is; later turns see the reference's earlier answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxvlm.types import Batch

Scores = Callable[[Batch], tuple[Any, ...]]
"""Maps a process's part of a batch to numpy ``(nll, hit, weight)``, each f32[sequences, T], where
position t scores token t + 1."""


def answers(
    hit: np.ndarray, weight: np.ndarray, segment: np.ndarray
) -> dict[tuple[int, int], bool]:
    """Determines which answers of a batch are correct.

    Args:
        hit: f32[B, T], 1 where the argmax at t is token t + 1.
        weight: f32[B, T], above 0 where position t predicts a token of an answer.
        segment: i32[B, T], segment of each position of the packed sequences.

    Returns:
        (sequence, segment) -> whether every predicted token of the segment is correct.
    """
    sequences, positions = np.nonzero(weight > 0)
    correct: dict[tuple[int, int], bool] = {}
    for sequence, segment_id, ok in zip(
        sequences, segment[sequences, positions], hit[sequences, positions] > 0
    ):
        key = (int(sequence), int(segment_id))
        correct[key] = correct.get(key, True) and bool(ok)
    return correct


def evaluate(
    batches: Iterable[tuple[Batch, Any]],
    score: Scores,
    kind: Callable[[int], str],
    reduce: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    kinds: tuple[str, ...] = (),
) -> dict[str, float]:
    """Computes loss, token accuracy and exact match over a data set.

    Args:
        batches: this process's sequences and, for each, its (segment, record) pairs.
        score: function that runs one forward pass.
        kind: maps a record to its group in the report, or ``""``.
        reduce: sums an f64[n] over processes.
        kinds: all groups, in the same order on all processes.

    Returns:
        ``loss``, ``accuracy``, ``exact_match`` and ``exact_match/<kind>`` in 0..1, and
        ``answers``, their number.
    """
    names = ("", *kinds)
    right, count = np.zeros(len(names)), np.zeros(len(names))
    sums = np.zeros(3)
    for batch, meta in batches:
        nll, hit, weight = (np.asarray(x, np.float64) for x in score(batch))
        sums += [np.sum(nll * weight), np.sum((hit > 0) * weight), np.sum(weight)]
        correct = answers(hit, weight, np.asarray(batch.segment))
        for sequence, pairs in enumerate(meta):
            for segment_id, record in pairs:
                if (sequence, segment_id) not in correct:
                    continue
                groups = {0, names.index(kind(record)) if kind(record) in names else 0}
                for group in groups:
                    right[group] += correct[sequence, segment_id]
                    count[group] += 1
    right, count, sums = reduce(right), reduce(count), reduce(sums)
    return _report(names, right, count, sums)


def _report(
    names: tuple[str, ...], right: np.ndarray, count: np.ndarray, sums: np.ndarray
) -> dict[str, float]:
    weight = max(sums[2], 1e-20)
    report = {"loss": sums[0] / weight, "accuracy": sums[1] / weight}
    for name, good, number in zip(names, right, count):
        report[f"exact_match/{name}" if name else "exact_match"] = good / max(number, 1.0)
    return {name: float(value) for name, value in report.items()} | {"answers": float(count[0])}
