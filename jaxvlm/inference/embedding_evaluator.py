"""Evaluates runs that train embeddings: how well queries retrieve their documents."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxvlm.config import Config, ConfigError
from jaxvlm.data.errors import DataError
from jaxvlm.data.pairs.collate_prompt_items import PromptCollator
from jaxvlm.data.pairs.collate_texts import TextCollator
from jaxvlm.data.pairs.dataset import PairDataset
from jaxvlm.data.pairs.examples import never_retrieved, same_content
from jaxvlm.data.sources import pair_formats
from jaxvlm.evals import retrieval
from jaxvlm.inference.encoder import Encoder
from jaxvlm.inference.evaluator import Report
from jaxvlm.inference.retrieval import measure, quantized_precisions, retrieval_grid, tables
from jaxvlm.inference.vlm import VLM
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import local_rows, replicated, to_global
from jaxvlm.spmd.gradcache import MiniBatches, grad_cache_mini_batches, pair_runner
from jaxvlm.spmd.model import Model
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.types import Batch, Params

WHOLE: MiniBatches = (MiniBatch(), MiniBatch())


def collator_of(config: Config, tokenizer: Any, images: Any) -> Any:
    """The collator that turns a run's items into batches."""
    if config.embedder == "dual":
        return TextCollator(tokenizer, images)
    return PromptCollator(tokenizer, images, config.model.decoder.visual_mask)


def run_of(model: VLM | Encoder) -> Config | None:
    """The settings of the run that trained a model's embeddings; ``None`` if no run did."""
    config = model.run if isinstance(model, Encoder) else model.config
    return config if config is not None and trains_embeddings(config) else None


def compares_by_cosine(run: Config) -> bool:
    """Whether a run's embeddings are compared by cosine; those of one that trains tokens are."""
    return not trains_embeddings(run) or run.pair_loss.similarity == "cosine"


def evaluate(
    model: VLM | Encoder, spec: str = "", blind: bool = True, prediction_grid: str = ""
) -> Report:
    """Evaluates the model of a run on the task it was trained for.

    Args:
        model: model of a run.
        spec: data file; ``data.eval`` of the run if empty.
        blind: whether to run the control.
        prediction_grid: PNG file to draw some predictions to; "" for none.

    Raises:
        ConfigError: neither ``spec`` nor the run names a data file.
    """
    if (config := run_of(model)) is None:
        assert isinstance(model, VLM)
        return model.evaluate(spec, blind=blind, prediction_grid=prediction_grid)
    images = model.image_processor if isinstance(model, Encoder) else model.image_format
    collator = collator_of(config, model.tokenizer, images)
    evaluator = embedding_evaluator(config, model.model, collator, spec)
    report = evaluator.report(model.params, 0, blind)
    if prediction_grid:
        evaluator.write_prediction_grid(pathlib.Path(prediction_grid))
    return report


def embedding_evaluator(
    config: Config, model: Model, collator: Any, spec: str = ""
) -> EmbeddingEvaluator:
    """Builds the evaluator of a run that trains embeddings.

    Args:
        config: settings of the run.
        model: embedding model of the run.
        collator: collator of the run's items; see :func:`collator_of`.
        spec: data file; ``config.data.eval`` if empty.

    Raises:
        ConfigError: neither ``spec`` nor the run names a data file.
        DataError: the file can't be used, or has fewer than two documents.
    """
    data = dataclasses.replace(config.data, flip=False, max_shift=0)
    if not (spec := spec or data.eval):
        raise ConfigError("eval: the run has no config.data.eval; give --data=FILE")
    read = pair_formats.read(spec, data)
    dataset = PairDataset.from_config(data, collator, seed=config.seed, spec=spec, read=read)
    if len(dataset.documents.items) < 2:
        raise DataError(
            f"{spec}: the corpus has fewer than two documents; ranking needs at least 2"
        )
    if not any(dataset.relevance()):
        raise DataError(
            f"{spec}: no query has a relevant document: every pair has a score of 0 or less"
        )
    shards = batch_shards(model.mesh)
    batch_size = -(-data.batch_size // shards) * shards
    mini_batches = grad_cache_mini_batches(config.grad_cache)
    loss = config.pair_loss
    settings = retrieval.Retrieval(dims=loss.matryoshka_dims, cosine=compares_by_cosine(config))
    return EmbeddingEvaluator(model, dataset, batch_size, settings, mini_batches, loss.precisions)


class EmbeddingEvaluator:
    """Embeds all queries and documents of a data set, and measures retrieval in both directions.

    Args:
        model: embedding model.
        dataset: data set of pairs.
        batch_size: number of items per batch, over all devices.
        settings: metrics to compute.
        mini_batches: mini-batches in which queries and documents are embedded.
        precisions: precisions to quantize embeddings to, measured in addition to float32.
    """

    def __init__(
        self,
        model: Model,
        dataset: PairDataset,
        batch_size: int,
        settings: retrieval.Retrieval,
        mini_batches: MiniBatches = WHOLE,
        precisions: Sequence[str] = (),
    ):
        self.precisions = quantized_precisions(precisions)
        self.model, self.dataset, self.batch_size = model, dataset, batch_size
        self.settings = settings
        self.rows = local_rows(model.mesh, batch_size)
        self.positives = dataset.relevance()
        self.relevance = retrieval.Relevance.of(self.positives, len(dataset.documents.items))
        same = same_content(dataset.queries.items, dataset.documents.items)
        self.exclude = never_retrieved(same, self.positives)
        self._last: tuple[np.ndarray, np.ndarray] | None = None
        runner = pair_runner(model, model.shapes, mini_batches)

        def embed(params: Params, batch: Batch, column: str) -> jax.Array:
            return runner.embed(params, getattr(runner, column), batch).hidden

        everywhere = replicated(model.mesh)
        self._embed = jax.jit(embed, static_argnames="column", out_shardings=everywhere)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that may decide which checkpoint is best."""
        kinds = ("hit", "recall", "ndcg", "mrr", "map")
        return tuple(f"{kind}@{k}" for k in self.settings.ks for kind in kinds)

    def embeddings(self, params: Params, column: str) -> np.ndarray:
        """Embeds all items of ``query`` or ``document``, the same on every process.

        Returns:
            f32[items, E]; 0 where an image could not be read.
        """
        data = self.dataset.queries if column == "query" else self.dataset.documents
        count, embeddings = len(data.items), []
        for _, local in self.dataset.items(column, self.rows, self.batch_size):
            batch = to_global(self.model.mesh, local, self.batch_size)
            embeddings.append(np.asarray(self._embed(params, batch, column=column)))
        return np.concatenate(embeddings)[:count]

    def report(self, params: Params, limit: int = 0, blind: bool = True) -> Report:
        """Measures how well queries retrieve their documents, and documents their queries.

        Args:
            params: all parameters.
            limit: ignored, since the complete corpus is searched.
            blind: whether to measure a random ranking too, as a control.
        """
        start = time.perf_counter()
        self._last = self.embeddings(params, "query"), self.embeddings(params, "document")
        query, document = self._last
        settings = dataclasses.replace(self.settings, random=blind)
        mesh = self.model.mesh
        how = (settings, self.precisions, self.exclude)
        metrics = measure(query, document, self.relevance, mesh, *how)
        most = max(self.settings.ks)
        shown = {n: x for n, x in metrics.items() if "recall@" in n or n.endswith(f"ndcg@{most}")}
        shown |= {n: x for n, x in metrics.items() if "@" not in n}
        lines = tables(shown, self.settings.dims, self.precisions)
        return Report(metrics, {}, time.perf_counter() - start, lines)

    def write_prediction_grid(self, path: pathlib.Path) -> bool:
        """Draws some queries of the last report with their best documents.

        Args:
            path: PNG file to write.

        Returns:
            False, with nothing written, if there was no report.
        """
        if self._last is None:
            return False
        items = (self.dataset.queries.items, self.dataset.documents.items)
        queries, documents = zip(items, self._last, strict=True)
        how = (self.settings.cosine, self.exclude)
        retrieval_grid(queries, documents, self.positives, path, *how)
        return True
