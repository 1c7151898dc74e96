"""SLURM: a batch file for ``sbatch``."""

from __future__ import annotations

import importlib.resources
import re
import shlex
import shutil

from jaxvlm.config import ConfigError
from jaxvlm.launch.job import FILE, Job, Rendered, exports

TEMPLATE = "slurm.sbatch"


def render(
    job: Job, time: str = "24:00:00", partition: str = "", account: str = "", cpus: int = 0
) -> Rendered:
    """Write the batch file: the one of ``launch/``, with this job's numbers and command.

    Args:
        job: to run; its ``restarts`` are those without a new checkpoint, its ``sizes`` numbers of
            nodes.
        time: limit, ``D-HH:MM:SS``.
        partition: of the cluster; "": the default one.
        account: to charge; "": the default one.
        cpus: of a process; 0: eight a GPU, and one a CPU device.

    Raises:
        ConfigError: the machine is of TPUs.
    """
    if job.is_tpu:
        raise ConfigError("launch slurm: SLURM has no TPU slices; use launch gke, xpk or queued")
    text = importlib.resources.files("jaxvlm.launch").joinpath("templates", TEMPLATE).read_text()
    head: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.machine.hosts),
        "gpus-per-node": str(job.gpus) if job.gpus else None,
        "cpus-per-task": str(cpus or 8 * job.gpus or job.machine.devices_per_host),
        "time": time,
        "partition": partition or None,
        "account": account or None,
        "output": f"{job.name}-%j.log",
    }
    for option, value in head.items():
        text = _with_option(text, option, value)
    options, rest = _divided(text)
    elastic = ""
    if job.sizes:
        options += "#SBATCH --no-kill\n"
        elastic = f"JAXVLM_NODES={shlex.quote(' '.join(map(str, job.sizes)))}\n"
    given = f"{exports(job, stopped=False)}set -- {shlex.join(job.arguments[1:])}\n"
    command = f"JAXVLM_COMMAND={shlex.quote('jaxvlm ' + job.arguments[0])}\n"
    mark = "set -euo pipefail\n"
    if rest.count(mark) != 1:
        raise ValueError(f"{TEMPLATE} must have one line {mark.strip()!r}")
    limit = f"JAXVLM_RESTARTS={job.restarts}\n"
    rest = rest.replace(mark, f"{mark}\n# This job's command.\n{command}{elastic}{limit}{given}")
    return Rendered({f"{job.name}.sbatch": options + rest}, ("sbatch", FILE))


def check_path() -> None:
    """Refuse to submit a job that would not find its program: SLURM passes the PATH on.

    Raises:
        ConfigError: jaxvlm is not on it.
    """
    if shutil.which("jaxvlm") is None:
        raise ConfigError(
            "jaxvlm is not on the PATH, which the job inherits; activate its environment, on a "
            "file system that all nodes see"
        )


def _with_option(text: str, option: str, value: str | None) -> str:
    """The batch file with an option set, or without it."""
    pattern = re.compile(rf"^#SBATCH --{option}=.*\n", re.MULTILINE)
    line = "" if value is None else f"#SBATCH --{option}={value}\n"
    if pattern.search(text):
        return pattern.sub(lambda _: line, text)
    first, rest = text.split("\n", 1)
    return f"{first}\n{line}{rest}"


def _divided(text: str) -> tuple[str, str]:
    """The lines of options, and what follows the comments of the template's own use."""
    lines = text.splitlines(keepends=True)
    end = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) + 1
    after = end
    while lines[after].startswith("#"):
        after += 1
    return "".join(lines[:end]), "".join(lines[after:])
