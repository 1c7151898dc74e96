"""Virtual time for sites in one process: one runs at a time, the one that is furthest behind."""

from __future__ import annotations

import threading

_MOMENT = 1e-6
"""Virtual seconds that let others go first, and that no one's time shows."""


class Turns:
    """Gives threads turns in the order of their virtual times, so that runs repeat to the bit.

    Args:
        names: of the threads; of equal times, the first name in order comes first.
    """

    def __init__(self, names: list[str]):
        self._times = dict.fromkeys(names, 0.0)
        self._order = {name: i for i, name in enumerate(names)}
        self._waiting: set[str] = set()
        self._changed = threading.Condition()  # reentrant
        self.latest = 0.0
        """Virtual seconds that the furthest thread has come to."""

    def now(self) -> float:
        """Virtual seconds of the thread whose turn it is."""
        return min(self._times.values(), default=0.0)

    def take(self, name: str, seconds: float = 0.0) -> None:
        """Let a thread's time pass, and wait for its turn."""
        with self._changed:
            self._times[name] += seconds
            self.latest = max(self.latest, self._times[name])
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._first() == name)

    def meet(self, name: str) -> None:
        """Wait until every other thread has come here too, or has ended."""
        self.take(name, _MOMENT)

    def wait_for_others(self, name: str, most: float) -> None:
        """Let a thread's time pass until another one has done something, or ``most`` seconds."""
        with self._changed:
            # Threads that wait do nothing: of theirs alone, time would pass by moments for ever.
            self._waiting.add(name)
            busy = [t for other, t in self._times.items() if other not in self._waiting]
            later = min(busy, default=self._times[name] + most)
            self.take(name, min(max(later - self._times[name], 0.0) + _MOMENT, most))
            self._waiting.discard(name)

    def leave(self, name: str) -> None:
        """Take a thread out, since it has ended."""
        with self._changed:
            self._times.pop(name, None)
            self._waiting.discard(name)
            self._changed.notify_all()

    def _first(self) -> str:
        return min(self._times, key=lambda name: (self._times[name], self._order[name]), default="")
