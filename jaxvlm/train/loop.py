"""The training loop: takes steps, reads their metrics one step late, and calls the callbacks.

It knows a state, a step and an iterator; what they are made of is decided elsewhere. :class:`Clock`
measures where the time of a step goes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from jaxvlm.train.cache_memory import CacheMemory
from jaxvlm.train.callbacks import CallbackList, StepBatch
from jaxvlm.train.metrics import WAIT, Goodput
from jaxvlm.train.step import NO_WEIGHT, CompiledSteps
from jaxvlm.types import Batch, Pairs, TrainState


class TrainingStopped(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


@runtime_checkable
class Batches(Protocol):
    """An endless iterator of global batches that knows where it is."""

    def __iter__(self) -> Iterator[StepBatch]:
        """Itself."""
        ...

    def __next__(self) -> StepBatch:
        """The next global batch."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able; the batches after it are a function of it."""
        ...


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When things happen, in steps; 0 is never."""

    steps: int
    log_every: int
    eval_every: int
    save_every: int
    max_bad_steps: int
    profile: tuple[int, int] = (0, 0)
    profile_folder: str = ""
    profile_asked: Callable[[], bool] = lambda: False
    """Whether somebody has asked, since the last call, for a trace of the next steps."""
    profile_done: Callable[[int, int], None] = lambda first, last: None
    """Called with the first and the last step of a trace that is written."""


def train(
    state: TrainState,
    programs: CompiledSteps,
    batches: Batches,
    schedule: Schedule,
    callbacks: CallbackList,
    *,
    start: int,
    leaves: list[str],
    extra: Mapping[str, Any] = {},
    cache_memory: CacheMemory | None = None,
    goodput: Goodput | None = None,
) -> tuple[TrainState, str]:
    """Take steps ``start`` to ``schedule.steps``.

    A step's metrics are fetched after the next one is dispatched, so the device never waits
    for the host, and every step's guard is read.

    Args:
        state: after ``start`` steps.
        programs: the step; consumes its state.
        batches: positioned at batch ``start``.
        schedule: when to log, evaluate and save.
        callbacks: what happens around steps.
        start: steps taken before.
        leaves: parameter names in the order of the step's ``bad_leaf``.
        extra: what was saved with the checkpoint that the run resumes from, the steps since the
            last log line included, so that the next line's means cover them too.
        cache_memory: the device memory of the state's cache, if it has one that may be evicted.
        goodput: is told where the time goes.

    Returns:
        The last state, and why it ended: ``done``, ``preempted`` or ``no better``.

    Raises:
        TrainingStopped: too many non-finite steps in a row, or none that trained anything.
    """
    clock = Clock(start, goodput)
    window = _Window(leaves, schedule.max_bad_steps, callbacks, extra.get("unlogged"))
    pending: tuple[int, dict[str, Any]] | None = None
    state, why = _begin(clock, callbacks, start, state, extra, batches, window), "done"
    with contextlib.closing(_Profiler(schedule, start)) as profiler:
        for step in range(start + 1, schedule.steps + 1):
            profiler.before(step)
            batch = _next_batch(clock, batches, pending)
            state, metrics = _dispatch(clock, programs, callbacks, cache_memory, state, batch)
            with clock.computing():
                window.read(pending)
                pending = (step, metrics)
                if callbacks.exchanges(step):
                    window.read(pending)
                    pending = None
            with clock.paused("exchange"):
                state, ended, follows = callbacks.exchange(step, state)
            if ended == "preempted":
                return state, ended
            with clock.computing():
                last = step == schedule.steps or ended == "done"
                logs = last or _due(step, schedule.log_every)
                stop = callbacks.should_stop(step)
                evaluates = not stop and (last or _due(step, schedule.eval_every))
                saves = stop or evaluates or follows or _due(step, schedule.save_every)
                if logs or saves:
                    window.read(pending)
                    pending = None
            if logs:
                callbacks.on_log(step, window.means() | clock.lap(step))
                window.check_trained(step, is_whole_run=last and not start)
            why = "preempted" if stop else why
            record = {"data": batches.state(), "unlogged": window.state()} if saves else {}
            with clock.paused("evaluation"):
                if evaluates and _evaluated(callbacks, step, state, record) and not last:
                    why = "no better"
            if saves:
                _save(clock, callbacks, step, state, record)
            if last or why != "done":
                break
    return state, why


def _next_batch(
    clock: Clock, batches: Batches, pending: tuple[int, dict[str, Any]] | None
) -> StepBatch:
    """Wait for a batch; nothing is lost where the device is still at work on the step before."""
    with clock.waiting():
        batch = next(batches)
        if pending is not None and not pending[1]["loss"].is_ready():
            clock.hide()
        return batch


def _save(
    clock: Clock, callbacks: CallbackList, step: int, state: TrainState, record: dict[str, Any]
) -> None:
    with clock.paused("checkpoint"):
        callbacks.save(step, state, record)
    clock.note(step)


def _begin(
    clock: Clock,
    callbacks: CallbackList,
    start: int,
    state: TrainState,
    extra: Mapping[str, Any],
    batches: Batches,
    window: _Window,
) -> TrainState:
    """The state after the callbacks; saved for a new run that one made something worth keeping."""
    with clock.paused("exchange"):
        state = callbacks.on_begin(start, state, extra)
    if callbacks.saves_start and not start:
        record = {"data": batches.state(), "unlogged": window.state()}
        _save(clock, callbacks, start, state, record)
    return state


def _evaluated(
    callbacks: CallbackList, step: int, state: TrainState, extra: dict[str, Any]
) -> bool:
    """Evaluate; where that fails, save first what was trained since the last checkpoint."""
    try:
        return callbacks.on_evaluate(step, state)
    except Exception:
        if jax.process_count() == 1:  # with several, the others would not take part in it
            callbacks.save(step, state, extra)
        raise


def _dispatch(
    clock: Clock,
    programs: CompiledSteps,
    callbacks: CallbackList,
    cache_memory: CacheMemory | None,
    state: TrainState,
    batch: StepBatch,
) -> tuple[TrainState, dict[str, Any]]:
    """Start a step; its results are there when the device has computed them."""
    with clock.paused("compilation"):
        state = cache_memory.restored(state) if cache_memory else state
        programs.get(state, batch.arrays)  # compiles where the shape is new
    with clock.dispatching():
        state, metrics = _step(programs, cache_memory, state, batch.arrays)
        callbacks.on_dispatch(batch, metrics)
    return state, metrics


def _step(
    programs: CompiledSteps,
    cache_memory: CacheMemory | None,
    state: TrainState,
    batch: Batch | Pairs,
) -> tuple[TrainState, dict[str, Any]]:
    """A step; where memory is short before the state is consumed, one with less of a cache."""
    while True:
        try:
            return programs.get(state, batch)(state, batch)
        except jax.errors.JaxRuntimeError as error:
            if cache_memory is None:
                raise
            state = cache_memory.retry_smaller(state, error)


_STATE = ("sums", "maxima", "count", "steps", "untrained", "empty")


class _Window:
    """Means of metrics between two log lines, and the watch over steps that train nothing."""

    def __init__(
        self,
        leaves: list[str],
        max_bad_steps: int,
        callbacks: CallbackList,
        state: Mapping[str, Any] | None,
    ):
        self.leaves, self.max_bad_steps, self.callbacks = leaves, max_bad_steps, callbacks
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}
        self.count = 0
        self.steps, self.untrained = 0, 0
        self.empty: dict[str, int] = {}
        for name, value in (state or {}).items():
            setattr(self, name, value)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the steps since the last log line; JSON-able."""
        return {name: copy.copy(getattr(self, name)) for name in _STATE}

    def read(self, pending: tuple[int, dict[str, Any]] | None) -> None:
        """Fetch a step's metrics; waits until that step is done."""
        if pending is None:
            return
        step, metrics = pending
        values = {name: float(x) for name, x in jax.device_get(metrics).items()}
        self.callbacks.on_step_end(step, values)
        in_a_row, bad_leaf = int(values.pop("bad_in_a_row")), int(values.pop("bad_leaf"))
        self.skipped = values.pop("skipped")
        self._count_empty(values)
        if in_a_row:
            self._bad(step, in_a_row, bad_leaf, values["loss"])
            return
        self.count += 1
        for name, value in values.items():
            if name.endswith("_max"):
                self.maxima[name] = max(self.maxima.get(name, value), value)
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Means since the last call over steps that were not skipped; of ``*_max``, the largest."""
        count = max(self.count, 1)
        out = {name: value / count for name, value in self.sums.items()} | self.maxima
        self.sums, self.maxima, self.count = {}, {}, 0
        return out | {"skipped_updates": self.skipped}

    def check_trained(self, step: int, is_whole_run: bool) -> None:
        """Name terms that no step since the last call had anything for; stop if none ever had.

        Raises:
            TrainingStopped: no step so far trained anything, and these are the whole run, or as
                many as ``max_bad_steps``.
        """
        terms = [repr(term) for term, count in self.empty.items() if count == self.steps]
        self.steps, self.empty = 0, {}
        if not terms:
            return
        what = f"the loss's weight of {', '.join(terms)} is 0"
        if self.untrained > 0 and (is_whole_run or self.untrained >= self.max_bad_steps):
            raise TrainingStopped(
                f"step {step}: {what} in all of {self.untrained} steps, so that nothing was "
                "trained; look at what the loss's weights() gives for the data, or raise "
                f"config.max_bad_steps={self.max_bad_steps} if later batches have some"
            )
        self.callbacks.on_bad_step(
            step, f"{what} in every step since the last line: they had nothing to train it on"
        )

    def _count_empty(self, values: dict[str, float]) -> None:
        """Count the steps that had nothing for a term, or for any."""
        names = [name for name in values if name.startswith(NO_WEIGHT)]
        empty = {name.removeprefix(NO_WEIGHT): values.pop(name) > 0 for name in names}
        self.steps += 1
        for term in empty:
            self.empty[term] = self.empty.get(term, 0) + empty[term]
        all_empty = bool(empty) and all(empty.values())
        if self.untrained >= 0:  # -1: a step has trained something
            self.untrained = self.untrained + 1 if all_empty else -1

    def _bad(self, step: int, in_a_row: int, bad_leaf: int, loss: float) -> None:
        where = f"the gradient of {self.leaves[bad_leaf]}" if bad_leaf >= 0 else "the loss"
        what = f"{where} is not finite (loss {loss:g}); the update is skipped"
        self.callbacks.on_bad_step(step, what)
        if in_a_row >= self.max_bad_steps:
            raise TrainingStopped(
                f"step {step}: {where} is not finite, {in_a_row} steps in a row "
                f"(config.max_bad_steps={self.max_bad_steps}); lower "
                "config.optim.learning_rate, raise config.optim.warmup_steps, set "
                "config.optim.max_grad_norm, or look at the data with `jaxvlm data check "
                "FILE --config=RECIPE`"
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


TRACED_STEPS = 5
"""Steps in a trace that somebody asked for."""


class _Profiler:
    """Traces of steps: those that the schedule names, and the next ones whenever somebody asks.

    Where one is running, what comes due is traced once it has ended.
    """

    def __init__(self, schedule: Schedule, start: int):
        self.schedule = schedule
        first, end = schedule.profile
        self.planned = range(max(first, start + 1), end)
        self.end = self.last = 0
        self.is_asked = False
        self.trace = contextlib.ExitStack()

    def before(self, step: int) -> None:
        """Start or stop a trace before a step."""
        self.is_asked |= self.schedule.profile_asked()
        if step < self.end:
            self.last = step
            return
        self.trace.close()
        if step in self.planned:
            self.end = self.planned.stop
        elif self.is_asked:
            self.end, self.is_asked = step + TRACED_STEPS, False
            if step < self.planned.start < self.end:
                self.end = self.planned.start
        if step < self.end:
            self.trace.enter_context(self._traced(step))
        self.last = step

    @contextlib.contextmanager
    def _traced(self, first: int) -> Iterator[None]:
        with jax.profiler.trace(self.schedule.profile_folder):
            yield
        self.schedule.profile_done(first, self.last)

    def close(self) -> None:
        """Stop the trace that is running."""
        self.trace.close()


PAUSES = ("compilation", "exchange", "evaluation", "checkpoint")
"""What a process does between steps: causes of ``metrics.CAUSES``."""


class Clock:
    """Adds up seconds by kind, between two calls of :meth:`lap` and since the start.

    Args:
        step: steps taken so far.
        goodput: is told of them.
    """

    def __init__(self, step: int, goodput: Goodput | None = None) -> None:
        self.goodput, self.begun = goodput, time.perf_counter()
        self.all = dict.fromkeys((WAIT, *PAUSES), 0.0)
        if goodput:
            goodput.begin(step)
        self._reset(step)

    def _reset(self, step: int) -> None:
        self.last_step = step
        self.start = time.perf_counter()
        self.seconds = dict.fromkeys((WAIT, "host", "device", *PAUSES), 0.0)

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        self._hidden = False
        begin = time.perf_counter()
        try:
            yield
        finally:
            if not self._hidden:
                spent = time.perf_counter() - begin
                self.seconds[kind] += spent
                if kind in self.all:
                    self.all[kind] += spent

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Time the wait for the next batch, while the device is idle."""
        return self._timed(WAIT)

    def hide(self) -> None:
        """Do not count the current timed block, because the device was busy meanwhile."""
        self._hidden = True

    def dispatching(self) -> contextlib.AbstractContextManager[None]:
        """Time the dispatch of a step to the device."""
        return self._timed("host")

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Time the wait for the device's results."""
        return self._timed("device")

    def paused(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Time one of :data:`PAUSES`, which are no part of a step."""
        return self._timed(kind)

    def note(self, step: int) -> None:
        """Tell ``goodput`` where the time went since the start."""
        if self.goodput:
            self.goodput.write(step, time.perf_counter() - self.begun, self.all)

    def lap(self, step: int) -> dict[str, float]:
        """Return times since the last lap: ``seconds``, ``wait_share`` and ms for each step.

        Where goodput is counted, its share of the run so far too.
        """
        steps = max(1, step - self.last_step)
        paused = sum(self.seconds[kind] for kind in PAUSES)
        spent = time.perf_counter() - self.start - paused
        figures = {
            "seconds": spent,
            "wait_share": self.seconds[WAIT] / max(spent, 1e-9),
            "step_ms": 1e3 * spent / steps,
            "wait_ms": 1e3 * self.seconds[WAIT] / steps,
            "host_ms": 1e3 * self.seconds["host"] / steps,
            "device_ms": 1e3 * self.seconds["device"] / steps,
        }
        if self.goodput:
            self.note(step)
            figures["goodput"] = self.goodput.share()
        self._reset(step)
        return figures
