"""The command ``jaxvlm sweep``: train one recipe with many settings, and compare the runs."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags, define_recipe, say
from jaxvlm.cli.error_lines import of_settings

SUMMARY = "Train a recipe with many settings: grids, seeds, ablations; compare the runs."
USAGE = (
    "--config=FILE[:arg] --workdir=DIR --grid=PATH=V,V [...] | resume --workdir=DIR [...] | "
    "status --workdir=DIR | table --workdir=DIR [--metric=NAME --mode=min]"
)
_FLAGS = {
    "workdir": "The folder of the sweep. Each trial is a run in a folder of it, named by the "
    "trial's id. The same command again goes on; with another grid it runs what is new, and keeps "
    "what is there.",
    "grid": "A setting and its values, such as optim.learning_rate=1e-4,3e-4 or seed=0,1,2. "
    "Repeat the flag: all combinations are trained. Commas in parentheses, brackets, braces and "
    "quotes divide nothing: optim.frozen=(),('vision/*',) has two values, data.train='a,b' one.",
    "trials": 'A file of JSON lines, each the settings of a trial: {"optim.learning_rate": 1e-4, '
    '"optim.warmup_steps": 100}. Each is combined with all values of --grid.',
    "ablate": 'A JSON file of factors, {"name": {"path": value, ...}, ...}: the recipe is trained '
    "as it is, and with each factor alone; with --grid=seed=0,1,2 three times each.",
    "parallel": "The number of trials at a time. Each uses all of the machine's devices, so more "
    "than one is for CPUs with cores to spare, or with --devices.",
    "devices": "Lists of GPUs, such as '0,1;2,3': each of as many trials at a time gets one of "
    "them as CUDA_VISIBLE_DEVICES.",
    "on": "Where the trials run: on this machine (local), or each as a job of SLURM (slurm) or a "
    "JobSet of GKE (gke), which goes on where this command ends; the same command looks again, and "
    "submits what is left.",
    "launch": "With --on=slurm or gke, the flags of `jaxvlm launch slurm` or `launch gke` for each "
    "trial's job, such as '--devices=h200:16 --time=8:00:00'.",
    "metric": "The metric of the table, its last value in a run's metrics.jsonl; by default "
    "config.checkpoint.metric, or train/loss without evaluation data.",
    "mode": "Whether the highest (max) or the lowest (min) metric is the best; by default "
    "config.checkpoint.mode.",
}
VERBS = {
    "resume": ("workdir", "parallel", "devices", "on", "launch"),
    "status": ("workdir",),
    "table": ("workdir", "metric", "mode"),
}
"""The flags that each verb reads; without a verb all are read."""

LOCAL = ("workdir",)
"""Flags that name what can't be in an object store."""


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``sweep``."""
    define_recipe(
        values,
        argv,
        "The recipe of all trials; override any setting for all of them with --config.a.b=value.",
    )
    define_flags(values, _FLAGS, grid=(), parallel=1, on="local")


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Run a sweep or go on with it, or show its state or its table."""
    from jaxvlm.config import ConfigError, check_choice

    verb = args[0] if args else ""
    if len(args) > 1 or verb not in ("", *VERBS):
        raise ConfigError(f"usage: jaxvlm sweep {USAGE}")
    for name in ("config", *_FLAGS):
        if verb and values[name].present and name not in VERBS[verb]:
            raise ConfigError(f"sweep {verb} takes no --{name}")
    if not values.workdir:
        raise ConfigError(f"sweep{' ' * bool(verb)}{verb} needs the sweep's folder: --workdir=DIR")
    if values.mode:
        check_choice("--mode", values.mode, ("max", "min"))
    workdir = pathlib.Path(values.workdir)
    if verb == "status":
        from jaxvlm.sweep import sweep

        status = sweep.read_status(workdir)
        print(sweep.status_text(status))
        return status
    if verb == "table":
        return _table(workdir, values.metric, values.mode)
    return _train(values, workdir, resumes=verb == "resume")


def _train(values: flags.FlagValues, workdir: pathlib.Path, resumes: bool) -> dict[str, Any]:
    from jaxvlm.sweep import sweep

    definition = _recorded(workdir) if resumes else _asked(values, workdir)
    definition = sweep.resolved(workdir, _placed(values, definition), _resolve)
    definition = sweep.with_token(workdir, definition)
    files = _files(workdir, definition) if definition.on != "local" else None
    if files is not None and not values["parallel"].present and definition.parallel == 1:
        definition = dataclasses.replace(definition, parallel=len(definition.trials))
    ended = sweep.run_sweep(workdir, definition, say, files=files)
    status = sweep.read_status(workdir)
    counts = status["counts"]
    result = {"ended": "done" if ended else "preempted", **status}
    result["exit_code"] = 1 if counts.get("failed") else 0
    if not ended:
        say(f"stopped; `jaxvlm sweep resume --workdir={workdir}` goes on")
        return result
    if counts.get("done"):
        result["table"] = _table(workdir)
    elif counts:
        say(sweep.status_text(status))
    return result


def _files(workdir: pathlib.Path, definition: Any) -> dict[str, str]:
    """Each trial's job as a file, by id; all are made and planned before one is submitted."""
    from jaxvlm.cli import launch
    from jaxvlm.config import ConfigError
    from jaxvlm.launch import slurm
    from jaxvlm.sweep import local, sweep

    values = flags.FlagValues()
    words = shlex.split(definition.launch)
    try:
        launch.define(values, words)
        rest = values(["jaxvlm", *words])[1:]
    except flags.Error as error:
        raise ConfigError(f"--launch={definition.launch}: {error}") from None
    own = ("name", "dry_run", "output")
    if rest or (given := [name for name in own if values[name].present]):
        what = rest[0] if rest else f"--{given[0]}"
        raise ConfigError(f"--launch={definition.launch}: {what} is the sweep's own; leave it out")
    if definition.on == "gke" and not (
        values.claim and workdir.is_absolute() and workdir.is_relative_to(values.mount)
    ):
        raise ConfigError(
            f"--workdir={workdir}: with --on=gke the sweep's folder is on the volume that all pods "
            f"mount: give --claim and --mount in --launch, mount the volume at {values.mount} on "
            f"this machine too, and name a folder in it, such as {values.mount}/sweep"
        )
    prefix = sweep.job_prefix(workdir, definition)
    values["env"].value = [*values.env, f"WANDB_RUN_GROUP={workdir.resolve().name}"]
    found = {}
    for trial in definition.trials:
        values["name"].value = f"{prefix}-{trial.id}"
        arguments = local.train_arguments(definition.recipe, definition.overrides, trial)
        rendered, _ = launch.rendered_job(values, definition.on, arguments)
        found[trial.id] = next(iter(rendered.files.values()))
    if definition.on == "slurm":
        slurm.check_path()
    return found


def _asked(values: flags.FlagValues, workdir: pathlib.Path) -> Any:
    """The definition that the flags give."""
    from jaxvlm.checkpoint.run_record import local_folder
    from jaxvlm.config import ConfigError
    from jaxvlm.sweep import definition as definitions
    from jaxvlm.sweep.sweep import FILE, Definition

    if values.config is None:
        there = f"; `jaxvlm sweep resume --workdir={workdir}` goes on with the one that is there"
        raise ConfigError(
            "sweep needs a recipe: --config=FILE, e.g. --config=configs/quickstart.py"
            + there * (workdir / FILE).is_file()
        )
    local_folder("--workdir", workdir)
    flag: Any = values["config"]
    overrides = {path: definitions.as_text(x) for path, x in flag.override_values.items()}
    rows = definitions.read_rows(values.grid, values.trials, values.ablate)
    for grid in values.grid:
        path = grid.partition("=")[0].removeprefix("config.")
        if path in overrides:
            raise ConfigError(f"{path} is in --grid and in --config.{path}; leave one out")
    recipe = flag.config_filename
    return Definition(recipe, overrides, rows, values.metric, values.mode)


def _recorded(workdir: pathlib.Path) -> Any:
    """The definition in the sweep's folder, which goes on where it was started."""
    from jaxvlm.config import ConfigError
    from jaxvlm.sweep.sweep import read_definition

    definition = read_definition(workdir)
    if pathlib.Path(definition.folder) != pathlib.Path.cwd():
        raise ConfigError(
            f"{workdir} was started in {definition.folder}, which its recipe and data are relative "
            "to; resume it there, or give the sweep's flags again here"
        )
    return definition


def _placed(values: flags.FlagValues, definition: Any) -> Any:
    """The definition with the flags that say where trials run."""
    from jaxvlm.config import ConfigError, check_choice
    from jaxvlm.sweep.sweep import PLACES

    check_choice("--on", values.on, PLACES)
    definition = dataclasses.replace(
        definition,
        on=values.on if values["on"].present else definition.on,
        launch=values.launch if values["launch"].present else definition.launch,
    )
    if definition.on != "local" and values.devices:
        raise ConfigError("--devices is for --on=local; give the machine in --launch")
    if definition.on == "local" and definition.launch:
        raise ConfigError(f"--launch={definition.launch} is for --on=slurm and gke; leave it out")
    if values.parallel < 1:
        raise ConfigError(f"--parallel={values.parallel}: must be at least 1")
    if not values["devices"].present:
        if values["parallel"].present and definition.devices:
            raise ConfigError(
                f"--parallel={values.parallel}, but the sweep has {len(definition.devices)} lists "
                "of devices; give --devices"
            )
        given = values["parallel"].present
        return dataclasses.replace(definition, parallel=values.parallel) if given else definition
    devices = [part.strip() for part in values.devices.split(";")] if values.devices else []
    numbers = [number.strip() for part in devices for number in part.split(",")]
    if not all(numbers) or len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"--devices={values.devices}: give lists that share no device, such as 0,1;2,3"
        )
    parallel = len(devices) or values.parallel
    if values["parallel"].present and values.parallel != parallel:
        raise ConfigError(
            f"--parallel={values.parallel}, but --devices has {parallel} lists; leave it out"
        )
    return dataclasses.replace(definition, parallel=parallel, devices=devices)


def _resolve(recipe: str, overrides: Mapping[str, str]) -> Any:
    """A trial's settings, by the parsers and checks of ``jaxvlm train``."""
    from jaxvlm.config import ConfigError
    from jaxvlm.trainer import checks

    argv = [f"--config={recipe}", *(f"--config.{path}={text}" for path, text in overrides.items())]
    values = flags.FlagValues()
    try:
        define_recipe(values, argv, "")
        values(["jaxvlm", *argv])
        config = values.config
        _ = config.items  # raises if the recipe failed to load
    except Exception as error:  # whatever a recipe or a setting's value can lead to
        raise ConfigError(of_settings(error, "sweep")) from error
    return checks.checked(config, "")


def _table(workdir: pathlib.Path, metric: str = "", mode: str = "") -> dict[str, Any]:
    from jaxvlm.sweep import table as tables

    table = tables.make_table(workdir, metric, mode)
    print(tables.as_text_lines(table))
    tables.write_csv(table, workdir / tables.CSV)
    written = [str(workdir / tables.CSV)]
    if why := tables.write_plot(table, workdir / tables.PLOT):
        print(why)
    else:
        written.append(str(workdir / tables.PLOT))
    print(f"written to {' and '.join(written)}", flush=True)
    return tables.as_json(table)
