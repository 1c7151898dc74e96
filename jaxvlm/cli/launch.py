"""The command ``jaxvlm launch``, which gives a job to a scheduler."""

from __future__ import annotations

import pathlib
import shlex
from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags, say

SUMMARY = "Give a command to SLURM, GKE, TPU VMs, xpk, Vertex AI, SkyPilot or Ray, once it fits."
USAGE = "TARGET --devices=h200:16 [--name=NAME ...] -- train --config=FILE --workdir=DIR ..."
_EVERY = {
    "devices": "The machine, as for plan: h200:16, v5p:4x4x4, 2xv5e:16x16 (two slices), cpu:8.",
    "name": "The job's name: lower-case letters, digits and hyphens.",
    "image": "The container image with jaxvlm (launch/Dockerfile builds one); slurm, tpu and ray "
    "use what is installed.",
    "env": "A variable NAME=VALUE of the processes; the flag can be repeated.",
    "restarts": "How often a lost process may start the job again; 0 means 5 on SLURM, where only "
    "restarts in a row without a new checkpoint count, and 20 elsewhere.",
    "output": "The folder to write the job's files to.",
    "dry_run": "Print the job and the call of the scheduler's tool; write and call nothing.",
    "skip_plan": "Don't ask the planner whether the run fits.",
}
_OWN = {
    "time": "slurm: the time limit, D-HH:MM:SS.",
    "partition": "slurm: the partition; by default the cluster's.",
    "account": "slurm: the account to charge; by default the user's.",
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
    "ddp on several hosts of GPUs alone.",
    "cloud": "sky: the cloud, such as gcp or aws/us-east-1; by default the cheapest.",
    "address": "ray: the address of the cluster's dashboard; by default RAY_ADDRESS.",
}


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``launch``."""
    switches = {"dry_run": False, "skip_plan": False}
    define_flags(values, _EVERY, env=(), name="jaxvlm", output="jobs", restarts=0, **switches)
    own: dict[str, Any] = {"time": "24:00:00", "namespace": "default", "mount": "/runs"}
    own |= {"priority": "medium", "spot": False, "reduction_servers": 0}
    define_flags(values, _OWN, **own)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Check the run, write the job and call the scheduler's tool."""
    from jaxvlm.config import ConfigError
    from jaxvlm.launch import job, targets
    from jaxvlm.planner.hardware import machine

    target, arguments = _divided(args, targets.TARGETS)
    _refuse_others(values, target, targets.TARGETS)
    if not values.devices:
        raise ConfigError("launch needs --devices, e.g. --devices=h200:16, v5p:4x4x4 or cpu:8")
    config, recipe = _of_training(arguments)
    dtype = config.network.dtype if config else "bfloat16"
    asked = machine.parse(values.devices, dtype)
    fits = None if config is None or values.skip_plan else _fits(config, recipe, asked)
    own = {name: values[name].value for name in targets.TARGETS[target].flags}
    if target == "vertex":
        own["config"] = config
    rendered = targets.render(
        target,
        job.Job(
            job.check_name(values.name), tuple(arguments), asked, values.image,
            job.environment_of(values.env), values.restarts or (5 if target == "slurm" else 20),
        ),
        **own,
    )  # fmt: skip
    folder = pathlib.Path(values.output)
    result = {"target": target, "files": dict(rendered.files), "fits": fits}
    if values.dry_run:
        for name, text in rendered.files.items():
            say(f"# {folder / name}\n{text}")
        command = targets.call(rendered, folder)
        say(f"# {shlex.join(command)}")
        return result | {"command": list(command)}
    command = targets.written(rendered, folder)
    say(shlex.join(command))
    status = targets.submit(command)
    if rendered.note and not status:
        say(rendered.note.replace("{}", str(folder / next(iter(rendered.files)))))
    return result | {"command": list(command), "exit_code": 1 if status else 0}


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
    if values["image"].present and target in ("slurm", "tpu", "ray"):
        raise ConfigError(f"--image: launch {target} runs what is installed; leave it out")


def _of_training(arguments: list[str]) -> tuple[Any, str]:
    """The settings and the recipe of a command that trains, checked as it will check them."""
    from jaxvlm.cli import error_lines, train
    from jaxvlm.cli.main import COMMANDS
    from jaxvlm.config import ConfigError, from_config_dict

    if arguments[0] not in COMMANDS or arguments[0] == "launch":
        raise ConfigError(f"{arguments[0]!r} is no command that can be launched")
    if arguments[0] != "train":
        return None, ""
    values = flags.FlagValues()
    flags.DEFINE_bool("json", False, "", flag_values=values)
    try:
        train.define(values, arguments[1:])
        values(["jaxvlm", *arguments[1:]])
        _ = values["config"].value  # raises if the recipe failed to load
    except Exception as error:  # whatever a setting's value can lead to
        raise ConfigError(error_lines.of_settings(error, "train")) from None
    if values.config is None or not values.workdir:
        missing = "--workdir=DIR" if values.config is not None else "--config=FILE"
        raise ConfigError(f"the command trains and needs {missing}")
    recipe: Any = values["config"]
    return from_config_dict(values.config), str(recipe.config_filename)


def _fits(config: Any, recipe: str, asked: Any) -> bool | None:
    """Ask the planner; stops a run that does not fit."""
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
