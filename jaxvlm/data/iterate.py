"""Iterating over batches: ahead of the step, and from where a checkpoint stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.types import Batch, Pairs


class TrainBatches:
    """An iterator of (batch, what stands in it) that knows which step comes next."""

    def __init__(
        self,
        source: Any,
        step: int,
        fingerprint: dict[str, Any],
        good: Callable[[int, Any], Any] = lambda step, made: made,
    ):
        """Wrap a grain iterator whose next element is ``step``'s; what is taken is the ``good`` of
        it.
        """
        self._source, self.step, self._fingerprint = iter(source), step, fingerprint
        self._good = good

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> tuple[Any, Any]:
        batch = self._good(self.step, next(self._source))
        self.step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the next step, and what the data was; JSON-able."""
        return {"step": self.step, "fingerprint": self._fingerprint}

    def close(self) -> None:
        """Stop reading ahead."""
        self._source.close()


def resume_step(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> int:
    """The step that a saved iterator goes on with.

    Args:
        state: what :meth:`TrainBatches.state` gave.
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
    if changed:
        raise DataError(
            f"data: changed since the checkpoint: {', '.join(changed)}; set it back, or"
            " start a new workdir with --config.init_from=OLD_WORKDIR"
        )
    return int(state["step"])


def ahead(
    load: Callable[[int], tuple[Batch | Pairs | np.ndarray, Any]],
    start: int,
    stop: int,
    config: DataConfig,
) -> Any:
    """``load`` of each number in turn, in threads that read ahead."""
    import grain  # a second to import; nothing but iterating needs it

    options = grain.ReadOptions(
        num_threads=max(1, config.workers), prefetch_buffer_size=max(1, config.prefetch)
    )
    return grain.MapDataset.range(start, stop).map(load).to_iter_dataset(options)
