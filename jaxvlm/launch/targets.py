"""The targets of ``jaxvlm launch``, and the call of the user's tool."""

from __future__ import annotations

import pathlib
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError
from jaxvlm.launch import kubernetes, ray, sky, slurm, tpu_vms, vertex, xpk
from jaxvlm.launch.job import Job, Rendered


class Target(NamedTuple):
    """Where jobs run."""

    render: Callable[..., Rendered]
    """``(job, **flags)``."""
    flags: tuple[str, ...]
    """Names of the flags that it reads, besides those of every target."""


TARGETS: Mapping[str, Target] = {
    "slurm": Target(slurm.render, ("time", "partition", "account")),
    "tpu": Target(tpu_vms.render_running, ("tpu", "zone", "project", "install")),
    "queued": Target(tpu_vms.render_queued, ("zone", "project", "install", "spot", "runtime")),
    "gke": Target(kubernetes.render, ("namespace", "queue", "claim", "mount")),
    "xpk": Target(xpk.render, ("cluster", "zone", "project", "priority")),
    "vertex": Target(vertex.render, ("region", "project", "reduction_servers", "spot")),
    "sky": Target(sky.render, ("install", "spot", "cloud")),
    "ray": Target(ray.render, ("address",)),
}


def render(target: str, job: Job, **settings: Any) -> Rendered:
    """Write a job for a target.

    Args:
        target: of :data:`TARGETS`.
        job: to run.
        **settings: the target's own.

    Raises:
        ConfigError: the target can't run the job.
    """
    return TARGETS[target].render(job, **settings)


def written(rendered: Rendered, folder: pathlib.Path) -> tuple[str, ...]:
    """Write a job's files, and return the call of the tool that takes them.

    Raises:
        ConfigError: the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in rendered.files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"--output={folder}: {error.strerror}") from None
    return call(rendered, folder)


def call(rendered: Rendered, folder: pathlib.Path) -> tuple[str, ...]:
    """The call of the user's tool for files in a folder."""
    first = str(folder / next(iter(rendered.files)))
    return tuple(
        word.replace("{folder}", str(folder)) if "{folder}" in word else word.replace("{}", first)
        for word in rendered.command
    )


def submit(command: tuple[str, ...]) -> int:
    """Call the user's tool, once, and return its status.

    Raises:
        ConfigError: it is not installed.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not on the PATH; install it, or see with --dry_run what it would be "
            f"given: {shlex.join(command)}"
        )
    return subprocess.run(command, check=False).returncode
