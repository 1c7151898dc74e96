"""Reads checkpoints: lists them, verifies them, and places their arrays on any mesh."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxvlm.checkpoint import digest, manifest, run_record, staging
from jaxvlm.checkpoint.manifest import CheckpointError, Leaf, Manifest
from jaxvlm.checkpoint.run_record import is_url
from jaxvlm.stores import store_requests
from jaxvlm.stores.errors import StoreError, error_line

_log = logging.getLogger(__name__)

SelectArrays = Callable[[Mapping[str, Leaf]], dict[str, Any]]
"""Maps a checkpoint's table to the arrays to read: saved name -> ShapeDtypeStruct."""


def try_read(
    step_folder: epath.Path, select: SelectArrays
) -> tuple[dict[str, jax.Array], Manifest] | str:
    """Reads the arrays that ``select`` wants and the manifest, or says in one line what is damaged.

    All processes must call it, and all get the same kind of result. What comes from an object store
    damaged is read again: a short answer is no damage of what it holds.

    Raises:
        StructureError: raised by ``select``.
        StoreError: an object store does not answer.
    """
    found = _try_read(step_folder, select)
    if not is_url(step_folder):
        return found
    begun = time.monotonic()
    for pause in itertools.chain(manifest.PAUSES, itertools.repeat(manifest.PAUSES[-1])):
        if not isinstance(found, str):
            break
        passes = _in_any(isinstance(found, _Silence))
        limit = store_requests.DEADLINE if passes else sum(manifest.PAUSES)
        if _in_any(time.monotonic() - begun > limit):
            if passes:
                raise StoreError(
                    f"{step_folder} can't be read for {store_requests.DEADLINE:.0f} s: {found}; "
                    "nothing was changed: start again when it can",
                    passes=True,
                )
            break
        time.sleep(pause)
        found = _try_read(step_folder, select)
    return found


class _Silence(str):
    """A line on an object store that did not answer, or refused: it says nothing of its files."""


def _in_any(value: bool) -> bool:
    """Whether it is so in any process."""
    if jax.process_count() == 1:
        return value
    return bool(np.any(multihost_utils.process_allgather(np.asarray(value))))


def _try_read(
    step_folder: epath.Path, select: SelectArrays
) -> tuple[dict[str, jax.Array], Manifest] | str:
    saved = _agreed(lambda: manifest.read(step_folder))
    if isinstance(saved, str):
        return saved
    wanted = {name: _placed(leaf) for name, leaf in select(saved.leaves).items()}
    arrays = _agreed(lambda: _read_arrays(step_folder / "state", wanted))
    if isinstance(arrays, str):
        return arrays
    values = digest.digests(list(arrays.values()))
    damaged = [name for name, value in zip(arrays, values) if saved.leaves[name].digest != value]
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        return f"the bits of {damaged[0]}{more} are not those that were written"
    return arrays, saved


def restore_params(
    folder: str | Path,
    abstract_params: dict[str, Any],
    which: str = "latest",
    metric: str = "",
    mode: str = "max",
    on_warning: Callable[[str], None] = _log.warning,
) -> dict[str, Any]:
    """Restores the weights alone, in one flat dict, whether they were saved as trainable or frozen.

    It never changes the folder, so a run may be writing to it.

    Args:
        folder: the folder of a ``Checkpointer``.
        abstract_params: name -> ShapeDtypeStruct with the wanted sharding; floats are cast to its
            dtype.
        which: ``latest``, or ``best`` by ``metric`` (the latest if no checkpoint has the metric).
        metric: metric that decides which is ``best``.
        mode: ``max`` or ``min``, used with ``best``.
        on_warning: called with one line for each damaged checkpoint that is skipped.

    Returns:
        name -> array, for each name of ``abstract_params``.

    Raises:
        StructureError: an array is missing from the checkpoint, its shape differs, or one is floats
            and the other is not.
        CheckpointError: there is no checkpoint, all are damaged, or a value is NaN or infinite.
        ValueError: ``which`` or ``mode`` is unknown.
    """
    root = epath.Path(folder if is_url(folder) else os.path.abspath(folder))
    failures: list[str] = []
    for step in _by_preference(root, which, metric, manifest.sign(mode)):
        step_folder = root / str(step)
        names: dict[str, str] = {}  # saved name -> its name in abstract_params

        def select(
            table: Mapping[str, Leaf], step_folder=step_folder, names=names
        ) -> dict[str, Any]:
            prefixes = {
                name: "frozen" if f"frozen/{name}" in table else "params"
                for name in abstract_params
            }
            names.update({f"{prefixes[name]}/{name}": name for name in abstract_params})
            wanted = {full: abstract_params[name] for full, name in names.items()}
            wanted = manifest.as_saved(table, wanted)
            manifest.check_structure(table, wanted, str(step_folder), partial=True)
            return wanted

        result = try_read(step_folder, select)
        if isinstance(result, str):
            failures.append(f"{step_folder} is damaged ({result})")
            on_warning(failures[-1])
            continue
        params = cast({names[full]: array for full, array in result[0].items()}, abstract_params)
        for name, array in params.items():
            if not all(
                digest.is_finite(np.asarray(shard.data)) for shard in array.addressable_shards
            ):
                raise CheckpointError(
                    f"{step_folder}: {name} has values that are NaN or infinite; use an earlier "
                    "checkpoint"
                )
        return params
    raise CheckpointError(f"no usable checkpoint in {root}: {'; '.join(failures) or 'it has none'}")


def saved_params(folder: str | Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the weights in the newest checkpoint whose manifest can be read.

    Args:
        folder: the folder of a ``Checkpointer``.

    Returns:
        name -> shape and dtype, whether it was saved as trainable or frozen; {} if there is no
        checkpoint.
    """
    root = epath.Path(folder)
    for step in reversed(run_record.committed_steps(root)):
        try:
            leaves = manifest.read_retried(root / str(step)).leaves
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged; reported when it is restored
        split = ((name.partition("/"), leaf) for name, leaf in leaves.items())
        return {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for (kind, _, path), leaf in split
            if kind in ("params", "frozen")
        }
    return {}


def cast(arrays: Mapping[str, jax.Array], wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Cast arrays to the wanted dtypes where they differ; each keeps its sharding."""

    def one(x: jax.Array, dtype: Any) -> jax.Array:
        if x.dtype == dtype:
            return x
        return jax.jit(lambda x: x.astype(dtype), out_shardings=x.sharding)(x)

    return {name: one(x, wanted[name].dtype) for name, x in arrays.items()}


def _by_preference(root: epath.Path, which: str, metric: str, better: int) -> list[int]:
    """Committed steps, the preferred one first."""
    if which not in ("latest", "best"):
        raise ValueError(f"which is {which!r}; use latest or best")
    steps = run_record.committed_steps(root)
    values: Mapping[int, float] = {}
    if which == "best":
        values = manifest.comparable(dict(manifest.scores(root, steps, metric)))
    return sorted(
        steps, key=lambda s: (better * values.get(s, -better * math.inf), s), reverse=True
    )


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """``leaf`` with a sharding: the first device where it has none."""
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _read_arrays(folder: epath.Path, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    if not wanted:
        return {}
    # The handler is used directly: a manager would wait for all processes after each read,
    # forever if one of them failed.
    with staging.fetched(folder, wanted) as local:
        arrays = ocp.PyTreeCheckpointHandler().restore(
            local,
            args=ocp.args.PyTreeRestore(
                item=wanted,
                restore_args={
                    name: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype, strict=True)
                    for name, x in wanted.items()
                },
                partial_restore=True,
            ),
        )
        arrays = {name: jax.block_until_ready(arrays[name]) for name in wanted}
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):  # a partial read returns a missing array so
            raise ValueError(f"{name} is missing")
        if (array.shape, array.dtype) != (wanted[name].shape, wanted[name].dtype):
            raise ValueError(f"{name} was read as {array.dtype}{list(array.shape)}")
    return arrays


def _agreed(read: Callable[[], Any]) -> Any:
    """Calls ``read``; returns its result, or one line on the failure if any process failed.

    Storage libraries raise many kinds of errors on damaged bytes, so every exception counts.
    """
    value, problem = None, ""
    with _silence_abandoned_reads():
        try:
            value = read()
        except Exception as error:
            problem = error_line(error)
            if store_requests.passes(error) or store_requests.refuses(error):
                problem = _Silence(problem)
        if problem:
            time.sleep(0.2)  # lets the reads that run in parallel with the failed one end
            gc.collect()
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.asarray(bool(problem)))
        if np.any(failed) and not problem:
            problem = f"process {int(np.argmax(failed))} could not read it"
    return problem or value


@contextlib.contextmanager
def _silence_abandoned_reads() -> Iterator[None]:
    """Silences the unraisable errors of abandoned reads; each would print a page."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        yield
    finally:
        sys.unraisablehook = hook
