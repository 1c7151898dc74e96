"""What evaluates a run on its way and at its end, and the page of predictions it leaves."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from jaxvlm.config import ConfigError
from jaxvlm.data.conversations.run_data import make_dataset
from jaxvlm.data.errors import DataError
from jaxvlm.inference import prediction_grid
from jaxvlm.inference.embedding_evaluator import EmbeddingEvaluator, embedding_evaluator
from jaxvlm.inference.evaluator import Evaluator, Report
from jaxvlm.inference.vlm import VLM
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.train import compiled_steps
from jaxvlm.train.cache_memory import CacheMemory
from jaxvlm.train.metrics import MetricWriter
from jaxvlm.train.progress import Progress
from jaxvlm.trainer.callbacks.evaluation import EvaluationCallback
from jaxvlm.trainer.run import Run
from jaxvlm.types import TrainState

AnyEvaluator = Evaluator | EmbeddingEvaluator


def make_evaluator(run: Run) -> AnyEvaluator | None:
    """What evaluates the run on ``config.data.eval``, or ``None`` where that names no data.

    Raises:
        ConfigError: ``config.checkpoint.metric`` is not among its metrics.
        DataError: the data can't be used.
    """
    config = run.config
    if not config.data.eval:
        return None
    evaluator: AnyEvaluator
    if trains_embeddings(config):
        collator = run.dataset.queries.collator
        evaluator = embedding_evaluator(config, run.model, collator)
    else:
        dataset = make_dataset(config, config.data.eval, run.tokenizer, run.image_format)
        evaluator = Evaluator(run.model, dataset, config.data.batch_size)
    metric = config.checkpoint.metric
    if metric not in evaluator.metrics:  # now, not after hours
        known = ", ".join(evaluator.metrics)
        raise ConfigError(f"config.checkpoint.metric={metric!r} is not evaluated; known: {known}")
    return evaluator


def within_memory(
    evaluator: AnyEvaluator, run: Run, memory: CacheMemory | None
) -> Callable[[TrainState, bool], Report]:
    """Evaluations that evict the visual-token cache where they are short of device memory.

    Args:
        evaluator: of the run.
        run: of it.
        memory: the cache's memory on the devices; ``None``: there is no cache.
    """
    config, training = run.config, run.training

    def evaluate(state: TrainState, blind: bool) -> Report:
        if memory and config.cache.evict_for_eval:
            memory.evict(state)
        while True:
            try:
                return evaluator.report(training.params(state), config.eval_records, blind)
            except jax.errors.JaxRuntimeError as error:
                one = jax.process_count() == 1  # others would not know that this one begins again
                if memory is None or not (
                    one and compiled_steps.is_out_of_memory(error) and memory.evict(state)
                ):
                    raise
            # Out here, where the error holds nothing of what was tried in memory.
            memory.say("an evaluation is short of memory: once more, with the cache evicted")

    return evaluate


def callback(
    run: Run,
    evaluator: AnyEvaluator | None,
    memory: CacheMemory | None,
    writer: MetricWriter,
    progress: Progress,
    extra: dict[str, Any],
) -> EvaluationCallback | None:
    """The callback that evaluates the run on its way; ``None`` without evaluation data."""
    if evaluator is None:
        return None
    evaluate = within_memory(evaluator, run, memory)
    return EvaluationCallback(evaluate, run.config, run.steps, writer, progress, extra)


def draw_predictions(
    run: Run,
    state: TrainState,
    evaluator: AnyEvaluator,
    path: pathlib.Path,
    writer: MetricWriter,
    log: Callable[[str], None],
) -> None:
    """Draw the prediction grid; a failure must not cost a finished run its result.

    Args:
        run: that has ended.
        state: its last state.
        evaluator: of its evaluation data.
        path: PNG to write.
        writer: shows the grid in the trackers too.
        log: prints a line.
    """
    try:
        if isinstance(evaluator, EmbeddingEvaluator):
            drawn, why = evaluator.write_prediction_grid(path), "nothing was evaluated"
        else:
            model = run.with_weights(state)
            assert isinstance(model, VLM)
            drawn = prediction_grid.write_prediction_grid(
                model.short_answers, evaluator.dataset, path
            )
            why = "no record of one image and one question"
        if not drawn:
            log(f"no prediction grid: {why}")
            return
        if not jax.process_index():
            writer.images(run.steps, "eval/prediction_grid", prediction_grid.pixels(path))
        log(f"prediction grid: {path}")
    except (OSError, DataError) as error:
        log(f"no prediction grid: {error}")
