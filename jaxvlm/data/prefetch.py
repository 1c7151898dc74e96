"""Iterate over batches: prefetching ahead of the train step, and resuming from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.types import Batch, Pairs


class TrainBatches:
    """An iterator of (batch, its contents) that counts steps and can be checkpointed."""

    def __init__(
        self,
        source: Any,
        step: int,
        fingerprint: dict[str, Any],
        revalidate: Callable[[int, Any], Any] = lambda step, loaded: loaded,
    ):
        """Wrap a grain iterator.

        Args:
            source: its next element belongs to ``step``.
            step: next step.
            fingerprint: settings and data that batches are a function of; JSON-able.
            revalidate: function of a step and its prefetched element; returns the one to use.
        """
        self._source, self.step, self._fingerprint = iter(source), step, fingerprint
        self._revalidate = revalidate

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> tuple[Any, Any]:
        batch = self._revalidate(self.step, next(self._source))
        self.step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: the next step and the data's fingerprint; JSON-able."""
        return {"step": self.step, "fingerprint": self._fingerprint}

    def close(self) -> None:
        """Stop prefetching."""
        self._source.close()


def resume_step(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> int:
    """Return the step at which a saved iterator resumes.

    Args:
        state: result of :meth:`TrainBatches.state`.
        fingerprint: ``Dataset.fingerprint()`` of this run's data.

    Raises:
        DataError: the data or its settings changed, so that the run would see other batches.
    """
    old, new = state["fingerprint"], fingerprint
    changed = [
        f"{name} {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if "order_version" not in old and "order_version" in new:
        raise DataError(
            "data: this run was begun by an older jaxvlm, which put records in another order; go "
            "on with that, or start a new workdir with --config.init_from=OLD_WORKDIR"
        )
    if changed:
        raise DataError(
            f"data: changed since the checkpoint: {', '.join(changed)}; restore the old values, or"
            " start a new workdir with --config.init_from=OLD_WORKDIR"
        )
    return int(state["step"])


def prefetch(
    load: Callable[[int], tuple[Batch | Pairs | np.ndarray, Any]],
    start: int,
    stop: int,
    config: DataConfig,
) -> Any:
    """Call ``load`` on each number of ``range(start, stop)`` in order, prefetching in threads.

    Args:
        load: function of a step that returns its batch.
        start: first step.
        stop: last step, plus one.
        config: data settings; ``workers`` threads prefetch ``prefetch`` batches.

    Returns:
        A grain dataset to iterate over.
    """
    import grain  # takes a second to import; only iterating needs it

    options = grain.ReadOptions(
        num_threads=max(1, config.workers), prefetch_buffer_size=max(1, config.prefetch)
    )
    return grain.MapDataset.range(start, stop).map(load).to_iter_dataset(options)
