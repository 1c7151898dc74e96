"""Checkpoints: written in the background, whole or not at all, read onto any mesh, verified.

One folder a step: ``<folder>/<step>/state`` (Orbax arrays under flat names) and
``<folder>/<step>/record`` (JSON: extra state, metrics, the table of arrays with digests).
Orbax writes to a temporary folder and renames it, so a step's folder exists only when whole.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxvlm.io import digest, record
from jaxvlm.io.record import CheckpointError, Leaf, Record, StructureError
from jaxvlm.io.restore import (
    barrier,
    committed_steps,
    first_line,
    restore_params,
    score,
    scores,
    sign,
    try_read,
)

__all__ = ["CheckpointError", "Checkpointer", "Restored", "StructureError", "restore_params"]

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What a checkpoint held."""

    step: int
    state: Any
    """The pytree that was saved, on the shardings that were asked for."""
    extra: dict[str, Any]
    """What was saved beside it, after a round trip through JSON (tuples are lists)."""


class Checkpointer:
    """The checkpoints of one run. Every process of the run makes the same calls."""

    def __init__(
        self,
        folder: str | Path,
        keep: int,
        metric: str,
        mode: str,
        enable_async: bool = True,
        on_warning: Callable[[str], None] = _log.warning,
    ):
        """Opens (or makes) ``folder`` and removes what a killed run left half-written.

        Args:
            folder: where steps lie; shared by all processes. ``gs://`` works too.
            keep: newest checkpoints kept, at least 1; the best one is kept besides.
            metric: the entry of ``metrics`` that says which is best.
            mode: ``max`` or ``min``: which way is better.
            enable_async: write in the background.
            on_warning: gets one line for each damaged or abandoned checkpoint.

        Raises:
            ValueError: ``keep`` or ``mode`` is not one of these.
        """
        if keep < 1:
            raise ValueError(f"checkpoint.keep is {keep}; at least 1 must be kept")
        local = "://" not in str(folder)
        self.folder = epath.Path(Path(folder).absolute() if local else folder)
        self._metric, self._sign = metric, sign(mode)
        self._warn = on_warning
        self._keep = keep
        self._done: set[int] = set()  # steps that this run wrote or came from
        self._stale: list[int] = []  # healthy steps after the one that was restored
        self._damaged: list[int] = []
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Orbax would do it some time later; here no reader ever meets them.
            for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
                path.rmtree()
        barrier("checkpoint-folder")
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_KeepNewestAndBest(self),
                cleanup_tmp_directories=not local,
                enable_async_checkpointing=enable_async,
                save_root_metadata=False,
                lightweight_initialize=True,
            ),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(
                    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                        (jax.Array, _arrays())
                    )
                ),
                "record": ocp.JsonCheckpointHandler(),
            },
        )
        self._scores = dict(scores(self.folder, self.all_steps(), metric))

    def save(
        self, step: int, state: Any, extra: dict[str, Any], metrics: dict[str, float] | None = None
    ) -> bool:
        """Starts to write ``state``; its buffers may be donated as soon as this returns.

        Args:
            step: names the checkpoint.
            state: a pytree of jax.Array.
            extra: JSON-able; the same on every process.
            metrics: of this state; without the run's metric it can't become the best.

        Returns:
            False if this run already wrote, or was restored from, ``step``: nothing is done.

        Raises:
            CheckpointError: this write, or the one before it, failed.
            TypeError: ``extra`` is not JSON, or a leaf is no jax.Array.
        """
        if step in self._done:
            return False
        self.wait()
        self._set_aside()
        names, leaves = record.names_of(state), jax.tree.leaves(state)
        for name, leaf in zip(names, leaves):
            if not isinstance(leaf, jax.Array):
                raise TypeError(f"{name} is a {type(leaf).__name__}, not a jax.Array")
        metrics = {name: float(value) for name, value in (metrics or {}).items()}
        sums, leaves = _snapshot(leaves)
        table = {
            name: Leaf(leaf.shape, str(leaf.dtype), value)
            for name, leaf, value in zip(names, leaves, sums)
        }
        document = record.encode(Record(step, extra, metrics, table))
        self._scores.update(score(step, metrics, self._metric))
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(dict(zip(names, leaves))),
                    record=ocp.args.JsonSave(document),
                ),
                force=True,
            )
        self._done.add(step)
        return True

    def restore(self, abstract: Any, step: int | None = None) -> Restored | None:
        """The newest sound checkpoint, or the one of ``step``.

        A damaged one is named to ``on_warning`` and the one before it is tried. The first
        :meth:`save` afterwards renames damaged newer ones to ``damaged-<step>`` and deletes
        sound newer ones: they belong to a future that this run has left.

        Args:
            abstract: ShapeDtypeStructs in the structure that was saved; their shardings say
                where the arrays go.
            step: this one and no other.

        Returns:
            None if there is no checkpoint at all.

        Raises:
            StructureError: the checkpoint holds other names or shapes than ``abstract``.
            CheckpointError: every checkpoint is damaged (each is listed), or ``step`` is
                missing or damaged.
        """
        self.wait()
        steps = self.all_steps()
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no step {step}; it has {steps or 'none'}")
        wanted = dict(zip(record.names_of(abstract), jax.tree.leaves(abstract)))
        failures: dict[int, str] = {}
        for candidate in [step] if step is not None else reversed(steps):
            where = self.folder / str(candidate)

            def choose(table: Mapping[str, Leaf], where: epath.Path = where) -> dict[str, Any]:
                record.check_structure(table, wanted, str(where))
                return wanted

            found = try_read(where, choose)
            if isinstance(found, str):
                failures[candidate] = f"{where} is damaged ({found})"
                continue
            for failure in failures.values():
                self._warn(f"{failure}; step {candidate} is used instead")
            self._damaged = sorted(failures)
            self._stale = [s for s in steps if s > candidate and s not in failures]
            self._done = {candidate}
            arrays, saved = found
            state = jax.tree.unflatten(jax.tree.structure(abstract), list(arrays.values()))
            return Restored(saved.step, state, saved.extra)
        if failures:
            raise CheckpointError(
                f"no usable checkpoint: {'; '.join(failures.values())}. Restore the files from "
                "a copy, or start again in a new workdir"
            )
        return None

    def all_steps(self) -> list[int]:
        """Steps that are committed, oldest first (one being written is not)."""
        return committed_steps(self.folder)

    def latest_step(self) -> int | None:
        """The newest committed step."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The committed step with the best metric; None if none has one."""
        return self._best(self.all_steps())

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            CheckpointError: writing failed.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends the threads."""
        self.wait()
        self._manager.close()

    def _best(self, steps: Iterable[int]) -> int | None:
        scored = [(self._sign * self._scores[s], s) for s in steps if s in self._scores]
        return max(scored)[1] if scored else None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"writing a checkpoint to {self.folder} failed: {first_line(error)}. Check free "
                "space and permissions; the run resumes from the last whole one"
            ) from error

    def _set_aside(self) -> None:
        """Clears the way for steps that a run before this one wrote after our restore point."""
        for step in self._stale:
            self._warn(f"{self.folder / str(step)} is deleted: the run goes on from before it")
        if jax.process_index() == 0:
            for step in self._damaged:
                _rename_or_delete(self.folder / str(step), self.folder / f"damaged-{step}")
            for step in self._stale:
                (self.folder / str(step)).rmtree()
        if self._stale or self._damaged:
            for step in self._stale + self._damaged:
                self._scores.pop(step, None)
            self._stale, self._damaged = [], []
            barrier("checkpoint-set-aside")
            self._manager.reload()


def _arrays() -> ocp.type_handlers.ArrayHandler:
    """Replicas share the writing of an array where each has a MiB or more of it to write.

    Orbax's default cuts every array, down to a scale of 64 numbers, into a slice for each
    replica: a dispatch a slice, half a second for a model of 8,000 parameters on eight devices.
    Orbax's files about arrays of its own types (typed keys) go with it; a state has none.
    """
    return ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=1 << 20)


class _KeepNewestAndBest(ocp.checkpoint_managers.PreservationPolicy):
    """Orbax asks it, at each save, which of the steps stay."""

    def __init__(self, owner: Checkpointer):
        self._owner = owner

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """True for the newest ``keep`` and for the best."""
        steps = sorted(info.step for info in checkpoints)
        stay = set(steps[-self._owner._keep :]) | {self._owner._best(steps)}
        return [info.step in stay for info in checkpoints]


def _snapshot(leaves: list[jax.Array]) -> tuple[list[int], list[jax.Array]]:
    """Digests, and arrays that stay as they are while they are written.

    Orbax copies from the accelerator before ``save`` returns. On CPU its host copy may be a view
    of the device's buffer, which the next step donates: copy it ourselves.
    """
    devices: set[Any] = set().union(*(leaf.sharding.device_set for leaf in leaves))
    if any(device.platform == "cpu" for device in devices):
        return digest.digests_and_copies(leaves)
    return digest.digests(leaves), leaves


def _rename_or_delete(source: epath.Path, target: epath.Path) -> None:
    """Object stores can't rename folders."""
    if target.exists():
        target.rmtree()
    if "://" in str(source):
        source.rmtree()
    else:
        source.rename(target)
