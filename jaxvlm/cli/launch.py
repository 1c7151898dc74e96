"""The command ``jaxvlm launch``, which gives a job to a scheduler."""

from __future__ import annotations

import pathlib
import shlex
from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags, say

SUMMARY = "Give a command to SLURM, GKE, TPU VMs, xpk, Vertex AI, SkyPilot, Ray or this machine."
USAGE = "TARGET --devices=h200:16 [--name=NAME ...] -- train --config=FILE --workdir=DIR ..."
_EVERY = {
    "devices": "The machine, as for plan: h200:16, v5p:4x4x4, 2xv5e:16x16 (two slices), cpu:8.",
    "name": "The job's name: lower-case letters, digits and hyphens.",
    "image": "queued, gke, xpk, vertex, sky: the container image with jaxvlm, which "
    "launch/Dockerfile builds.",
    "env": "A variable NAME=VALUE of the processes; the flag can be repeated.",
    "restarts": "local, slurm, queued, gke, xpk, ray: how often a lost process may start the job "
    "again; 0 means 5 on SLURM, where restarts in a row without a new checkpoint count, and 20 "
    "elsewhere.",
    "min_nodes": "local, slurm, ray: the fewest nodes (local: processes) with which the job goes "
    "on once some are lost, if they divide its batch; 0 means all.",
    "output": "The folder in which the job's files are written, in a folder of its name.",
    "dry_run": "Print the job and the call of the scheduler's tool; write and call nothing.",
    "skip_plan": "Don't ask the planner whether the run fits.",
}
_OWN = {
    "processes": "local: the number of processes among which the devices are divided; 0 means one "
    "for each device.",
    "time": "slurm: the time limit, D-HH:MM:SS.",
    "partition": "slurm: the partition; by default the cluster's.",
    "account": "slurm: the account to charge; by default the user's.",
    "cpus": "slurm: the CPUs of a process; 0 means eight for each GPU.",
    "tpu": "tpu: the name of the TPU VM.",
    "zone": "tpu, queued, xpk: the zone.",
    "project": "tpu, queued, xpk, vertex: the project; by default gcloud's.",
    "install": "tpu, queued, sky: what `pip install` is given first, such as 'jaxvlm[tpu]'.",
    "spot": "queued, vertex, sky: take machines that may be taken back.",
    "runtime": "queued: the software version of the VMs; by default that of their kind.",
    "namespace": "gke: the namespace.",
    "queue": "gke: Kueue's local queue; by default none.",
    "claim": "gke: the persistent volume claim that all pods mount; by default none.",
    "mount": "gke: the folder that --claim is mounted on.",
    "cluster": "xpk: the cluster.",
    "priority": "xpk: the workload's priority.",
    "region": "vertex: the region.",
    "reduction_servers": "vertex: the number of hosts that sum gradients (Reduction Server); for "
    "ddp on several hosts of GPUs alone, with google-reduction-server in the image.",
    "cloud": "sky: the cloud, such as gcp or aws/us-east-1; by default the cheapest.",
    "address": "ray: the address of the cluster's dashboard; by default RAY_ADDRESS.",
}

LOCAL = ("output",)
"""Flags that name what can't be in an object store."""


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``launch``."""
    switches = {"dry_run": False, "skip_plan": False}
    define_flags(
        values, _EVERY, env=(), name="jaxvlm", output="jobs", restarts=0, min_nodes=0, **switches
    )
    own: dict[str, Any] = {"time": "24:00:00", "namespace": "default", "mount": "/runs"}
    own |= {"priority": "medium", "spot": False, "reduction_servers": 0, "cpus": 0, "processes": 0}
    define_flags(values, _OWN, **own)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Check the run, write the job and call the scheduler's tool."""
    from jaxvlm.launch import slurm, targets

    target, arguments = _divided(args, targets.TARGETS)
    rendered, fits = rendered_job(values, target, arguments)
    folder = pathlib.Path(values.output) / values.name
    result = {"target": target, "files": dict(rendered.files), "fits": fits}
    if values.dry_run:
        rendered = rendered.with_files_in(str(folder))
        for name, text in rendered.files.items():
            say(f"# {folder / name}\n{text}")
        say(f"# {shlex.join(rendered.command)}")
        return result | {"command": list(rendered.command)}
    if target == "slurm":
        slurm.check_path()
    rendered = targets.written(rendered, folder)
    say(shlex.join(rendered.command))
    status = targets.submit(rendered.command, rendered.in_place)
    if rendered.note and not status:
        say(rendered.note)
    return result | {"command": list(rendered.command), "exit_code": 1 if status else 0}


def rendered_job(
    values: flags.FlagValues, target: str, arguments: list[str]
) -> tuple[Any, bool | None]:
    """A command as a job of a target, and whether the planner says that it fits.

    Args:
        values: the flags of ``launch``.
        target: one of ``targets.TARGETS``.
        arguments: of jaxvlm, the command's name first.

    Raises:
        ConfigError: flags, settings or a machine that can't be used, or a run that does not fit.
    """
    from jaxvlm.config import ConfigError
    from jaxvlm.launch import job, targets
    from jaxvlm.planner.hardware import machine

    _refuse_others(values, target, targets.TARGETS)
    for name in (*_EVERY, *_OWN):
        job.check_line(name, values[name].value)
    if not values.devices:
        raise ConfigError("launch needs --devices, e.g. --devices=h200:16, v5p:4x4x4 or cpu:8")
    config, recipe = _checked(arguments)
    asked = machine.parse(values.devices, config.network.dtype if config else "bfloat16")
    fits = None if values.skip_plan else _fits(config, recipe, asked)
    of = targets.TARGETS[target]
    has_recipe = of.has_files or (of.has_image and values.image)
    launched = job.Job(
        job.check_name(values.name),
        tuple(arguments),
        asked,
        values.image,
        job.environment_of(values.env, asked),
        values.restarts or (5 if target == "slurm" else 20),
        _sizes(values, target, config, recipe, asked),
        "" if has_recipe else _text(recipe),
    )
    own = {name: values[name].value for name in of.flags}
    own |= {"config": config} if target == "vertex" else {}
    return targets.render(target, launched, **own), fits


def _sizes(
    values: flags.FlagValues, target: str, config: Any, recipe: str, asked: Any
) -> tuple[int, ...]:
    """The numbers of nodes with which the job may go on; () where it waits for all."""
    if not values.min_nodes:
        return ()
    from jaxvlm.launch import local, plan_check

    own = {"local": lambda: local.processes_of(asked, values.processes)}
    nodes = own.get(target, lambda: asked.hosts)()
    how = (config, recipe, asked, nodes, values.min_nodes, not values.skip_plan)
    found = plan_check.sizes(*how)
    for count, why in found.refused.items():
        say(f"not with {count}: {why}")
    say(f"goes on with {' or '.join(map(str, found.allowed))} nodes, once others are lost")
    return found.allowed


def _text(recipe: str) -> str:
    """The recipe's file, for a target that has none; "" where its path is that of the target."""
    path = pathlib.Path(recipe.partition(":")[0])
    return "" if not recipe or path.is_absolute() else path.read_text()


def _divided(args: list[str], known: Any) -> tuple[str, list[str]]:
    """The target, and the command after it."""
    from jaxvlm.config import ConfigError

    if not args or args[0] not in known:
        raise ConfigError(f"launch needs a target: {', '.join(known)}; see jaxvlm launch --help")
    arguments = [word for i, word in enumerate(args[1:]) if i or word != "--"]
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            "launch needs a command of jaxvlm after --, e.g. -- train --config=FILE --workdir=DIR"
        )
    return args[0], arguments


def _refuse_others(values: flags.FlagValues, target: str, known: Any) -> None:
    """Refuse flags that are other targets'."""
    from jaxvlm.config import ConfigError

    for name in _OWN:
        if values[name].present and name not in known[target].flags:
            of = ", ".join(other for other in known if name in known[other].flags)
            raise ConfigError(f"--{name} is for launch {of}, not for {target}; leave it out")
    if target == "local" and (given := [n for n in ("name", "output") if values[n].present]):
        raise ConfigError(f"--{given[0]}: launch local writes no files; leave it out")
    if values["image"].present and not known[target].has_image:
        raise ConfigError(f"--image: launch {target} runs what is installed; leave it out")
    if values["min_nodes"].present and not known[target].is_elastic:
        of = ", ".join(name for name, other in known.items() if other.is_elastic)
        raise ConfigError(
            f"--min_nodes: launch {target} waits for all of its nodes; launch {of} can go on with "
            "fewer"
        )
    if values["restarts"].present and not known[target].has_restarts:
        raise ConfigError(f"--restarts: launch {target} does not count restarts; leave it out")


def _checked(arguments: list[str]) -> tuple[Any, str]:
    """Check a command's flags and settings as it will; the settings and recipe of one that trains.

    Raises:
        ConfigError: the command would refuse them.
    """
    import importlib

    from jaxvlm.checkpoint.run_record import is_url
    from jaxvlm.cli import error_lines
    from jaxvlm.cli.main import COMMANDS, module_of
    from jaxvlm.config import ConfigError
    from jaxvlm.stores.object_store import check_url
    from jaxvlm.trainer import checks

    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS or name in ("launch", "sweep"):
        raise ConfigError(f"{name!r} is no command that can be launched")
    values = flags.FlagValues()
    flags.DEFINE_bool("json", False, "", flag_values=values)
    try:
        importlib.import_module(module_of(name)).define(values, rest)
        values(["jaxvlm", *rest])
        config = values.config if "config" in values else None
        _ = config and config.items  # raises if the recipe failed to load
    except Exception as error:  # whatever a setting's value can lead to
        raise ConfigError(error_lines.of_settings(error, name)) from None
    if name != "train":
        return None, ""
    if config is None or not values.workdir:
        missing = "--workdir=DIR" if config is not None else "--config=FILE"
        raise ConfigError(f"the command trains and needs {missing}")
    if is_url(values.workdir):
        check_url("--workdir", values.workdir)
    recipe: Any = values["config"]
    return checks.checked(config, ""), str(recipe.config_filename)


def _fits(config: Any, recipe: str, asked: Any) -> bool | None:
    """Ask the planner; stops a run that does not fit."""
    if config is None:
        say("not planned: only runs that train are")
        return None
    import jax

    from jaxvlm.config import ConfigError
    from jaxvlm.launch import plan_check

    jax.config.update("jax_platforms", "cpu")  # planning needs no accelerator
    verdict = plan_check.check(config, recipe, asked)
    if verdict.fits is False:
        raise ConfigError(
            f"the run does not fit {asked.name} x {asked.devices}: {verdict.text} (--skip_plan "
            "launches it anyway)"
        )
    say(verdict.text)
    return verdict.fits
