"""Exact match of greedy answers, scored without generating them.

Greedy decoding gives exactly the reference answer if and only if, with the reference fed in,
the argmax at every answer place (its end token included) is the reference token. So one
forward pass scores all answers of a packed batch. A record of several turns counts once, as right
where every turn is, later ones with the reference's earlier answers before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxvlm.types import Batch

Scores = Callable[[Batch], tuple[Any, ...]]
"""Local Batch rows -> numpy ``(nll, hit, weight)``, each f32[rows, T], place t scoring t + 1."""


def answers(
    hit: np.ndarray, weight: np.ndarray, segment: np.ndarray
) -> dict[tuple[int, int], bool]:
    """Whether each answer of a batch is right.

    Args:
        hit: f32[B, T], 1 where the argmax at t is token t + 1.
        weight: f32[B, T], above 0 where place t predicts a part of an answer.
        segment: i32[B, T].

    Returns:
        (row, segment) -> every predicted token of the segment is right.
    """
    rows, places = np.nonzero(weight > 0)
    found: dict[tuple[int, int], bool] = {}
    for row, segment_id, ok in zip(rows, segment[rows, places], hit[rows, places] > 0):
        key = (int(row), int(segment_id))
        found[key] = found.get(key, True) and bool(ok)
    return found


def evaluate(
    batches: Iterable[tuple[Batch, Any]],
    score: Scores,
    kind: Callable[[int], str],
    reduce: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    kinds: tuple[str, ...] = (),
) -> dict[str, float]:
    """Loss, token accuracy and exact match over a data set.

    Args:
        batches: this process's rows and, for each row, its (segment, record) pairs.
        score: one forward pass.
        kind: record -> its group in the report, or ``""``.
        reduce: sums an f64[n] over processes.
        kinds: all groups, in one order for all processes.

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
        found = answers(hit, weight, np.asarray(batch.segment))
        for row, pairs in enumerate(meta):
            for segment_id, record in pairs:
                if (row, segment_id) not in found:
                    continue
                groups = {0, names.index(kind(record)) if kind(record) in names else 0}
                for group in groups:
                    right[group] += found[row, segment_id]
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
