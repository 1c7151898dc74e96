"""Outer updates of islands: when they are due, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxvlm.train.callbacks import Callback, Exchanged
from jaxvlm.train.islands import NOT_FINITE, USED, OuterReport, OuterSchedule
from jaxvlm.trainer.run import Run
from jaxvlm.types import TrainState

_WHY = {
    NOT_FINITE: "its parameters or moments are not finite",
    "": "all its updates since the last one were skipped",
}


class IslandCallback(Callback):
    """Updates the shared parameters as :class:`OuterSchedule` says.

    Args:
        run: built, with islands.
        log: prints a line.
    """

    def __init__(self, run: Run, log: Callable[[str], None]):
        assert run.training.outer is not None
        self.outer, self.log = run.config.outer, log
        fragments, overlap = self.outer.fragments, self.outer.overlap_steps
        self.due = OuterSchedule(self.outer.steps, fragments, overlap, run.steps)
        self._programs = run.training.outer()
        self._pending: list[tuple[int, OuterReport]] = []
        self._left_out = 0

    def exchanges(self, step: int) -> bool:
        """Whether an outer update is due."""
        return bool(self.due.sends(step) or self.due.receives(step))

    def exchange(self, step: int, state: TrainState) -> Exchanged:
        """Mix in what was sent before, then make the outer updates that are due."""
        self._read()
        for fragment in self.due.receives(step):
            state = self._programs.receive(state, fragment, self.outer.mixing)
        for fragment in self.due.sends(step):
            state, report = self._programs.update(state, fragment)
            self._pending.append((step, report))
            if self.outer.overlap_steps and step == self.due.last:
                state = self._programs.receive(state, fragment, 0.0)
        return Exchanged(state, saves=False)

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """Add ``islands_left_out``: how often, since the last line, one was left out."""
        self._read()
        metrics["islands_left_out"] = float(self._left_out)
        self._left_out = 0

    def on_end(self, state: TrainState, result: dict[str, Any]) -> None:
        """Add the number of outer updates without any island, and say of the last one."""
        self._read()
        result["skipped_outer_updates"] = int(jax.device_get(state.guard.skipped))

    def _read(self) -> None:
        """Say which islands the outer update before left out; waits until it is done."""
        pending, self._pending = self._pending, []
        for step, report in pending:
            self._say(step, report)

    def _say(self, step: int, report: OuterReport) -> None:
        """Name the islands that an outer update left out."""
        why = np.asarray(jax.device_get(report.why))
        for island in np.flatnonzero(why != USED):
            reason = _WHY.get(int(why[island]), _WHY[""])
            self.log(f"step {step}: island {island} is left out of the outer update: {reason}")
        self._left_out += int(np.sum(why != USED))
        if not jax.device_get(report.applied):
            self.log(
                f"step {step}: no island could be used, so the outer update is skipped; the "
                "shared parameters are those of the one before"
            )
