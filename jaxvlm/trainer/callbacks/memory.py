"""Compares the planner's estimate of a step with the compiled program and the measured time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxvlm.train import program_memory
from jaxvlm.train.callbacks import Callback, StepBatch
from jaxvlm.trainer import memory_estimate
from jaxvlm.trainer.run import Run
from jaxvlm.types import Batch, Pairs, TrainState


class MemoryCallback(Callback):
    """Logs the estimate at the start, and compares it with the real figures at the end.

    Args:
        run: built.
        local: this process's rows of its first batch.
        log: prints a line.
    """

    def __init__(self, run: Run, local: Batch | Pairs, log: Callable[[str], None]):
        self.run, self.log = run, log
        self.estimate = memory_estimate.estimate(run, local)
        self.step_ms: list[float] = []
        self.as_large = False
        log(self.estimate if isinstance(self.estimate, str) else self.estimate.line())

    def on_dispatch(self, batch: StepBatch, metrics: dict[str, Any]) -> None:
        """Note whether a batch is as large as the plan's."""
        if not self.as_large and not isinstance(self.estimate, str):
            self.as_large = memory_estimate.is_largest(self.estimate.setup, batch.local)

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """Remember the mean time of the steps since the last line."""
        self.step_ms.append(metrics["step_ms"])

    def on_end(self, state: TrainState, result: dict[str, Any]) -> None:
        """Add ``plan``: the predicted figures next to the real ones, ``{}`` where none were."""
        compiled = self.run.training.step.compiled.values()
        peak = max((program_memory.memory(x).get("peak", 0) for x in compiled), default=0)
        figures = memory_estimate.compare(self.estimate, peak, self.step_ms, self.as_large)
        if figures and result["ended"] != "preempted":
            self.log(memory_estimate.compare_line(figures))
        result["plan"] = figures
