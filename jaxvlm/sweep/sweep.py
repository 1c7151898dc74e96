"""A sweep's folder: its definition ``sweep.json``, its trials, what state they are in."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.checkpoint import run_lock, run_record
from jaxvlm.config import Config, ConfigError, json_text
from jaxvlm.sweep import gke, jobs, local, schedule, slurm
from jaxvlm.sweep import trial as trials_
from jaxvlm.sweep.definition import Row
from jaxvlm.sweep.trial import Trial

FILE = "sweep.json"
PLACES = ("local", "slurm", "gke")
Resolve = Callable[[str, Mapping[str, str]], Config]
"""(recipe, path -> a value's text) -> the settings; raises a ConfigError."""


@dataclasses.dataclass(frozen=True)
class Definition:
    """What a sweep runs, as ``sweep.json`` records it."""

    recipe: str
    """What ``--config`` is."""
    overrides: dict[str, str]
    """Path of a setting -> its value's text, of all trials."""
    rows: list[Row]
    metric: str = ""
    """Metric of the table; "": that of the recipe's checkpoints, or the loss without evaluation."""
    mode: str = ""
    """max | min; "": that of the metric above."""
    parallel: int = 1
    """Number of trials at a time."""
    devices: list[str] = dataclasses.field(default_factory=list)
    """Lists of GPUs, one for each trial at a time; []: all trials see all of them."""
    on: str = "local"
    """Where trials run, one of :data:`PLACES`."""
    launch: str = ""
    """Flags of ``jaxvlm launch`` for each trial's job, as a shell takes them."""
    folder: str = dataclasses.field(default_factory=os.getcwd)
    """Where the sweep was started, which relative paths are relative to."""
    token: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:6])
    """What ids of runs in Weights & Biases end with."""
    trials: list[Trial] = dataclasses.field(default_factory=list)
    """The trials of the rows, without their settings where they are read from the file."""


def read_definition(workdir: pathlib.Path) -> Definition:
    """Read the definition of the sweep in a folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = workdir / FILE
    if not path.is_file():
        raise ConfigError(f"{workdir} holds no sweep: it has no {FILE}")
    try:
        values = json_text.read(path)
        trials = [
            Trial(workdir / name, row["factor"], row["overrides"], row["values"], {})
            for name, row in values.pop("trials").items()
        ]
        rows = [Row(trial.factor, dict(trial.overrides)) for trial in trials]
        return Definition(**values, rows=rows, trials=trials)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}; give the sweep's flags again") from None


def write_definition(workdir: pathlib.Path, definition: Definition) -> None:
    """Write the definition of a sweep, whole or not at all."""
    fields = (field.name for field in dataclasses.fields(definition))
    values = {name: getattr(definition, name) for name in fields if name not in ("rows", "trials")}
    values["trials"] = {
        trial.id: {
            "factor": trial.factor,
            "overrides": dict(trial.overrides),
            "values": dict(trial.values),
        }
        for trial in definition.trials
    }
    run_record.write_whole(workdir / FILE, json.dumps(values, indent=1) + "\n")


def resolved(workdir: pathlib.Path, definition: Definition, resolve: Resolve) -> Definition:
    """Make and check all trials of a definition, before anything is written.

    Args:
        workdir: folder of the sweep.
        definition: whose ``rows`` are read.
        resolve: gives the settings of a trial.

    Raises:
        ConfigError: a trial's settings can't be used, or two trials are the same.
    """
    trials, configs = [], []
    for row in definition.rows:
        try:
            configs.append(resolve(definition.recipe, definition.overrides | row.overrides))
        except ConfigError as error:
            settings = [f"{path}={text}" for path, text in row.overrides.items()]
            name = ", ".join([*([row.factor] if row.factor else []), *settings])
            raise ConfigError(f"the trial {name}: {error}" if name else str(error)) from None
        trials.append(trials_.make_trial(workdir, row, configs[-1]))
    trials_.refuse_duplicates(trials)
    config = configs[0]
    own = (config.checkpoint.metric, config.checkpoint.mode)
    metric, mode = own if config.data.eval else ("train/loss", "min")
    if definition.metric and definition.metric != metric:
        mode = config.checkpoint.mode
    return dataclasses.replace(
        definition,
        trials=trials,
        metric=definition.metric or metric,
        mode=definition.mode or mode,
    )


def run_sweep(
    workdir: pathlib.Path,
    definition: Definition,
    say: Callable[[str], None],
    command: Callable[[Trial], list[str]] | None = None,
    poll_s: float = 0.2,
    files: Mapping[str, str] | None = None,
) -> bool:
    """Run what is left of a sweep.

    Args:
        workdir: folder of the sweep.
        definition: with its trials; see :func:`resolved`.
        say: prints a line.
        command: the program of a trial; ``None``: ``python -m jaxvlm train``.
        poll_s: seconds between looks at the running trials.
        files: id of a trial -> the text of its job's file, where trials are jobs of a scheduler.

    Returns:
        False if a signal ended it before its end.

    Raises:
        ConfigError: another sweep runs in the folder, it holds something else, or a trial in it was
            trained with other settings.
    """
    if run_record.is_begun(workdir):
        raise ConfigError(f"--workdir={workdir} is the folder of a run; give the sweep its own")
    with contextlib.ExitStack() as stack:
        if stack.enter_context(run_record.locked(workdir)):
            stack.enter_context(run_lock.of_folder(workdir))
        records = trials_.records_in(workdir)
        _refuse_changed(workdir, definition.trials, records)
        definition = with_token(workdir, definition)
        write_definition(workdir, definition)
        launcher: local.Launcher | None = scheduler_of(workdir, definition, files or {})
        if launcher is None:
            launcher = local.Local(
                command or local.train_command(definition.recipe, definition.overrides),
                definition.devices,
                workdir.resolve().name,
                definition.token,
            )
        stop = schedule.Stop()
        with stop.caught():
            others = not_asked(definition, records)
            parts = (definition.trials, others, launcher, definition.parallel, say, poll_s)
            return schedule.Schedule(*parts).run(stop)


def with_token(workdir: pathlib.Path, definition: Definition) -> Definition:
    """The definition with the token of the sweep that is in the folder, if there is one."""
    path = workdir / FILE
    text = path.read_text(errors="replace") if path.is_file() else ""
    found = re.search(r'"token": "(\w+)"', text)  # also of a file that is damaged elsewhere
    return dataclasses.replace(definition, token=found[1]) if found else definition


def job_prefix(workdir: pathlib.Path, definition: Definition) -> str:
    """What names of a sweep's jobs begin with, before ``-`` and the trial's id."""
    name = re.sub(r"[^a-z0-9]+", "-", workdir.resolve().name.lower()).strip("-") or "sweep"
    name = name if name[0].isalpha() else f"s-{name}"
    return f"{name[:22].rstrip('-')}-{definition.token}"


def scheduler_of(
    workdir: pathlib.Path, definition: Definition, files: Mapping[str, str]
) -> jobs.Jobs | None:
    """The scheduler that a sweep's trials are jobs of; ``None``: they are processes here.

    Args:
        workdir: folder of the sweep.
        definition: says which.
        files: id of a trial -> the text of its job's file; {} to look at jobs alone.
    """
    if definition.on == "slurm":
        return slurm.Slurm(files, definition.token)
    if definition.on == "gke":
        flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        flags.add_argument("-namespace", "--namespace", default="default")
        namespace = flags.parse_known_args(shlex.split(definition.launch))[0].namespace
        return gke.Gke(files, job_prefix(workdir, definition), namespace, definition.token)
    return None


def _refuse_changed(
    workdir: pathlib.Path, trials: Sequence[Trial], records: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse to go on with trials that were trained with other settings than they are to have.

    One that has neither ended well nor saved a step was trained with none; it starts again.
    """
    changed: dict[str, list[str]] = {}
    for trial in trials:
        record = records.get(trial.id)
        if record is None:
            if run_record.is_begun(trial.folder):
                raise ConfigError(f"{trial.folder} holds a run of no sweep; move it away")
            continue
        has_job = jobs.JOB in record and not record.get("ended")
        if not (trial.step or schedule.is_done(trial) or local.is_running(trial.folder) or has_job):
            continue
        if differ := trials_.changed_settings(trial, record):
            changed.setdefault("; ".join(differ[:5]), []).append(trial.id)
    if changed:
        which = "; and ".join(f"{', '.join(ids)} ({text})" for text, ids in changed.items())
        raise ConfigError(
            f"{workdir} holds trials of this sweep that were trained with other settings: {which}; "
            "set them as they were, give another --workdir, or remove these trials' folders to "
            "train them again"
        )


def not_asked(definition: Definition, records: Mapping[str, Mapping[str, Any]]) -> list[Trial]:
    """Trials in a sweep's folder that its definition does not ask for any more."""
    asked = {trial.id for trial in definition.trials}
    folders = {trial.folder.parent for trial in definition.trials}
    return [
        trials_.of_record(folder / name, record)
        for folder in folders
        for name, record in records.items()
        if name not in asked
    ]


def read_status(workdir: pathlib.Path) -> dict[str, Any]:
    """Read the state of a sweep; needs neither its recipe nor a running sweep.

    Returns:
        JSON values: ``counts`` (state -> number of trials), ``trials`` and ``not_asked`` (a row
        each: ``id``, ``factor``, ``values``, ``state``, ``step``, ``line``). States are ``done``,
        ``failed``, ``running``, ``queued`` (a job that its scheduler has not started), ``stopped``
        (it was started, and goes on) and ``waiting``.

    Raises:
        ConfigError: the folder holds no sweep, or a file of it is damaged.
    """
    definition = read_definition(workdir)
    records = trials_.records_in(workdir)
    queue = scheduler_of(workdir, definition, {})
    rows = [_status_of(trial, records.get(trial.id), queue) for trial in definition.trials]
    counts = {state: sum(row["state"] == state for row in rows) for state in STATES}
    others = [
        _status_of(trial, records[trial.id], queue) for trial in not_asked(definition, records)
    ]
    return {
        "recipe": definition.recipe,
        "counts": {state: number for state, number in counts.items() if number},
        "trials": rows,
        "not_asked": others,
    }


STATES = ("done", "failed", "running", "queued", "stopped", "waiting")
NOT_ASKED = "not asked for any more, and kept:"


def _status_of(
    trial: Trial, record: Mapping[str, Any] | None, queue: jobs.Jobs | None
) -> dict[str, Any]:
    ended = (record or {}).get("ended") or {}
    if record is None:
        state = "waiting"
    elif ended.get("state") == local.DONE:
        state = local.DONE
    elif local.is_running(trial.folder) or (queue and queue.state(trial) == jobs.RUNNING):
        state, ended = "running", {}
    elif queue and queue.state(trial):
        state, ended = "queued", {}
    elif not ended:  # its sweep was killed
        found = queue.ended(trial) if queue else local.how_ended(trial.folder, None)
        state = local.STOPPED
        if found and found.state in (local.DONE, local.FAILED):
            state, ended = found.state, found._asdict()
    else:
        state = ended["state"]
    return {
        "id": trial.id,
        "factor": trial.factor,
        "values": dict(trial.values),
        "state": state,
        "step": trial.step,
        "line": ended.get("line", ""),
    }


def status_text(status: Mapping[str, Any]) -> str:
    """The state of a sweep as lines for people."""
    counts = ", ".join(f"{number} {state}" for state, number in status["counts"].items())
    lines = [f"{len(status['trials'])} trials of {status['recipe']}: {counts}"]
    lines += [line_of(row) for row in status["trials"]]
    if status["not_asked"]:
        lines.append(NOT_ASKED)
        lines += [line_of(row) for row in status["not_asked"]]
    return "\n".join(lines)


def line_of(row: Mapping[str, Any]) -> str:
    """A trial's row of :func:`read_status` as a line for people."""
    trial = Trial(pathlib.Path(row["id"]), row["factor"], {}, row["values"], {})
    step = f" at step {row['step']}" if row["state"] in ("running", "stopped") else ""
    return f"  {row['state']:<8}{trial.label}{step}{': ' * bool(row['line'])}{row['line']}"
