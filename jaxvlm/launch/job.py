"""A job: a command of jaxvlm and the machine that it runs on, one process a host."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from jaxvlm.config import ConfigError
from jaxvlm.planner.hardware.machine import Machine

PORT = 61440
"""Port on which process 0 listens, where a target does not choose one."""
AGAIN = 75
"""Exit status of a process that lost another one: the same command resumes the run."""
NOT_AGAIN = (1, 2)
"""Exit statuses of errors that would come again: of the run, and of bad input."""


class Job(NamedTuple):
    """What to run, and where."""

    name: str
    """Lower-case letters, digits and hyphens, as Kubernetes takes them."""
    arguments: tuple[str, ...]
    """Of ``jaxvlm``: the command and its flags."""
    machine: Machine
    image: str = ""
    """Container image with jaxvlm; "" where the target has it installed."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of the processes."""
    restarts: int = 20
    """How often a lost process may start the job again."""

    @property
    def command(self) -> list[str]:
        """Words of the command."""
        return ["jaxvlm", *self.arguments]

    @property
    def line(self) -> str:
        """The command for a shell."""
        return shlex.join(self.command)

    @property
    def gpus(self) -> int:
        """GPUs of a host."""
        return self.machine.devices_per_host if self.machine.platform == "gpu" else 0

    @property
    def is_tpu(self) -> bool:
        """Whether the machine is of TPUs."""
        return self.machine.platform == "tpu"


class Rendered(NamedTuple):
    """A job as a target takes it."""

    files: Mapping[str, str]
    """Name -> text; the first one is the job, others are read by it."""
    command: tuple[str, ...]
    """The user's own tool, and how it is called; ``{}`` stands for the first file, and
    ``{folder}`` for its folder."""
    note: str = ""
    """What to do next, for people."""


def check_name(name: str) -> str:
    """Return a job's name.

    Raises:
        ConfigError: schedulers would not take it.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"--name={name}: at most 40 lower-case letters, digits and hyphens, the first one a "
            "letter and the last no hyphen"
        )
    return name


def environment_of(pairs: list[str]) -> tuple[tuple[str, str], ...]:
    """Split ``NAME=VALUE`` flags.

    Raises:
        ConfigError: one is not of that form.
    """
    found = []
    for pair in pairs:
        name, is_given, value = pair.partition("=")
        if not is_given or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"--env={pair}: give NAME=VALUE")
        found.append((name, value))
    return tuple(found)


def exports(job: Job) -> str:
    """Lines of a shell that set the job's variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment)


def restarting(job: Job, line: str = "") -> str:
    """Lines of a shell that run the command again while a process is lost; they end with its
    status."""
    return f"""status={AGAIN} tries=0
while [ "$status" -eq {AGAIN} ] && [ "$tries" -le {job.restarts} ]; do
  tries=$((tries + 1)) status=0
  {line or job.line} || status=$?
done
exit "$status"
"""


def as_yaml(head: str, value: Any) -> str:
    """YAML with a comment above, long lines as they are."""
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return comment + yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, width=10**6, default_flow_style=False
    )


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def needs(flag: str, value: str, target: str, example: str) -> str:
    """Return a flag's value.

    Raises:
        ConfigError: it is not given.
    """
    if not value:
        raise ConfigError(f"launch {target} needs --{flag}, e.g. --{flag}={example}")
    return value
