"""Trials as jobs of a scheduler: the sweep submits them, looks at the queue, and may end meanwhile.

A job belongs to its scheduler: it goes on where the sweep ends, is started again after a lost node,
and is cancelled by the scheduler's own tools alone. What it did is in the trial's folder, which all
nodes and this machine see.
"""

from __future__ import annotations

import abc
import math
import pathlib
import subprocess
import time
from collections.abc import Mapping

from jaxvlm.config import ConfigError
from jaxvlm.sweep.local import UNKNOWN, Ended, how_ended, name_wandb_run
from jaxvlm.sweep.trial import LOG, Trial, read_record, write_record

JOB = "job"
"""Field of a trial's record: its last job, as the scheduler calls it."""
LOOK_S = 10.0
"""Seconds between two looks at the queue, which all trials share."""
SILENT_S = 600.0
"""Seconds for which a scheduler that does not answer is asked again, once it has answered."""
RUNNING, QUEUED = "RUNNING", "QUEUED"


class Jobs(abc.ABC):
    """Submits each trial as a job; see :class:`jaxvlm.sweep.local.Launcher`.

    Args:
        files: id of a trial -> the text of its job's file.
        token: what the ids of runs in Weights & Biases end with.
        look_s: seconds between two looks at the queue; by default :data:`LOOK_S`.
    """

    is_detached = True
    file = ""
    """Name of a job's file in a trial's folder."""

    def __init__(self, files: Mapping[str, str], token: str = "", look_s: float | None = None):
        self.files, self.token = files, token
        self.look_s = LOOK_S if look_s is None else look_s
        self._states: dict[str, str] = {}
        """Job -> the scheduler's word on it; those that are over may be left out."""
        self._jobs: dict[str, str] = {}
        self._looked = self._answered = -math.inf

    @abc.abstractmethod
    def _submit(self, trial: Trial, file: pathlib.Path, log: pathlib.Path) -> str:
        """Submit a job, and return what the scheduler calls it."""

    @abc.abstractmethod
    def _read(self) -> None:
        """Read the queue, into ``_states``."""

    @abc.abstractmethod
    def _active(self, job: str) -> str:
        """:data:`RUNNING` or :data:`QUEUED`; "" of a job that is over or not known."""

    @abc.abstractmethod
    def _job_of(self, trial: Trial, known: str) -> str:
        """The trial's job that is queued or runs; "" if there is none.

        Args:
            trial: whose job is looked for.
            known: the job that is recorded.
        """

    @abc.abstractmethod
    def _without_result(self, job: str, found: Ended) -> Ended:
        """How a job that left no result ended, where ``found`` has its last line."""

    @abc.abstractmethod
    def _keep_output(self, trial: Trial, job: str) -> None:
        """Write the output of a job that is over to the trial's log, if it is not there."""

    def start(self, trial: Trial) -> bool:
        """Submit a trial's job, unless one is queued or runs."""
        if self.find(trial):
            return False
        trial.folder.mkdir(parents=True, exist_ok=True)
        file, log = trial.folder / self.file, trial.folder / LOG
        file.write_text(self.files[trial.id])
        if trial.settings.get("wandb_project"):
            name_wandb_run(trial, self.token)
        size = log.stat().st_size if log.is_file() else 0
        # Before the job is there: a kill in between leaves a job that the next sweep finds.
        known = self._name(trial)
        write_record(trial, log_from=size, **({JOB: known} if known else {}))
        self._jobs[trial.id] = job = self._submit(trial, file, log)
        self._states[job] = "PENDING"
        write_record(trial, log_from=size, **{JOB: job})
        return True

    def find(self, trial: Trial) -> bool:
        """Whether a job of the trial is queued or runs."""
        self._look()
        job = self._job_of(trial, self._recorded(trial))
        if job:
            self._jobs[trial.id] = job
        return bool(job)

    def state(self, trial: Trial) -> str:
        """:data:`RUNNING` or :data:`QUEUED`; "" where no job of the trial is."""
        return self._active(self._jobs[trial.id]) if self.find(trial) else ""

    def ended(self, trial: Trial) -> Ended | None:
        """How a trial's job ended: by its output, else by the scheduler's word."""
        job = self._jobs.get(trial.id) or self._recorded(trial)
        self._look()
        if self._active(job):
            return None
        found = how_ended(trial.folder, None)
        if found.state == UNKNOWN and job:
            self._keep_output(trial, job)
            found = how_ended(trial.folder, None)
        return self._without_result(job, found) if found.state == UNKNOWN and job else found

    def _name(self, trial: Trial) -> str:
        """The name of the trial's job, where it is known before it is submitted; "" elsewhere."""
        return ""

    def _recorded(self, trial: Trial) -> str:
        return str((read_record(trial.folder) or {}).get(JOB, ""))

    def stop(self, trial: Trial) -> None:
        """Nothing: the job is the scheduler's."""
        return

    def _look(self) -> None:
        """Read the queue, at most every few seconds."""
        now = time.monotonic()
        if now - self._looked < self.look_s:
            return
        self._looked = now
        try:
            self._read()
            self._answered = now
        except ConfigError:
            if now - self._answered > SILENT_S:  # also where it has never answered
                raise


def ask(*command: str, on: str, limit_s: float = 120.0) -> str:
    """What a command of a scheduler prints.

    Args:
        *command: its words.
        on: what ``--on`` is, which needs the command.
        limit_s: seconds that it may take.

    Raises:
        ConfigError: it is not installed, or failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s)
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not on the PATH; --on={on} needs it") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} does not answer for {limit_s:.0f} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise ConfigError(f"{command[0]}: {said[-1]}")
    return done.stdout.decode(errors="replace")
