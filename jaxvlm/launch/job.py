"""A job: a command of jaxvlm and the machine that it runs on, one process a host."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from jaxvlm.config import ConfigError
from jaxvlm.parallel.distributed import places
from jaxvlm.parallel.distributed.exit_status import LOST
from jaxvlm.planner.hardware.machine import Machine

PORT = places.FIRST_PORT
"""Port on which process 0 listens, where a target does not choose one."""


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
    sizes: tuple[int, ...] = ()
    """Numbers of processes with which it may go on where some are lost, most first; (): with all
    alone."""
    recipe: str = ""
    """Text of the recipe, where the target has no copy of its file."""

    @property
    def shipped(self) -> str:
        """Where a target writes the recipe."""
        return f"/tmp/jaxvlm-{self.name}/recipe.py"

    @property
    def command(self) -> list[str]:
        """Words of the command."""
        words = ["jaxvlm", *self.arguments]
        if not self.recipe:
            return words
        for i, word in enumerate(words):
            flag, is_given, path = word.partition("=")
            if flag not in ("--config", "-config"):
                continue
            at, lead = (i, f"{flag}=") if is_given else (i + 1, "")
            _, colon, argument = (path if is_given else words[at]).partition(":")
            words[at] = f"{lead}{self.shipped}{colon}{argument}"
        return words

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
    """The user's own tool, and how it is called, with ``FILE`` and ``FOLDER`` in it."""
    note: str = ""
    """What to do next, for people."""
    in_place: bool = False
    """Whether the call takes this process's place: it is the job, and gets its signals."""

    def with_files_in(self, folder: str) -> Rendered:
        """Return the job with the names of its files where they are written."""

        def placed(text: str) -> str:
            return text.replace(FILE, f"{folder}/{first}").replace(FOLDER, folder)

        first = next(iter(self.files), "")

        command = tuple(placed(word) for word in self.command)
        return self._replace(command=command, note=placed(self.note))


FILE, FOLDER = "\0file", "\0folder"
"""Stand for a job's first file, and for its files' folder; no word of a user has them."""


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


def environment_of(pairs: list[str], machine: Machine) -> tuple[tuple[str, str], ...]:
    """Split ``NAME=VALUE`` flags, and let JAX refuse to train on the CPUs of an accelerator's host.

    Raises:
        ConfigError: one is not of that form.
    """
    platforms = {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}
    found = [("JAX_PLATFORMS", platforms[machine.platform])] if machine.platform != "cpu" else []
    for pair in pairs:
        name, is_given, value = pair.partition("=")
        if not is_given or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"--env={pair}: give NAME=VALUE")
        found.append((name, value))
    return tuple(dict(found).items())


def check_line(flag: str, value: Any) -> None:
    """Refuse a flag's value of several lines, which a job's file would read as its own.

    Raises:
        ConfigError: it has several.
    """
    if isinstance(value, str) and re.search(r"[\x00-\x1f]", value):
        raise ConfigError(f"--{flag}={value!r}: give one line, without control characters")


def exports(job: Job, stopped: bool = True) -> str:
    """Lines of a shell that set the job's variables, and write its recipe.

    Args:
        job: to run.
        stopped: whether a run that SIGTERM stopped is to end with 75, to be started again.
    """
    pairs = (*job.environment, *([STOPPED] if stopped else []))
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in pairs)
    if job.recipe:
        folder = job.shipped.rpartition("/")[0]
        lines += f"mkdir -p {folder}\nprintf %s {shlex.quote(job.recipe)} > {job.shipped}\n"
    return lines


STOPPED = ("JAXVLM_STOPPED_STATUS", str(LOST))
"""Lets a run that is stopped before its end say so, where the target can't know it."""


def setup(install: str) -> str:
    """Lines of a shell that install jaxvlm in an environment of its own, with its own Python."""
    if not install:
        return ""
    pip = "python3 -m pip install --quiet --user"
    return (
        f"{{ {pip} uv || {pip} --break-system-packages uv; }} || exit 2\n"
        'export PATH="$HOME/.local/bin:$PATH"\n'
        '[ -d "$HOME/.jaxvlm" ] || uv venv --quiet --python 3.12 "$HOME/.jaxvlm" || exit 2\n'
        f'uv pip install --quiet --python "$HOME/.jaxvlm" {shlex.quote(install)} || exit 2\n'
        'export PATH="$HOME/.jaxvlm/bin:$PATH"\n'
    )


def restarting(job: Job, line: str = "") -> str:
    """Lines of a shell that run the command again until it ends with 0, 1 or 2.

    A try of a few minutes did no work: another host ended for good, and the others wait for it in
    vain. After some of these in a row they give up.
    """
    return f"""status={LOST} tries=0 short=0
while [ "$tries" -le {job.restarts} ] && [ "$short" -lt 3 ]; do
  tries=$((tries + 1)) began=$SECONDS status=0
  {line or job.line} || status=$?
  case "$status" in 0 | 1 | 2) break ;; esac
  if [ $((SECONDS - began)) -lt 600 ]; then short=$((short + 1)); else short=0; fi
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
