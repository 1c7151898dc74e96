"""Trials as processes of this machine: how one starts, how it ended, and how it is stopped.

What runs trials elsewhere has the methods of :class:`Launcher`. A trial outlives a sweep that is
killed, so what it did is in its folder: its output, and a lock that its process inherits and holds
for as long as it lives.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxvlm.checkpoint.run_record import write_whole
from jaxvlm.config import json_text
from jaxvlm.parallel.distributed import exit_status
from jaxvlm.sweep.trial import LOG, Trial, read_record, write_record

DONE, STOPPED, FAILED, LOST, UNKNOWN = ENDS = ("done", "stopped", "failed", "lost", "unknown")
"""How a trial's process ended: its run is over; it was told to stop, and saved; with an error that
comes again; by a lost peer or a signal; it outlived its sweep, and left no result."""
_LOCK = ".trial.lock"
_TAIL = 65_536


class Ended(NamedTuple):
    """How a trial's process ended."""

    state: str
    """One of :data:`ENDS`."""
    line: str = ""
    """The last line of its output; "" where all went well."""


@runtime_checkable
class Launcher(Protocol):
    """Runs trials somewhere."""

    is_detached: bool
    """Whether trials go on where the sweep ends: it then only stops to look."""

    def start(self, trial: Trial) -> bool:
        """Start a trial, or resume it; False if it is running already, which it then goes on to."""
        ...

    def find(self, trial: Trial) -> bool:
        """Whether the trial runs since an earlier sweep; :meth:`ended` then says how it ends."""
        ...

    def ended(self, trial: Trial) -> Ended | None:
        """How a trial's last process ended, also of an earlier sweep; ``None`` while it runs."""
        ...

    def stop(self, trial: Trial) -> None:
        """Ask a running trial to save and end; it ends later."""
        ...


class Local:
    """Runs each trial as a process of this machine.

    Args:
        command: the program and arguments of a trial.
        devices: lists of GPUs, as of CUDA_VISIBLE_DEVICES, of which each trial gets one to itself;
            () leaves the variable as it is.
        name: of the sweep, the group of its runs in Weights & Biases.
        token: what the ids of these runs end with, so that no other sweep has them.
    """

    is_detached = False

    def __init__(
        self,
        command: Callable[[Trial], list[str]],
        devices: Sequence[str] = (),
        name: str = "",
        token: str = "",
    ):
        self.command, self.devices, self.name, self.token = command, devices, name, token
        self._processes: dict[str, subprocess.Popen[bytes] | None] = {}
        self._used: dict[str, str] = {}

    def start(self, trial: Trial) -> bool:
        """Start a trial's process, which holds the trial's lock; see :class:`Launcher`."""
        trial.folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(trial.folder)
        if lock is None:
            self._processes[trial.id] = None
            return False
        os.ftruncate(lock, 0)
        try:
            free = [device for device in self.devices if device not in self._used.values()]
            env = dict(os.environ)
            if free:
                self._used[trial.id] = env["CUDA_VISIBLE_DEVICES"] = free[0]
            if trial.settings.get("wandb_project"):
                env["WANDB_RUN_GROUP"] = self.name
                name_wandb_run(trial, self.token)
            command = self.command(trial)
            with (trial.folder / LOG).open("ab") as log:
                write_record(trial, log_from=log.tell(), devices=self._used.get(trial.id, ""))
                log.write(f"$ {shlex.join(command)}\n".encode())
                log.flush()
                # A session of its own: Ctrl-C in a terminal would end it before it saves.
                process = self._processes[trial.id] = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    pass_fds=(lock,), start_new_session=True,
                )  # fmt: skip
                os.pwrite(lock, str(process.pid).encode(), 0)  # for who finds it
        finally:
            os.close(lock)  # the process has inherited it
        return True

    def find(self, trial: Trial) -> bool:
        """Whether a process of an earlier sweep holds the trial's lock; see :class:`Launcher`."""
        if not is_running(trial.folder):
            return False
        self._processes[trial.id] = None
        if device := (read_record(trial.folder) or {}).get("devices"):
            self._used[trial.id] = device
        return True

    def ended(self, trial: Trial) -> Ended | None:
        """How a trial's process ended, by its exit status and its output; see :class:`Launcher`."""
        process = self._processes.get(trial.id)
        if process is None and is_running(trial.folder):
            return None
        code = process.poll() if process is not None else None
        if process is not None and code is None:
            return None
        self._used.pop(trial.id, None)
        return how_ended(trial.folder, code)

    def stop(self, trial: Trial) -> None:
        """SIGTERM: a training run saves at its next step; a second one ends it at once."""
        process = self._processes[trial.id]
        if process is not None:
            process.send_signal(signal.SIGTERM)
        elif pid := (trial.folder / _LOCK).read_text():  # whose process lives: the lock is held
            os.kill(int(pid), signal.SIGTERM)


def train_command(recipe: str, overrides: dict[str, str]) -> Callable[[Trial], list[str]]:
    """``python -m jaxvlm train`` of a trial.

    Args:
        recipe: what ``--config`` is.
        overrides: path of a setting -> its value's text, of all trials.
    """

    def command(trial: Trial) -> list[str]:
        return [sys.executable, "-m", "jaxvlm", *train_arguments(recipe, overrides, trial)]

    return command


def train_arguments(recipe: str, overrides: Mapping[str, str], trial: Trial) -> list[str]:
    """``train`` and its flags for a trial; see :func:`train_command`."""
    settings = {**overrides, **trial.overrides}
    return [
        *("train", f"--config={recipe}", f"--workdir={trial.folder}", "--json"),
        *(f"--config.{path}={text}" for path, text in settings.items()),
    ]


def how_ended(folder: pathlib.Path, code: int | None) -> Ended:
    """How a trial's last process ended.

    Args:
        folder: of the trial.
        code: the process's exit status, negative of a signal; ``None``: not known.
    """
    lines = _output(folder)
    last = lines[-1][:300] if lines else "no output"
    if result := _result(lines):
        if not code:
            return Ended(STOPPED if result["ended"] == "preempted" else DONE)
    elif code is None:
        return Ended(UNKNOWN, last)
    if code == 0:
        return Ended(FAILED, f"it ended without a result: {last}")
    if code is not None and (code == exit_status.LOST or code < 0):
        return Ended(LOST, last if code > 0 else f"{signal.Signals(-code).name}: {last}")
    return Ended(FAILED, last)


def is_running(folder: pathlib.Path) -> bool:
    """Whether a process of a trial lives, whoever started it."""
    if not (folder / _LOCK).is_file():
        return False
    lock = _lock(folder)
    if lock is not None:
        os.close(lock)
    return lock is None


def _lock(folder: pathlib.Path) -> int | None:
    """Take a trial's lock, and return its file descriptor; ``None`` where a process holds it.

    A lock of flock belongs to what was opened, so a child that inherits the descriptor holds it.
    """
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        pass  # a file system without locks: the run's own lock is left
    return lock


def name_wandb_run(trial: Trial, token: str) -> None:
    """Give a run in Weights & Biases the trial's id, in the file that a run keeps its own in."""
    path = trial.folder / "wandb_id"  # of jaxvlm.train.loggers
    if not path.is_file():
        write_whole(path, f"{trial.id}-{token}")


def _output(folder: pathlib.Path) -> list[str]:
    """The last lines that a trial's last process wrote, without empty ones."""
    path = folder / LOG
    begin = (read_record(folder) or {}).get("log_from", 0)
    if not path.is_file():
        return []
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(begin if begin <= size else 0, size - _TAIL))
        text = log.read().decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n")]
    return [line for line in lines if line and not line.startswith("$ ")]


def _result(lines: list[str]) -> dict[str, Any]:
    """The result that ``--json`` printed; {}: there is none. Libraries may write after it."""
    for line in reversed(lines[-20:]):
        if line.startswith("{"):
            try:
                value = json_text.parse(line)
            except ValueError:
                continue
            if isinstance(value, dict) and "ended" in value:
                return value
    return {}
