"""Evaluates the answers of a model on a data set, over all devices."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxvlm.data.conversations.dataset import Dataset
from jaxvlm.evals.exact_match import evaluate
from jaxvlm.inference.visual_tokens import VisualTokens
from jaxvlm.losses.next_token import targets, token_scores
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import (
    batch_sharding,
    local_rows,
    owned_rows,
    sum_over_processes,
    to_global,
)
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.runners import forward_of
from jaxvlm.types import Batch, Params


@dataclasses.dataclass(frozen=True)
class Report:
    """The metrics of an evaluation."""

    metrics: dict[str, float]
    """Metric name -> value."""
    blind: dict[str, float]
    """The same metrics of the control, in which each record gets another record's image; empty
    without the control."""
    seconds: float
    """Duration of the evaluation."""
    tables: Sequence[str] = ()
    """Lines for people that replace the table of answers, such as those of retrieval."""

    def lines(self) -> list[str]:
        """Formats the metrics as a table for people."""
        if self.tables:
            return [f"evaluated in {self.seconds:.1f} s", *self.tables]
        rows = [f"{int(self.metrics['answers'])} answers in {self.seconds:.1f} s"]
        for name, value in self.metrics.items():
            if name.startswith("exact_match"):
                other = f"   blind {100 * self.blind[name]:6.2f} %" if name in self.blind else ""
                rows.append(f"  {name:<24}{100 * value:6.2f} %{other}")
        if "loss" in self.metrics:  # generated answers have none
            loss, accuracy = self.metrics["loss"], self.metrics["accuracy"]
            rows.append(f"  loss {loss:.4f}, accuracy {accuracy:.4f}")
        return rows


class Evaluator:
    """Scores a model's answers; compiles once per batch shape.

    Args:
        model: model to evaluate.
        dataset: records to evaluate on.
        batch_size: number of sequences per batch, over all devices.
        cache: of the images' visual tokens; ``None``: the model encodes all images.
    """

    def __init__(
        self,
        model: Model,
        dataset: Dataset,
        batch_size: int,
        cache: VisualTokens | None = None,
    ):
        self.model, self.dataset, self.batch_size = model, dataset, batch_size
        self.cache = cache
        self.rows = local_rows(model.mesh, batch_size)
        sharding = batch_sharding(model.mesh)
        self._apply = forward_of(model, batch_size // batch_shards(model.mesh))
        self.kinds = tuple(sorted({r.tags.get("kind", "") for r in dataset.records} - {""}))
        self._scores = jax.jit(self._forward, out_shardings=(sharding, sharding, sharding))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics in a report."""
        by_kind = (f"exact_match/{kind}" for kind in self.kinds)
        return ("loss", "accuracy", "exact_match", *by_kind, "answers")

    def _forward(self, params: Params, batch: Batch) -> Any:
        labels, weight = targets(batch)
        nll, hit = token_scores(self._apply(params, batch), labels)
        # The model can't give an answer with a word that is not in the vocabulary.
        return nll, hit * (labels != self.dataset.tokenizer.unk_id), weight

    def report(self, params: Params, limit: int = 0, blind: bool = True) -> Report:
        """Computes exact match over the data set, with and without the right images.

        Args:
            params: all parameters, including frozen ones.
            limit: maximum number of records; 0 means all.
            blind: whether to run the control with other records' images.
        """
        start = time.perf_counter()
        metrics = self._pass(params, limit, shuffled=False)
        has_images = len(self.dataset.corpus.paths) > 1
        control = self._pass(params, limit, shuffled=True) if blind and has_images else {}
        return Report(metrics, control, time.perf_counter() - start)

    def _pass(self, params: Params, limit: int, shuffled: bool) -> dict[str, float]:
        kinds = [record.tags.get("kind", "") for record in self.dataset.records]
        batches = self.dataset.eval(self.rows, self.batch_size, limit, shuffled)

        # The control resizes images of any size, whose tokens are then not those of their key.
        cache = None if shuffled and self.model.config.vision.packed else self.cache

        def score(local: Batch) -> tuple[np.ndarray, ...]:
            local = cache.complete(local) if cache else local
            outputs = self._scores(params, to_global(self.model.mesh, local, self.batch_size))
            zero = np.zeros(local.tokens.shape[1], np.float32)
            owned = [owned_rows(x) for x in outputs]
            return tuple(np.stack([rows.get(int(r), zero) for r in self.rows]) for rows in owned)

        return evaluate(
            ((batch, meta.by_sequence()) for batch, meta in batches),
            score,
            kinds.__getitem__,
            sum_over_processes,
            self.kinds,
        )
