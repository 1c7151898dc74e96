"""Reading checkpoints: which there are, whether they are sound, and their arrays on any mesh."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxvlm.io import digest, record
from jaxvlm.io.record import CheckpointError, Leaf, Record

_log = logging.getLogger(__name__)

Choose = Callable[[Mapping[str, Leaf]], dict[str, Any]]
"""From a checkpoint's table to what to read of it: saved name -> ShapeDtypeStruct."""


def committed_steps(folder: epath.Path) -> list[int]:
    """Steps whose folders are whole, oldest first."""
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _is_committed(path))


def scores(folder: epath.Path, steps: Iterable[int], metric: str) -> Iterator[tuple[int, float]]:
    """(step, value of ``metric``) for the steps that have one that is finite."""
    for step in steps:
        try:
            saved = record.read(folder / str(step))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged; it is named when somebody restores it
        yield from score(step, saved.metrics, metric)


def score(step: int, metrics: Mapping[str, float], metric: str) -> Iterator[tuple[int, float]]:
    """(step, value), or nothing if there is none that is finite."""
    if math.isfinite(metrics.get(metric, math.nan)):
        yield step, metrics[metric]


def sign(mode: str) -> int:
    """+1 for ``max``, -1 for ``min``.

    Raises:
        ValueError: another mode.
    """
    if mode not in ("max", "min"):
        raise ValueError(f"checkpoint.mode is {mode!r}; use max or min")
    return 1 if mode == "max" else -1


def try_read(step_folder: epath.Path, choose: Choose) -> tuple[dict[str, jax.Array], Record] | str:
    """The arrays that ``choose`` asks for and the record, or one line on what is damaged.

    All processes call it and all get the same kind of answer.

    Raises:
        StructureError: from ``choose``.
    """
    saved = _agreed(lambda: record.read(step_folder))
    if isinstance(saved, str):
        return saved
    wanted = {name: _placed(leaf) for name, leaf in choose(saved.leaves).items()}
    arrays = _agreed(lambda: _read_arrays(step_folder / "state", wanted))
    if isinstance(arrays, str):
        return arrays
    values = digest.digests(list(arrays.values()))
    bad = [name for name, value in zip(arrays, values) if saved.leaves[name].digest != value]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"the bits of {bad[0]}{more} are not those that were written"
    return arrays, saved


def restore_params(
    folder: str | Path,
    abstract_params: dict[str, Any],
    which: str = "latest",
    metric: str = "",
    mode: str = "max",
    on_warning: Callable[[str], None] = _log.warning,
) -> dict[str, Any]:
    """Weights alone, trainable and frozen in one flat dict, whichever they were when saved.

    Reads without changing the folder, so a run may be writing to it.

    Args:
        folder: a ``Checkpointer``'s.
        abstract_params: name -> ShapeDtypeStruct with the sharding that is wanted.
        which: ``latest``, or ``best`` by ``metric`` (the latest where none has it).
        metric: used with ``best``.
        mode: ``max`` or ``min``, used with ``best``.
        on_warning: gets one line for each damaged checkpoint that is passed over.

    Returns:
        name -> array, for the names of ``abstract_params``.

    Raises:
        StructureError: a name is not in the checkpoint, or its shape or dtype differs.
        CheckpointError: there is no checkpoint, or all are damaged.
        ValueError: ``which`` or ``mode`` is unknown.
    """
    root = epath.Path(os.path.abspath(folder) if "://" not in str(folder) else folder)
    failures: list[str] = []
    for step in _by_preference(root, which, metric, sign(mode)):
        where = root / str(step)
        names: dict[str, str] = {}  # saved name -> its name in abstract_params

        def choose(table: Mapping[str, Leaf], where=where, names=names) -> dict[str, Any]:
            prefixes = {
                name: "frozen" if f"frozen/{name}" in table else "params"
                for name in abstract_params
            }
            names.update({f"{prefixes[name]}/{name}": name for name in abstract_params})
            wanted = {full: abstract_params[name] for full, name in names.items()}
            record.check_structure(table, wanted, str(where), partial=True)
            return wanted

        found = try_read(where, choose)
        if isinstance(found, str):
            failures.append(f"{where} is damaged ({found})")
            on_warning(failures[-1])
            continue
        return {names[full]: array for full, array in found[0].items()}
    raise CheckpointError(f"no usable checkpoint in {root}: {'; '.join(failures) or 'it has none'}")


def barrier(name: str) -> None:
    """Waits for all processes; nothing in a single one."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _by_preference(root: epath.Path, which: str, metric: str, better: int) -> list[int]:
    if which not in ("latest", "best"):
        raise ValueError(f"which is {which!r}; use latest or best")
    steps = committed_steps(root)
    values = dict(scores(root, steps, metric)) if which == "best" else {}
    return sorted(
        steps, key=lambda s: (better * values.get(s, -better * math.inf), s), reverse=True
    )


def _is_committed(path: epath.Path) -> bool:
    """A rename commits on file systems; object stores get a marker file instead."""
    if not path.name.isdigit():
        return False
    return "://" not in str(path) or (path / "commit_success.txt").exists()


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """``leaf`` with a sharding: the first device where it names none."""
    where = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _read_arrays(folder: epath.Path, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    if not wanted:
        return {}
    # The handler is used directly: a manager would wait for all processes after each read,
    # for ever if one of them failed.
    arrays = ocp.PyTreeCheckpointHandler().restore(
        folder,
        args=ocp.args.PyTreeRestore(
            item=wanted,
            restore_args={
                name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype, strict=True)
                for name, leaf in wanted.items()
            },
            partial_restore=True,
        ),
    )
    arrays = {name: jax.block_until_ready(arrays[name]) for name in wanted}
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):  # how a partial read returns what it didn't find
            raise ValueError(f"{name} is missing")
        if (array.shape, array.dtype) != (wanted[name].shape, wanted[name].dtype):
            raise ValueError(f"{name} was read as {array.dtype}{list(array.shape)}")
    return arrays


def _agreed(read: Callable[[], Any]) -> Any:
    """What ``read`` returns, or one line if it failed in any process.

    Storage libraries raise all sorts of errors on damaged bytes, so all of them count.
    """
    value, problem = None, ""
    with _quiet_leftovers():
        try:
            value = read()
        except Exception as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
        if problem:
            time.sleep(0.2)  # the reads beside the one that failed end meanwhile
            gc.collect()
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.asarray(bool(problem)))
        if np.any(failed) and not problem:
            problem = f"process {int(np.argmax(failed))} could not read it"
    return problem or value


@contextlib.contextmanager
def _quiet_leftovers() -> Iterator[None]:
    """Says nothing of the reads that a failed one left behind; each would print a page."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        yield
    finally:
        sys.unraisablehook = hook


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line of at most 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:300]
