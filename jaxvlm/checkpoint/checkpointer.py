"""Checkpoints: asynchronous, atomic, restorable onto any mesh, and verified by digests.

Each step has one folder: ``<folder>/<step>/state`` (Orbax arrays under flat names) and
``<folder>/<step>/record`` (JSON: extra state, metrics, the table of arrays with digests).
Orbax writes to a temporary folder and renames it, so a step's folder exists only once complete.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxvlm.checkpoint import digest, manifest
from jaxvlm.checkpoint.manifest import CheckpointError, Leaf, Manifest, StructureError
from jaxvlm.checkpoint.restore import (
    cast,
    restore_params,
    try_read,
)
from jaxvlm.checkpoint.run_record import COMMITTED, committed_steps, is_url, say_saved
from jaxvlm.checkpoint.staging import Staging, check_names, is_staged
from jaxvlm.parallel.distributed.processes import barrier, from_first_process
from jaxvlm.stores.errors import StoreError, error_line
from jaxvlm.stores.object_store import RemoteFolder
from jaxvlm.stores.store_requests import GivenUp, attempt, passes, refuses, within

__all__ = ["CheckpointError", "Checkpointer", "Restored", "StructureError", "restore_params"]

_log = logging.getLogger(__name__)
_FROZEN = "frozen/"
DEADLINE = 600.0
"""Seconds that are waited for a checkpoint to be written to an object store."""


class Restored(NamedTuple):
    """The content of a restored checkpoint."""

    step: int
    state: Any
    """The saved pytree, with the requested shardings."""
    extra: dict[str, Any]
    """The JSON-able state that was saved with it (after JSON, so tuples have become lists)."""


class Checkpointer:
    """Saves and restores the checkpoints of one run; every process must make the same calls."""

    def __init__(
        self,
        folder: str | Path,
        keep: int,
        metric: str,
        mode: str,
        on_warning: Callable[[str], None] = _log.warning,
        before_save: Callable[[], None] | None = None,
    ):
        """Opens or creates ``folder`` and removes partial checkpoints that a killed run left.

        Args:
            folder: holds one subfolder per step and is shared by all processes; it may be a
                ``gs://`` or ``s3://`` URL.
            keep: number of newest checkpoints to keep, at least 1; the best is kept in addition.
            metric: name of the entry of ``metrics`` that decides which checkpoint is best.
            mode: ``max`` if a higher metric is better, ``min`` if a lower one is.
            on_warning: called with one line for each damaged or abandoned checkpoint.
            before_save: called before anything is written; it raises where that must not be.

        Raises:
            ValueError: ``keep`` is below 1 or ``mode`` is unknown.
        """
        if keep < 1:
            raise ValueError(f"checkpoint.keep is {keep}; it must be at least 1")
        local = not is_url(folder)
        # Before any other library lists the store.
        self._remote = None if local else RemoteFolder(str(folder))
        self.folder = epath.Path(Path(folder).absolute() if local else folder)
        self._before_save = before_save or (lambda: None)
        self._staging: Staging | None = None
        if self._remote is not None and is_staged(str(folder)):
            self._staging = Staging(self._remote, self._before_save)
        self._has_saved = self._is_given_up = False
        self._saving = 0  # the thread that saves, perhaps while it handles an error
        self._metric, self._sign = metric, manifest.sign(mode)
        self._warn = on_warning
        self._keep = keep
        self._done: set[int] = set()  # steps that this run wrote or restored
        self._abandoned: list[int] = []  # intact steps after the one that was restored
        self._damaged: list[int] = []
        if jax.process_index() == 0:
            # Orbax would remove them later; removing them now keeps them from every reader.
            if self._remote is not None:
                for name in self._remote.names(""):
                    if ".orbax-checkpoint-tmp" in name:
                        self._remote.remove_folder(name)
                if self._staging is not None:
                    self._staging.remove_partial()
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
                    path.rmtree()
        barrier("checkpoint-folder")

        opened = self._open_manager
        self._manager = opened() if local else attempt(f"{folder} is opened", opened)
        found = self.all_steps()
        self._known = set(found)  # steps that were there, or that this run saves
        self._scores = dict(manifest.scores(self.folder, found, metric))

    def _open_manager(self) -> ocp.CheckpointManager:
        # Where checkpoints are sent afterwards, each process writes to a folder of its own: Orbax
        # must not wait for the others, nor begin to write once another one's folders are made,
        # which is what its signals say where processes share a folder.
        staged = self._staging is not None
        processes, threads = ocp.options.MultiprocessingOptions(), ocp.options.AsyncOptions()
        if staged:
            processes.primary_host, processes.active_processes = None, {jax.process_index()}
            threads.create_directories_asynchronously = False
        else:
            threads.barrier_sync_fn = self._wait_for_all
        return ocp.CheckpointManager(
            self._staging.folder if self._staging else self.folder,
            options=ocp.CheckpointManagerOptions(
                create=not staged,
                multiprocessing_options=processes,
                async_options=threads,
                preservation_policy=_KeepNewestAndBest(self),
                cleanup_tmp_directories=self._remote is not None and not staged,
                save_root_metadata=False,
                lightweight_initialize=True,
            ),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(
                    use_ocdbt=not staged,
                    multiprocessing_options=processes,
                    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                        (jax.Array, _array_handler(processes.primary_host))
                    ),
                ),
                "record": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
            },
        )

    def _wait_for_all(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barrier, to which its threads also come with an error of theirs.

        Then the others are at another one, and all would wait for 20 minutes: the error is raised.
        """
        error = sys.exception()
        if error and threading.get_ident() != self._saving:
            raise error
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def save(
        self, step: int, state: Any, extra: dict[str, Any], metrics: dict[str, float] | None = None
    ) -> bool:
        """Starts writing ``state``; its buffers may be donated as soon as this returns.

        Args:
            step: step number, which names the checkpoint.
            state: pytree of jax.Array.
            extra: JSON-able state, the same on every process.
            metrics: evaluation metrics of ``state``; without the run's metric the checkpoint can't
                become the best.

        Returns:
            False, with nothing written, if this run already wrote or was restored from ``step``.

        Raises:
            CheckpointError: this write or the previous one failed.
            TypeError: ``extra`` is not JSON, or a leaf is not a jax.Array.
            ValueError: of ``s3://``, see :func:`jaxvlm.checkpoint.staging.check_names`.
        """
        if step in self._done:
            return False
        self._saving = threading.get_ident()
        self.wait()
        self._before_save()
        self._discard_abandoned()
        if self._has_saved:
            self._prune()
        names, leaves = manifest.names_of(state), jax.tree.leaves(state)
        for name, leaf in zip(names, leaves):
            if not isinstance(leaf, jax.Array):
                raise TypeError(f"{name} is a {type(leaf).__name__}, not a jax.Array")
        if self._staging is not None:
            check_names(dict(zip(names, leaves)))
        metrics = {name: float(value) for name, value in (metrics or {}).items()}
        leaf_digests, leaves = digest.snapshot(leaves)
        table = {
            name: Leaf(leaf.shape, str(leaf.dtype), value)
            for name, leaf, value in zip(names, leaves, leaf_digests)
        }
        record = Manifest(step, extra, metrics, table)
        document = manifest.encode(record)
        self._scores.update(manifest.score(record, self._metric))
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(dict(zip(names, leaves))),
                    record=ocp.args.JsonSave(document),
                ),
                force=True,
            )
            if self._staging is not None:
                self._staging.send(step, self._manager.wait_until_finished)
        self._done.add(step)
        self._known.add(step)
        self._has_saved = True
        return True

    def restore(self, abstract: Any, step: int | None = None) -> Restored | None:
        """Restores the newest intact checkpoint, or the one of ``step``.

        A damaged one is reported to ``on_warning`` and the one before it is tried. The first
        :meth:`save` afterwards renames damaged newer checkpoints to ``damaged-<step>`` and
        deletes intact newer ones, which belong to a continuation that this run has abandoned.

        Args:
            abstract: ShapeDtypeStructs in the structure that was saved, with the shardings that
                the restored arrays get. Frozen weights may have been saved in another dtype of
                floats, as long as no value changes.
            step: restore exactly this step.

        Returns:
            The restored checkpoint; None if there is none at all.

        Raises:
            StructureError: the checkpoint's names or shapes differ from those of ``abstract``, or
                frozen weights would be rounded to their dtype there.
            CheckpointError: every checkpoint is damaged (each is listed), or ``step`` is
                missing or damaged.
        """
        self.wait()
        steps = self.all_steps()
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no step {step}; it has {steps or 'none'}")
        wanted = dict(zip(manifest.names_of(abstract), jax.tree.leaves(abstract)))
        failures: dict[int, str] = {}
        for candidate in [step] if step is not None else reversed(steps):
            step_folder = self.folder / str(candidate)

            def select(
                table: Mapping[str, Leaf], step_folder: epath.Path = step_folder
            ) -> dict[str, Any]:
                frozen = {name: x for name, x in wanted.items() if name.startswith(_FROZEN)}
                as_saved = wanted | manifest.as_saved(table, frozen)
                manifest.check_structure(table, as_saved, str(step_folder))
                return as_saved

            result = try_read(step_folder, select)
            if isinstance(result, str):
                failures[candidate] = f"{step_folder} is damaged ({result})"
                continue
            for failure in failures.values():
                self._warn(f"{failure}; step {candidate} is used instead")
            self._damaged = sorted(failures)
            self._abandoned = [s for s in steps if s > candidate and s not in failures]
            self._done = {candidate}
            arrays, saved = self._as_wanted(result[0], wanted, str(step_folder)), result[1]
            state = jax.tree.unflatten(jax.tree.structure(abstract), list(arrays.values()))
            return Restored(saved.step, state, saved.extra)
        if failures:
            raise CheckpointError(
                f"no usable checkpoint: {'; '.join(failures.values())}. Restore the files from "
                "a copy, or start a new run in another workdir"
            )
        return None

    def _as_wanted(
        self, arrays: dict[str, jax.Array], wanted: Mapping[str, Any], checkpoint: str
    ) -> dict[str, jax.Array]:
        """Cast frozen weights to the dtype that the run holds them in, if no value changes."""
        result = cast(arrays, wanted)
        changed = [name for name, x in arrays.items() if x.dtype != wanted[name].dtype]
        if not changed:
            return result
        back = cast({name: result[name] for name in changed}, arrays)
        kept = digest.digests([arrays[name] for name in changed])
        rounded = [
            name
            for name, before, after in zip(changed, kept, digest.digests(list(back.values())))
            if before != after
        ]
        kinds = sorted({f"{arrays[n].dtype} to {wanted[n].dtype}" for n in changed})
        if rounded:
            more = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
            raise StructureError(
                f"{checkpoint}: {rounded[0]}{more} would be rounded from {kinds[0]}, which changes "
                "frozen weights in the middle of a run; set config.optim.frozen_dtype as it was, "
                "or start in a new workdir with --config.init_from=OLD_WORKDIR"
            )
        self._warn(
            f"{checkpoint}: {len(changed)} frozen arrays are converted from {', '.join(kinds)}, "
            "as config.optim.frozen_dtype says; no value changes"
        )
        return result

    def all_steps(self) -> list[int]:
        """Committed steps, oldest first; one that is still being written is not among them.

        Of an object store every process gets process 0's list: each would see another moment.
        """
        if self._remote is None or jax.process_count() == 1:
            return committed_steps(self.folder)
        return from_first_process(lambda: committed_steps(self.folder))

    def wait(self) -> None:
        """Waits until no checkpoint is being written.

        Raises:
            CheckpointError: writing failed.
        """
        with self._writing():
            if self._staging is not None:
                self._staging.wait()
            if self._remote is None:
                self._manager.wait_until_finished()
            else:
                try:
                    finished = self._manager.wait_until_finished
                    within(DEADLINE, finished, "a checkpoint is not written")
                except GivenUp:
                    self._is_given_up = True
                    raise
                if self._has_saved and not jax.process_index():
                    say_saved()

    def close(self) -> None:
        """Waits for pending writes, then stops the writer threads."""
        self._close(prune=self._has_saved)

    def _close(self, prune: bool) -> None:
        if self._is_given_up:
            return  # its threads may never end
        try:
            self.wait()
            if prune and self._remote is not None:
                self._before_save()
                self._prune()
            self._manager.close()
        finally:
            if self._staging is not None:
                self._staging.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close; after an error that error is raised, and no other process is waited for."""
        if error is None:
            self.close()
        elif self._remote is not None and isinstance(error, KeyboardInterrupt):
            return  # the store may not answer
        elif jax.process_count() == 1:
            try:
                self._close(prune=False)
            except (CheckpointError, StoreError) as second:
                error.add_note(str(second))

    def _preserved(self, steps: list[int]) -> set[int | None]:
        """Of steps, oldest first, the newest ``keep`` and the best."""
        return set(steps[-self._keep :]) | {self._best(steps)}

    def _prune(self) -> None:
        """Delete the checkpoints of a store that are not kept: Orbax deletes file by file, while
        they look complete, and decides when the newest one is not complete yet.
        """
        if self._remote is None:
            return
        if jax.process_index() == 0:
            # What another run completes that was taken over is none of this one's newest.
            steps = [s for s in committed_steps(self.folder) if s in self._known]
            steps = [s for s in steps if s not in self._damaged]
            self._delete(step for step in steps if step not in self._preserved(steps))
        barrier("checkpoints-pruned")
        attempt(f"{self.folder} is listed", self._manager.reload)

    def _delete(self, steps: Iterable[int]) -> None:
        """Delete checkpoints; in a store first the file without which they are not complete."""
        for step in steps:
            if self._remote is not None:
                self._remote.remove_folder(str(step), COMMITTED)
            else:
                (self.folder / str(step)).rmtree()

    def _set_aside(self, step: int) -> None:
        """Keep what is damaged out of the way of the step that is written again."""
        source, target = self.folder / str(step), self.folder / f"damaged-{step}"
        if self._remote is not None:
            self._remote.remove_folder(target.name)
            self._remote.move(str(step), target.name, COMMITTED)
            return
        if target.exists():
            target.rmtree()
        source.rename(target)

    def _best(self, steps: Iterable[int]) -> int | None:
        scored = manifest.comparable({s: self._scores[s] for s in steps if s in self._scores})
        return max((self._sign * value, s) for s, value in scored.items())[1] if scored else None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            direct = self._remote is not None and self._staging is None
            if direct and (passes(error) or refuses(error)):
                raise StoreError(
                    f"writing a checkpoint to {self.folder} failed: {error_line(error)}; when the "
                    "store takes it, the same command goes on from the last complete checkpoint",
                    passes(error),
                ) from error
            raise CheckpointError(
                f"writing a checkpoint to {self.folder} failed: {error_line(error)}. Check free "
                f"space and permissions{' of TMPDIR, where it lies first' if self._staging else ''}"
                "; the run resumes from the last complete checkpoint"
            ) from error

    def _discard_abandoned(self) -> None:
        """Removes the steps that an earlier run wrote after the restored one."""
        for step in self._abandoned:
            self._warn(
                f"{self.folder / str(step)} is deleted: the run continues from an earlier step"
            )
        if jax.process_index() == 0:
            for step in self._damaged:
                self._set_aside(step)
            self._delete(self._abandoned)
        if self._abandoned or self._damaged:
            for step in self._abandoned + self._damaged:
                self._scores.pop(step, None)
            self._abandoned, self._damaged = [], []
            barrier("checkpoint-set-aside")
            attempt(f"{self.folder} is listed", self._manager.reload)


def _array_handler(first: int | None) -> ocp.type_handlers.ArrayHandler:
    """Orbax's array handler, with replicas sharing a write only if each gets at least one MiB.

    Orbax's default splits every array, down to a scale of 64 numbers, into one slice per replica.
    Each slice is a dispatch: half a second for a model of 8,000 parameters on eight devices.
    This handler also drops Orbax's files about special array types (typed keys); a state has none.
    """
    return ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=1 << 20, primary_host=first
    )


class _KeepNewestAndBest(ocp.checkpoint_managers.PreservationPolicy):
    """The preservation policy by which Orbax decides, at each save, which steps to keep."""

    def __init__(self, owner: Checkpointer):
        self._owner = owner

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """True for the newest ``keep`` and for the best."""
        if self._owner._remote is not None:
            return [True] * len(checkpoints)  # see _prune
        steps = sorted(info.step for info in checkpoints)
        preserved = self._owner._preserved(steps)
        return [info.step in preserved for info in checkpoints]
