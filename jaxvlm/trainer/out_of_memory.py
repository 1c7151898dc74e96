"""An out-of-memory error of a run, with what fills the memory and what to change."""

from __future__ import annotations

import jax

from jaxvlm.train import program_memory
from jaxvlm.train.callbacks import StepBatch
from jaxvlm.train.loop import TrainingStopped
from jaxvlm.trainer.run import Run
from jaxvlm.types import Pairs

_ADVICE = [
    "raise config.microbatches (exact, a little slower)",
    "config.model.decoder.remat=full (about a quarter slower than dots)",
    "config.mesh.fsdp=N over more devices",
    "lower config.data.batch_size, config.data.max_length or config.data.max_patches_per_sequence",
]
_PAIR_ADVICE = [
    "lower config.grad_cache.query_mini_batch and document_mini_batch (exact, a third slower at "
    "most)",
    "config.mesh.fsdp=N over more devices",
    "lower config.data.batch_size or the lengths of config.data.pairs",
]


def explain(run: Run, batch: StepBatch | None, error: jax.errors.JaxRuntimeError) -> None:
    """Say what to do about an out-of-memory error; do nothing about others.

    Args:
        run: the run.
        batch: the batch of the step that failed.
        error: what JAX raised.

    Raises:
        TrainingStopped: device memory ran out.
    """
    if not program_memory.is_out_of_memory(error) or batch is None:
        return
    compiled = list(run.training.step.compiled.values())
    memory = program_memory.memory(compiled[-1]) if compiled else {}
    work = max(
        (n for name, n in memory.items() if name.endswith(("temporary", "program"))), default=0
    )
    text = program_memory.explain_out_of_memory(
        run.training.abstract,
        batch.arrays,
        {"activations and work space": work},
        _PAIR_ADVICE if isinstance(batch.arrays, Pairs) else _ADVICE,
    )
    from jaxvlm.trainer import memory_estimate  # the planner is loaded only where it is asked

    if better := memory_estimate.advice(run, batch.local):
        text = f"{text}. {better}"
    raise TrainingStopped(text) from error
