"""The targets of ``jaxvlm launch``, and the call of the user's tool."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError
from jaxvlm.launch import kubernetes, local, ray, sky, slurm, tpu_vms, vertex, xpk
from jaxvlm.launch.job import Job, Rendered


class Target(NamedTuple):
    """Where jobs run."""

    render: Callable[..., Rendered]
    """``(job, **flags)``."""
    flags: tuple[str, ...]
    """Names of the flags that it reads, besides those of every target."""
    has_image: bool = False
    """Whether it runs a container, which has a copy of the recipes."""
    has_restarts: bool = True
    """Whether it counts restarts."""
    has_files: bool = False
    """Whether it runs where this machine's files are."""
    is_elastic: bool = False
    """Whether a job can go on with fewer nodes once some are lost."""


TARGETS: Mapping[str, Target] = {
    "local": Target(local.render, ("processes",), has_files=True, is_elastic=True),
    "slurm": Target(
        slurm.render, ("time", "partition", "account", "cpus"), has_files=True, is_elastic=True
    ),
    "tpu": Target(
        tpu_vms.render_running, ("tpu", "zone", "project", "install"), has_restarts=False
    ),
    "queued": Target(
        tpu_vms.render_queued, ("zone", "project", "install", "spot", "runtime"), has_image=True
    ),
    "gke": Target(kubernetes.render, ("namespace", "queue", "claim", "mount"), has_image=True),
    "xpk": Target(xpk.render, ("cluster", "zone", "project", "priority"), has_image=True),
    "vertex": Target(
        vertex.render,
        ("region", "project", "reduction_servers", "spot"),
        has_image=True,
        has_restarts=False,
    ),
    "sky": Target(sky.render, ("install", "spot", "cloud"), has_image=True, has_restarts=False),
    "ray": Target(ray.render, ("address",), is_elastic=True),
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


def written(rendered: Rendered, folder: pathlib.Path) -> Rendered:
    """Write a job's files; returns the job with their names in its call.

    Raises:
        ConfigError: the folder can't be written.
    """
    if not rendered.files:
        return rendered
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in rendered.files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"--output={folder}: {error.strerror}") from None
    return rendered.with_files_in(str(folder))


def submit(command: tuple[str, ...], in_place: bool = False) -> int:
    """Call the user's tool, once, and return its status; ``in_place`` it takes over this process.

    Raises:
        ConfigError: it is not installed.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not on the PATH; install it, or see with --dry_run what it would be "
            f"given: {shlex.join(command)}"
        )
    if in_place:
        sys.stdout.flush()
        os.execvp(command[0], command)
    return subprocess.run(command, check=False).returncode
