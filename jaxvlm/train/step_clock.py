"""Step times: waiting for data, host work, and device computation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Adds up seconds by kind between two calls of :meth:`lap`.

    Args:
        step: steps taken so far.
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
        """Time the wait for the next batch, while the device is idle."""
        return self._timed("wait")

    def hide(self) -> None:
        """Do not count the current timed block, because the device was busy meanwhile."""
        self._hidden = True

    def dispatching(self) -> contextlib.AbstractContextManager[None]:
        """Time the dispatch of a step to the device."""
        return self._timed("host")

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Time the wait for the device's results."""
        return self._timed("device")

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Time compilation, evaluations and checkpoints, which are no part of a step."""
        return self._timed("paused")

    def lap(self, step: int) -> dict[str, float]:
        """Return times since the last lap: ``seconds``, ``wait_share`` and ms for each step."""
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
