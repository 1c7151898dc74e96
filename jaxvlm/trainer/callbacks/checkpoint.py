"""Saves checkpoints, and ends a run whose machine is being taken away."""

from __future__ import annotations

from jaxvlm.checkpoint.checkpointer import Checkpointer
from jaxvlm.parallel.distributed import processes
from jaxvlm.train.callbacks import Callback, CheckpointRecord
from jaxvlm.trainer.training import Training
from jaxvlm.types import TrainState


class CheckpointCallback(Callback):
    """Starts writing a checkpoint whenever one is due; steps go on meanwhile.

    Args:
        checkpointer: of the workdir.
        training: says what of the state is saved.
    """

    def __init__(self, checkpointer: Checkpointer, training: Training):
        self.checkpointer, self.training = checkpointer, training

    def on_save(self, step: int, state: TrainState, record: CheckpointRecord) -> None:
        """Write the state with what the callbacks before this one added to ``record``."""
        record.written = self.checkpointer.save(
            step, self.training.kept(state), record.extra, record.metrics
        )


class PreemptionCallback(Callback):
    """Stops every process after the same step once one of them got SIGTERM."""

    def should_stop(self, step: int) -> bool:
        """Whether SIGTERM came, to any process."""
        return processes.should_stop(step)
