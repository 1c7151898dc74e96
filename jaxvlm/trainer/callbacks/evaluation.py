"""Evaluates a run on its way, remembers the best score, and stops a run that no longer improves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxvlm.config import Config
from jaxvlm.inference.evaluator import Report
from jaxvlm.train.callbacks import Callback, CheckpointRecord
from jaxvlm.train.metrics import MetricWriter
from jaxvlm.train.progress import Progress
from jaxvlm.types import TrainState

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
    """

    def __init__(
        self,
        evaluate: Evaluate,
        config: Config,
        steps: int,
        writer: MetricWriter,
        progress: Progress,
        extra: dict[str, Any],
    ):
        self.evaluate, self.config, self.steps = evaluate, config, steps
        self.writer, self.progress = writer, progress
        self.best: float | None = extra.get("best")
        self.not_better: int = extra.get("not_better", 0)
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
            "best": self.best, "not_better": self.not_better, "evaluated": self.evaluated
        }  # fmt: skip
