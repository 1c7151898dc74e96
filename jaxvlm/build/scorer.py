"""Evaluation of a model on a data set, over all devices."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxvlm.build.model import Model
from jaxvlm.data.loader import Dataset
from jaxvlm.evals.exact_match import evaluate
from jaxvlm.losses.next_token import targets, token_scores
from jaxvlm.parallel.sharding import (
    batch_sharding,
    local_rows,
    owned_rows,
    sum_over_processes,
    to_global,
)
from jaxvlm.types import Batch, Params


@dataclasses.dataclass(frozen=True)
class Report:
    """An evaluation's figures."""

    metrics: dict[str, float]
    blind: dict[str, float]
    """The same with each record given another record's picture; empty where not asked for."""
    seconds: float
    tables: Sequence[str] = ()
    """Lines for people, where the figures are not those of answers."""

    def lines(self) -> list[str]:
        """A table for people."""
        if self.tables:
            return [f"evaluated in {self.seconds:.1f} s", *self.tables]
        rows = [f"{int(self.metrics['answers'])} answers in {self.seconds:.1f} s"]
        for name, value in self.metrics.items():
            if name.startswith("exact_match"):
                other = f"   blind {100 * self.blind[name]:6.2f} %" if name in self.blind else ""
                rows.append(f"  {name:<24}{100 * value:6.2f} %{other}")
        rows.append(f"  loss {self.metrics['loss']:.4f}, accuracy {self.metrics['accuracy']:.4f}")
        return rows


class Scorer:
    """Scores answers; compiles once a batch shape.

    Args:
        model: what to score.
        dataset: of which records.
        batch_size: rows at a time, over all devices.
    """

    def __init__(self, model: Model, dataset: Dataset, batch_size: int):
        self.model, self.dataset, self.batch_size = model, dataset, batch_size
        self.rows = local_rows(model.mesh, batch_size)
        sharding = batch_sharding(model.mesh)
        self.kinds = tuple(sorted({r.tags.get("kind", "") for r in dataset.records} - {""}))
        self._scores = jax.jit(self._forward, out_shardings=(sharding, sharding, sharding))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the figures that a report holds."""
        by_kind = (f"exact_match/{kind}" for kind in self.kinds)
        return ("loss", "accuracy", "exact_match", *by_kind, "answers")

    def _forward(self, params: Params, batch: Batch) -> Any:
        labels, weight = targets(batch)
        nll, hit = token_scores(self.model.apply(params, batch), labels)
        # An answer with a word that the tokenizer does not have can't be given.
        return nll, hit * (labels != self.dataset.tokenizer.unk_id), weight

    def report(self, params: Params, limit: int = 0, blind: bool = True) -> Report:
        """Exact match over the data set, and the blind control beside it.

        Args:
            params: all parameters, frozen ones too.
            limit: records at most; 0 is all.
            blind: whether to run the control.
        """
        start = time.perf_counter()
        metrics = self._pass(params, limit, shuffled=False)
        has_pictures = len(self.dataset.corpus.paths) > 1
        control = self._pass(params, limit, shuffled=True) if blind and has_pictures else {}
        return Report(metrics, control, time.perf_counter() - start)

    def _pass(self, params: Params, limit: int, shuffled: bool) -> dict[str, float]:
        kinds = [record.tags.get("kind", "") for record in self.dataset.records]
        batches = self.dataset.eval(self.rows, self.batch_size, limit, shuffled)

        def score(local: Batch) -> tuple[np.ndarray, ...]:
            outputs = self._scores(params, to_global(self.model.mesh, local, self.batch_size))
            zero = np.zeros(local.tokens.shape[1], np.float32)
            owned = [owned_rows(x) for x in outputs]
            return tuple(np.stack([rows.get(int(r), zero) for r in self.rows]) for rows in owned)

        return evaluate(
            ((batch, meta.by_row()) for batch, meta in batches),
            score,
            kinds.__getitem__,
            sum_over_processes,
            self.kinds,
        )
