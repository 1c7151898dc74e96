"""Runs the trials of a sweep, some at a time, until each is done, has failed or was stopped."""

from __future__ import annotations

import collections
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxvlm.sweep.local import DONE, FAILED, LOST, STOPPED, UNKNOWN, Ended, Launcher
from jaxvlm.sweep.trial import Trial, read_record, write_record

MAX_LOST = 3
"""How often in a row a trial that lost a peer is tried again without a new checkpoint."""


class Stop:
    """Signals to stop: Ctrl-C, SIGTERM, and the end of a terminal."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Note signals instead of ending the process; those that are ignored stay so."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self.signals.append(number)


class Schedule:
    """Runs trials.

    Args:
        trials: that are asked for, in the order in which they start.
        others: trials of the folder that are not asked for any more; where one of them still runs
            it counts, and it is waited for.
        launcher: starts trials, and says how they ended.
        parallel: the number of trials that run at the same time.
        say: prints a line.
        poll_s: seconds between looks at the running trials.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        others: Sequence[Trial],
        launcher: Launcher,
        parallel: int,
        say: Callable[[str], None],
        poll_s: float = 0.2,
    ):
        self.launcher, self.parallel, self.say, self.poll_s = launcher, parallel, say, poll_s
        self.total = len(trials)
        self._asked = {trial.id for trial in trials}
        self._running: dict[str, Trial] = {}
        self._lost: collections.Counter[str] = collections.Counter()
        self._began: dict[str, int] = {}
        for trial in (*trials, *others):
            if is_done(trial):
                continue
            if launcher.find(trial):
                self._add(trial, "runs since an earlier sweep")
            elif has_open_end(trial):  # its sweep was killed
                ended = launcher.ended(trial)
                if ended is not None and ended.state in (DONE, STOPPED):
                    record_end(trial, ended)
        self._waiting = collections.deque(
            trial for trial in trials if trial.id not in self._running and not is_done(trial)
        )

    def run(self, stop: Stop) -> bool:
        """Run all trials; False if ``stop`` ended that before."""
        told = 0
        while self._running or self._waiting:
            if stop.signals and self.launcher.is_detached:
                self.say(f"{len(self._running)} jobs stay in the queue; the same command goes on")
                return False
            if len(stop.signals) > told:
                told = len(stop.signals)
                self._stop(first=told == 1)
            for trial in list(self._running.values()):
                if ended := self.launcher.ended(trial):
                    del self._running[trial.id]
                    self._end(trial, ended, bool(stop.signals))
            while self._waiting and len(self._running) < self.parallel and not stop.signals:
                trial = self._waiting.popleft()
                resumes = f"resumes at step {trial.step}" if trial.step else "starts"
                started = self.launcher.start(trial)
                self._add(trial, resumes if started else "runs since an earlier sweep")
            if self._running:
                time.sleep(self.poll_s)
            elif stop.signals:
                return False
        return not stop.signals

    def _add(self, trial: Trial, what: str) -> None:
        self._running[trial.id] = trial
        self._began[trial.id] = trial.step
        self.say(f"{trial.label} {what}")

    def _stop(self, first: bool) -> None:
        for trial in self._running.values():
            self.launcher.stop(trial)
        if first and self._running:
            self.say("stopping: the running trials save and end; another signal ends them at once")

    def _end(self, trial: Trial, ended: Ended, is_stopping: bool) -> None:
        """Record how a trial's process ended, and let it wait for another try where it gets one."""
        if ended.state in (LOST, UNKNOWN) and is_stopping:
            ended = Ended(STOPPED)
        if ended.state == LOST:
            if trial.step > self._began[trial.id]:
                self._lost[trial.id] = 0
            self._lost[trial.id] += 1
            if self._lost[trial.id] > MAX_LOST:
                times = f"lost {self._lost[trial.id]} times without a new checkpoint"
                ended = Ended(FAILED, f"{times}: {ended.line}")
        if ended.state in (LOST, UNKNOWN):
            self.say(f"{trial.label} is tried again: {ended.line}")
            if trial.id in self._asked:
                self._waiting.appendleft(trial)
            return
        record_end(trial, ended)
        line = f": {ended.line}" if ended.line else ""
        self.say(f"{trial.label} {_WORDS[ended.state]}{line}")


_WORDS = {DONE: "is done", FAILED: "failed", STOPPED: "was stopped"}


def record_end(trial: Trial, ended: Ended) -> None:
    """Write how a trial ended into its record."""
    record = read_record(trial.folder) or {}
    more = {name: record[name] for name in ("log_from", "devices") if name in record}
    write_record(trial, **more, ended=ended._asdict())


def has_open_end(trial: Trial) -> bool:
    """Whether a trial was started, and no sweep has recorded how it ended."""
    record = read_record(trial.folder)
    return record is not None and not record.get("ended")


def is_done(trial: Trial) -> bool:
    """Whether a trial's run is over, as far as is recorded."""
    return ((read_record(trial.folder) or {}).get("ended") or {}).get("state") == DONE
