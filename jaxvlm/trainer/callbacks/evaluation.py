"""Evaluates a run on its way and at its end: best score, page of predictions, the run's result."""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from jaxvlm.checkpoint import run_record
from jaxvlm.checkpoint.manifest import BEST_OF
from jaxvlm.config import Config, ConfigError
from jaxvlm.data.conversations.dataset import make_dataset
from jaxvlm.data.errors import DataError
from jaxvlm.inference import prediction_grid
from jaxvlm.inference.embedding_evaluator import EmbeddingEvaluator, embedding_evaluator
from jaxvlm.inference.evaluator import Evaluator, Report
from jaxvlm.inference.vlm import VLM
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.parallel.distributed import processes
from jaxvlm.train import program_memory
from jaxvlm.train.cache_memory import CacheMemory
from jaxvlm.train.callbacks import Callback, CheckpointRecord
from jaxvlm.train.metrics import MetricWriter
from jaxvlm.train.progress import Progress
from jaxvlm.trainer.run import Run
from jaxvlm.types import TrainState

AnyEvaluator = Evaluator | EmbeddingEvaluator
Evaluate = Callable[[TrainState, bool], Report]
"""(state, whether to run the blind control too) -> the figures."""


class EvaluationCallback(Callback):
    """Runs an evaluation, writes its metrics, and counts evaluations without improvement.

    Args:
        evaluate: evaluates a state.
        config: of the run.
        steps: of the whole run; the last evaluation runs the blind control too.
        writer: where the metrics go.
        progress: where the lines for people go.
        extra: what was saved with the checkpoint that the run resumes from.
        records: hash of the evaluation data.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        config: Config,
        steps: int,
        writer: MetricWriter,
        progress: Progress,
        extra: dict[str, Any],
        records: str = "",
    ):
        self.evaluate, self.config, self.steps = evaluate, config, steps
        self.writer, self.progress = writer, progress
        checkpoint = config.checkpoint
        self._best_of = [checkpoint.metric, checkpoint.mode, config.data.eval, records]
        before = extra.get(BEST_OF, self._best_of)
        same = before == self._best_of[: len(before)]  # older ones do not have the hash
        if not same:
            was, now = (f"{x[1]} of {x[0]} on {x[2]}" for x in (before, self._best_of))
            now = f"{now}, which has other records" if was == now else now
            progress.log(f"the best score was the {was}; it starts anew with the {now}")
        self.best: float | None = extra.get("best") if same else None
        self.not_better: int = extra.get("not_better", 0) if same else 0
        self.evaluated, self._evaluated_before = -1, extra.get("evaluated")
        self.last_report: Report | None = None
        self._unsaved: Report | None = None

    def catch_up(self, start: int, state: TrainState) -> bool:
        """Run the evaluation that a SIGTERM kept from its step.

        Args:
            start: the step that the run resumes at.
            state: the train state there.

        Returns:
            Whether the run has stopped improving, and so is over.
        """
        every = self.config.eval_every
        due = start == self.steps or (every > 0 and start % every == 0)
        if start and due and self._evaluated_before != start:
            self.on_evaluate(start, state)
        return bool(start) and self.exhausted

    @property
    def exhausted(self) -> bool:
        """Whether the last ``early_stop`` evaluations in a row were no better."""
        return bool(self.config.early_stop) and self.not_better >= self.config.early_stop

    def on_evaluate(self, step: int, state: TrainState) -> bool:
        """Evaluate; True once ``early_stop`` evaluations in a row were no better."""
        report = self.evaluate(state, step == self.steps)
        self._unsaved = self.last_report = report
        values = {f"eval/{name}": value for name, value in report.metrics.items()}
        values |= {f"eval/blind/{name}": value for name, value in report.blind.items()}
        self.writer.write(step, values)
        for line in report.lines():
            self.progress.log(f"step {step}: {line}")
        self.evaluated = step
        score = report.metrics[self.config.checkpoint.metric]
        sign = 1 if self.config.checkpoint.mode == "max" else -1
        better = self.best is None or sign * score > sign * self.best
        if better and math.isfinite(score):  # a NaN or an infinity is never the best
            self.best, self.not_better = score, 0
        else:
            self.not_better += 1
        if self.exhausted and not report.blind:  # this was the last one: run its control too
            self.last_report = self.evaluate(state, True)
        return self.exhausted

    def on_save(self, step: int, state: TrainState, record: CheckpointRecord) -> None:
        """The last evaluation's figures belong to the next checkpoint, and to no other."""
        if self._unsaved is not None:
            record.metrics |= self._unsaved.metrics
        self._unsaved = None
        record.extra |= {
            "best": self.best, BEST_OF: self._best_of,
            "not_better": self.not_better, "evaluated": self.evaluated,
        }  # fmt: skip


def make_evaluator(run: Run) -> AnyEvaluator | None:
    """What evaluates the run on ``config.data.eval``, or ``None`` where that names no data.

    Raises:
        ConfigError: ``config.checkpoint.metric`` is not among its metrics, or processes read
            different data.
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
        records = make_dataset(config, config.data.eval, run.tokenizer, run.image_format)
        evaluator = Evaluator(run.model, records, config.data.batch_size)
    processes.check_same("the evaluation data (config.data.eval)", _digest(evaluator, config))
    metric = config.checkpoint.metric
    if metric not in evaluator.metrics:  # now, not after hours
        known = ", ".join(evaluator.metrics)
        raise ConfigError(f"config.checkpoint.metric={metric!r} is not evaluated; known: {known}")
    return evaluator


def _digest(evaluator: AnyEvaluator, config: Config) -> str:
    """Hash of what is evaluated: records, how they are read, and the bytes of some images."""
    dataset = evaluator.dataset
    read = [dataset.fingerprint(), dataset.sample_digest(), config.eval_records]
    return hashlib.blake2b(json.dumps(read).encode(), digest_size=8).hexdigest()


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
                    one and program_memory.is_out_of_memory(error) and memory.evict(state)
                ):
                    raise
            # Out here, where the error holds nothing of what was tried in memory.
            memory.log("an evaluation is short of memory: once more, with the cache evicted")

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
    records = _digest(evaluator, run.config)
    return EvaluationCallback(evaluate, run.config, run.steps, writer, progress, extra, records)


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
        log(f"prediction grid: {run_record.shown(path)}")
    except (OSError, DataError) as error:
        log(f"no prediction grid: {error}")


def finish(
    run: Run,
    state: TrainState,
    ended: str,
    evaluator: AnyEvaluator | None,
    evaluations: EvaluationCallback | None,
    writer: MetricWriter,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Draw the predictions of a run that was not preempted.

    Args:
        run: that has ended.
        state: its last state.
        ended: why it ended.
        evaluator: of its evaluation data, if it has some.
        evaluations: the callback that ran the evaluations.
        writer: of the run's metrics.
        log: prints a line.

    Returns:
        ``step``, ``ended``, counts of skipped updates and records, and the last evaluation's
        figures.
    """
    if ended != "preempted" and evaluator is not None:
        assert run.workdir is not None
        draw_predictions(run, state, evaluator, run.workdir / "predictions.png", writer, log)
    report = evaluations.last_report if evaluations else None
    return {
        "step": int(jax.device_get(state.step)),
        "ended": ended,
        "skipped_updates": run.training.skipped(state),
        "skipped_records": len(run.dataset.problems) + len(run.dataset.skipped),
        **(report.metrics if report else {}),
        **{f"blind/{name}": value for name, value in (report.blind if report else {}).items()},
    }
