"""Callbacks: hooks around train steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxvlm.types import Batch, Pairs, TrainState


class StepBatch(NamedTuple):
    """A batch as the step takes it, and as it was made."""

    arrays: Batch | Pairs
    """The global batch, on the devices."""
    local: Batch | Pairs
    """This process's rows of it, NumPy, with the visual tokens that the host cache holds."""
    given: Batch | Pairs
    """These rows before the host cache filled them in."""


@dataclasses.dataclass
class CheckpointRecord:
    """What is saved with the arrays of one checkpoint; callbacks add to it."""

    extra: dict[str, Any]
    """JSON-able; ``data`` is the iterator's state after the checkpoint's step, ``unlogged`` the
    metrics of the steps since the last log line."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the evaluation at this step; they decide which checkpoint is the best."""
    written: bool = False
    """Whether the checkpoint is being written."""
    is_awaited: bool = False
    """Whether the run waits until the checkpoint is complete."""


class Exchanged(NamedTuple):
    """What an exchange with other workers made of a run's state."""

    state: TrainState
    ended: str = ""
    """Why the run ends: ``done``, where the state is its last; or ``preempted``, where the exchange
    was left, and the next start takes the steps since the last checkpoint again. "": it goes on."""
    saves: bool = True
    """Whether a checkpoint follows."""


class Callback:
    """Hooks around train steps; each does nothing unless a callback overrides it."""

    is_federated = False
    """Whether the callback makes the run a site of a federation (``config.federate``)."""
    saves_start = False
    """Whether a new run saves a checkpoint before its first step."""

    def on_begin(self, step: int, state: TrainState, extra: Mapping[str, Any]) -> TrainState:
        """Called before the first step of a process; returns the state to go on with.

        Args:
            step: the steps taken so far.
            state: the train state after them.
            extra: what was saved with the checkpoint that the run resumes from; {} at step 0.
        """
        return state

    def on_dispatch(self, batch: StepBatch, metrics: dict[str, Any]) -> None:
        """Called when a step was dispatched; must remove non-scalars from ``metrics``."""

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        """Called when a step's results are ready; may remove ``metrics`` that are not logged."""

    def on_bad_step(self, step: int, what: str) -> None:
        """Called when an update was skipped, because the loss or a gradient is not finite."""

    def exchanges(self, step: int) -> bool:
        """Whether :meth:`exchange` changes the state after this step."""
        return False

    def exchange(self, step: int, state: TrainState) -> Exchanged:
        """Called after a step that :meth:`exchanges`, once its metrics are read."""
        return Exchanged(state)

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """Called every ``log_every`` steps with means since the last call and step times.

        Callbacks may add to ``metrics`` for the callbacks after them.
        """

    def on_evaluate(self, step: int, state: TrainState) -> bool:
        """Called at each evaluation, the last step's included; True stops the run early."""
        return False

    def on_save(self, step: int, state: TrainState, record: CheckpointRecord) -> None:
        """Called at each checkpoint: adds to ``record``, or writes it."""

    def after_save(self, step: int, state: TrainState, record: CheckpointRecord) -> None:
        """Called after every callback's :meth:`on_save`."""

    def should_stop(self, step: int) -> bool:
        """Called after every step; True saves a checkpoint and ends the process's run."""
        return False

    def on_end(self, state: TrainState, result: dict[str, Any]) -> None:
        """Called when the run has ended, not failed; may add to the ``result`` of ``fit``."""


class CallbackList(Callback):
    """Calls each of several callbacks, in their order; a ``None`` is one that a run has not."""

    def __init__(self, callbacks: Sequence[Callback | None]):
        self.callbacks = [callback for callback in callbacks if callback is not None]
        self.saves_start = any(callback.saves_start for callback in self.callbacks)

    def on_begin(self, step: int, state: TrainState, extra: Mapping[str, Any]) -> TrainState:
        """The state after each of them has seen it."""
        for callback in self.callbacks:
            state = callback.on_begin(step, state, extra)
        return state

    def on_dispatch(self, batch: StepBatch, metrics: dict[str, Any]) -> None:
        """See :class:`Callback`."""
        for callback in self.callbacks:
            callback.on_dispatch(batch, metrics)

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        """See :class:`Callback`."""
        for callback in self.callbacks:
            callback.on_step_end(step, metrics)

    def on_bad_step(self, step: int, what: str) -> None:
        """See :class:`Callback`."""
        for callback in self.callbacks:
            callback.on_bad_step(step, what)

    def exchanges(self, step: int) -> bool:
        """Whether any of them changes the state after this step."""
        return any(callback.exchanges(step) for callback in self.callbacks)

    def exchange(self, step: int, state: TrainState) -> Exchanged:
        """What those that exchange made of the state, one after another."""
        result = Exchanged(state, saves=False)
        for callback in self.callbacks:
            if callback.exchanges(step) and result.ended != "preempted":
                saves, result = result.saves, callback.exchange(step, result.state)
                result = result._replace(saves=saves or result.saves)
        return result

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """See :class:`Callback`."""
        for callback in self.callbacks:
            callback.on_log(step, metrics)

    def on_evaluate(self, step: int, state: TrainState) -> bool:
        """Whether any of them stops the run."""
        stops = [callback.on_evaluate(step, state) for callback in self.callbacks]
        return any(stops)

    def save(self, step: int, state: TrainState, extra: dict[str, Any]) -> None:
        """Save a checkpoint.

        Args:
            step: the steps taken so far.
            state: the train state after them.
            extra: what the loop saves with it; see :class:`CheckpointRecord`.
        """
        record = CheckpointRecord(dict(extra))
        for callback in self.callbacks:
            callback.on_save(step, state, record)
        for callback in self.callbacks:
            callback.after_save(step, state, record)

    def should_stop(self, step: int) -> bool:
        """Whether any of them stops the run; all are called, as processes synchronize in them."""
        stops = [callback.should_stop(step) for callback in self.callbacks]
        return any(stops)

    def on_end(self, state: TrainState, result: dict[str, Any]) -> None:
        """See :class:`Callback`."""
        for callback in self.callbacks:
            callback.on_end(state, result)
