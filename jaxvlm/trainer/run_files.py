"""A run's folder: opening it, its files that say what the run is, and where metrics go."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable

import jax

from jaxvlm.checkpoint import run_changes, run_folder, run_lock, run_record
from jaxvlm.checkpoint.checkpointer import Checkpointer
from jaxvlm.config import ConfigError, by_path
from jaxvlm.hf import exporter, pretrained
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.parallel.distributed import processes
from jaxvlm.train import loop
from jaxvlm.train.metrics import Logger, MetricWriter
from jaxvlm.train.progress import Progress
from jaxvlm.trainer import checks
from jaxvlm.trainer.run import Run

_LOGGERS = (
    *("tensorboard", "wandb_project", "mlflow_experiment", "trackio_project", "prometheus_port"),
)
"""Settings that ask for a logger besides ``metrics.jsonl``."""


def folder_of(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """The local folder of a run: itself, or a copy of what an object store holds."""
    if run_record.is_url(workdir):
        return run_folder.copied(str(workdir), "--workdir")
    return pathlib.Path(workdir)


def open_workdir(
    run: Run, workdir: pathlib.Path, stack: contextlib.ExitStack
) -> tuple[Checkpointer, list[str]]:
    """Lock the folder, and check that every process has the same settings and data.

    Args:
        run: built.
        workdir: its folder.
        stack: unlocks the folder again, once checkpoints are written.

    Returns:
        The folder's checkpointer, which ``stack`` closes, and a list that its warnings go to.
    """
    config = run.config
    if names := [name for name in _LOGGERS if getattr(config, name)]:
        from jaxvlm.train.loggers import check_installed

        check_installed(config, names)  # before anything is written
    if jax.process_count() > 1:
        for what, value in run_record.program(config).items():
            processes.check_same(what, value)
        processes.check_same("the bytes of images", run.dataset.sample_digest())
        processes.check_same("--workdir", url := run_record.url_of(workdir))
        if not url:
            processes.check_shared(workdir)
    for name, value in run_record.numeric_settings().items():
        run.log(f"{name}={value} may change results; it is recorded in config.json")
    if (workdir / "config.json").is_file() and not jax.process_index():
        for line in run_changes.changed_settings(workdir, config):
            run.log(line)
    before_save: Callable[[], None] | None = None
    if run_record.url_of(workdir):
        before_save = run_folder.open_for_run(workdir, stack).send
    elif not jax.process_index() and stack.enter_context(run_record.locked(workdir)):
        before_save = stack.enter_context(run_lock.of_folder(workdir)).check
    warnings: list[str] = []
    checkpointer = Checkpointer(
        run_record.checkpoints_of(workdir),
        config.checkpoint.keep,
        config.checkpoint.metric,
        config.checkpoint.mode,
        on_warning=warnings.append,
        before_save=before_save,
    )
    stack.enter_context(checkpointer)
    same = {"the data": run.dataset.fingerprint(), "the number of steps": run.steps}
    same |= by_path(config)
    try:
        processes.check_same("settings or data", same)
    except ConfigError:  # in all of them: the first that differs is named
        for name, value in same.items():
            processes.check_same(name, value)
        raise
    return checkpointer, warnings


def open_writer(
    run: Run, workdir: pathlib.Path, start: int, stack: contextlib.ExitStack
) -> MetricWriter:
    """Where the run's metrics go: ``metrics.jsonl``, and the loggers that the settings name."""
    loggers: list[Logger] = []
    if any(getattr(run.config, name) for name in _LOGGERS):
        from jaxvlm.train.loggers import start_loggers

        loggers = start_loggers(run.config, workdir, start or -1, run.log)
    writer = MetricWriter(workdir, start or -1, loggers, run.began)
    return stack.enter_context(contextlib.closing(writer))


def open_progress(run: Run, start: int, lines: list[str], stack: contextlib.ExitStack) -> Progress:
    """The lines for people, those that were said before it included."""
    progress = stack.enter_context(contextlib.closing(Progress(run.steps, start, name=run.name)))
    for line in lines:
        progress.log(line)
    if start < run.steps and (nothing := checks.unprofiled(run.config, run.steps, start)):
        progress.log(nothing)
    return progress


def schedule_of(run: Run) -> loop.Schedule:
    """When a run logs, evaluates, saves and profiles."""
    config, folder = run.config, (run.workdir or pathlib.Path()) / "profile"
    return loop.Schedule(
        steps=run.steps,
        log_every=config.log_every,
        eval_every=config.eval_every,
        save_every=config.checkpoint.every,
        max_bad_steps=config.max_bad_steps,
        profile=config.profile_steps,
        profile_folder=str(folder) if run.workdir else "",
        profile_asked=processes.is_trace_asked,
        profile_done=lambda first, last: run.log(
            f"steps {first} to {last} are traced in {run_record.shown(folder)}; xprof and "
            "TensorBoard show them"
        ),
    )


def write_run_files(run: Run, workdir: pathlib.Path) -> None:
    """Write ``config.json``, the tokenizer and what an export needs; process 0 alone does."""
    if jax.process_index():
        return
    workdir.mkdir(parents=True, exist_ok=True)
    is_first = not run_record.has_checkpoint(workdir)
    for part in ("", "vision", "text") if is_first else ():
        # What lies here is of a start that saved no weights, perhaps of another checkpoint.
        shutil.rmtree(workdir / part / pretrained.SAVED, ignore_errors=True)
    if run.tokenizer is not None and is_first:
        # Whole or not at all: a kill in the middle must not leave half a tokenizer.
        half = workdir / "tokenizer.tmp"
        shutil.rmtree(half, ignore_errors=True)
        run.tokenizer.save(half)
        shutil.rmtree(workdir / "tokenizer", ignore_errors=True)
        half.rename(workdir / "tokenizer")
    if run.source is not None:
        exporter.keep(run.source, workdir)
    for tower, source in (run.dual.towers if run.dual else {}).items():
        exporter.keep(source, workdir / tower)
    kind, size = run.mesh.devices.flat[0].device_kind, sum(mesh.size for mesh in run.meshes)
    own = trains_embeddings(run.config) if run.config.loss.target else None
    run_record.write_config(workdir, run.config, f"{size} x {kind}", own)
    if run_record.url_of(workdir):
        run_folder.mirror_of(workdir).send()  # a checkpoint means nothing without them
