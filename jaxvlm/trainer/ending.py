"""What a run leaves when it ends: its page of predictions and its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxvlm.train.metrics import MetricWriter
from jaxvlm.trainer.callbacks.evaluation import EvaluationCallback
from jaxvlm.trainer.evaluation import AnyEvaluator, draw_predictions
from jaxvlm.trainer.run import Run
from jaxvlm.types import TrainState


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
        "skipped_updates": int(jax.device_get(state.guard.skipped)),
        "skipped_records": len(run.dataset.problems) + len(run.dataset.skipped),
        **(report.metrics if report else {}),
        **{f"blind/{name}": value for name, value in (report.blind if report else {}).items()},
    }
