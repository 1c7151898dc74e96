"""Orbax's checkpoint manager, for processes that share a folder, and for one alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp


def open_together(
    folder: os.PathLike[str],
    preserved: Callable[[list[int]], Collection[int | None]] | None = None,
) -> ocp.CheckpointManager:
    """The manager of processes that write to one folder.

    Args:
        folder: of the checkpoints.
        preserved: of steps, oldest first, those that are not deleted when another one is saved;
            ``None``: all, and of an object store Orbax removes what is partial.
    """
    return _open(
        folder,
        ocp.options.MultiprocessingOptions(),
        ocp.options.AsyncOptions(barrier_sync_fn=_wait_for_all),
        use_ocdbt=True,
        preservation_policy=_Preserve(preserved or (lambda steps: steps)),
        cleanup_tmp_directories=preserved is None,
    )


def open_alone(folder: os.PathLike[str]) -> ocp.CheckpointManager:
    """The manager of a process that writes its part to a folder of its own, which exists.

    It waits for no other process, nor does it begin to write once another one's folders are made,
    which is what Orbax's signals between threads say where processes share a folder.
    """
    return _open(
        folder,
        ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={jax.process_index()}
        ),
        ocp.options.AsyncOptions(create_directories_asynchronously=False),
        use_ocdbt=False,
        preservation_policy=_Preserve(lambda steps: steps),
        create=False,
    )


def _open(
    folder: os.PathLike[str],
    processes: ocp.options.MultiprocessingOptions,
    threads: ocp.options.AsyncOptions,
    use_ocdbt: bool,
    **options: Any,
) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        folder,
        options=ocp.CheckpointManagerOptions(
            multiprocessing_options=processes,
            async_options=threads,
            save_root_metadata=False,
            lightweight_initialize=True,
            **options,
        ),
        item_handlers={
            "state": ocp.PyTreeCheckpointHandler(
                use_ocdbt=use_ocdbt,
                multiprocessing_options=processes,
                type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                    (jax.Array, _array_handler(processes.primary_host))
                ),
            ),
            "record": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        },
    )


def _array_handler(first: int | None) -> ocp.type_handlers.ArrayHandler:
    """Orbax's array handler, with replicas sharing a write only if each gets at least one MiB.

    Orbax's default splits every array, down to a scale of 64 numbers, into one slice per replica.
    Each slice is a dispatch: half a second for a model of 8,000 parameters on eight devices.
    This handler also drops Orbax's files about special array types (typed keys); a state has none.
    """
    return ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=1 << 20, primary_host=first
    )


def _wait_for_all(*, key: str, timeout_ms: int) -> None:
    """The barrier of Orbax's threads, which they also come to with an error.

    Then the others are at another one, and all would wait for 20 minutes: so the error is raised.
    """
    if error := sys.exception():
        raise error
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


class _Preserve(ocp.checkpoint_managers.PreservationPolicy):
    """The preservation policy by which Orbax decides, at each save, which steps to keep."""

    def __init__(self, preserved: Callable[[list[int]], Collection[int | None]]):
        self._preserved = preserved

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which of them are kept."""
        kept = self._preserved(sorted(info.step for info in checkpoints))
        return [info.step in kept for info in checkpoints]
