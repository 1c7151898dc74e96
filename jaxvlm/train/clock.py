"""Where a step's time goes: waiting for data, host work, or the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Adds up seconds by kind between two laps.

    Args:
        step: steps taken before.
    """

    def __init__(self, step: int) -> None:
        self._reset(step)

    def _reset(self, step: int) -> None:
        self.last_step = step
        self.start = time.perf_counter()
        self.seconds = {"wait": 0.0, "host": 0.0, "device": 0.0, "paused": 0.0}

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        self._hidden = False
        begin = time.perf_counter()
        try:
            yield
        finally:
            if not self._hidden:
                self.seconds[kind] += time.perf_counter() - begin

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Time until the next batch is there, where the device has nothing else to do."""
        return self._timed("wait")

    def hide(self) -> None:
        """Inside a timed block: something else went on meanwhile, so do not count it."""
        self._hidden = True

    def dispatching(self) -> contextlib.AbstractContextManager[None]:
        """Time to hand a step to the device."""
        return self._timed("host")

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Time until the device's results are there."""
        return self._timed("device")

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Time of compiling, evaluations and checkpoints, not part of a step."""
        return self._timed("paused")

    def lap(self, step: int) -> dict[str, float]:
        """Figures a step since the last lap, in seconds, and the share of time spent waiting."""
        steps = max(1, step - self.last_step)
        spent = time.perf_counter() - self.start - self.seconds["paused"]
        figures = {
            "seconds": spent,
            "wait_share": self.seconds["wait"] / max(spent, 1e-9),
            "step_ms": 1e3 * spent / steps,
            "wait_ms": 1e3 * self.seconds["wait"] / steps,
            "host_ms": 1e3 * self.seconds["host"] / steps,
            "device_ms": 1e3 * self.seconds["device"] / steps,
        }
        self._reset(step)
        return figures
