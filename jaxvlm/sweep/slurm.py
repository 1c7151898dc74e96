"""Trials as jobs of SLURM: the sweep submits them, looks at the queue, and may end meanwhile.

A job belongs to SLURM: it goes on where the sweep ends, is put back after a lost node, and is
cancelled by ``scancel`` alone. What it did is in the trial's folder, which all nodes see.
"""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Mapping

from jaxvlm.config import ConfigError
from jaxvlm.parallel.distributed import exit_status
from jaxvlm.sweep.local import FAILED, LOST, UNKNOWN, Ended, how_ended, name_wandb_run
from jaxvlm.sweep.trial import LOG, Trial, read_record, write_record

JOB = "slurm_job"
"""Field of a trial's record: the number of its last job."""
_SCRIPT = "job.sbatch"
LOOK_S = 10.0
"""Seconds between two looks at the queue, which all trials share."""
_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
         "TIMEOUT")  # fmt: skip


class Slurm:
    """Submits each trial as a job; see :class:`jaxvlm.sweep.local.Launcher`.

    Args:
        scripts: id of a trial -> its batch file.
        token: what the ids of runs in Weights & Biases end with.
        look_s: seconds between two looks at the queue; by default :data:`LOOK_S`.
    """

    is_detached = True

    def __init__(self, scripts: Mapping[str, str], token: str = "", look_s: float | None = None):
        self.scripts, self.token = scripts, token
        self.look_s = LOOK_S if look_s is None else look_s
        self._jobs: dict[str, str] = {}
        self._states: dict[str, str] = {}
        self._commands: dict[str, str] = {}
        self._looked = -math.inf

    def start(self, trial: Trial) -> bool:
        """Submit a trial's job, unless one is queued or runs."""
        if self.find(trial):
            return False
        trial.folder.mkdir(parents=True, exist_ok=True)
        script, log = trial.folder / _SCRIPT, trial.folder / LOG
        script.write_text(self.scripts[trial.id])
        if trial.settings.get("wandb_project"):
            name_wandb_run(trial, self.token)
        size = log.stat().st_size if log.is_file() else 0
        # Before the job is there: a kill in between leaves a job that the next sweep finds by name.
        write_record(trial, log_from=size)
        out = _ask("sbatch", "--parsable", f"--output={log.resolve()}", str(script))
        self._jobs[trial.id] = number = out.strip().split(";")[0]
        self._states[number] = "PENDING"
        write_record(trial, log_from=size, **{JOB: number})
        return True

    def find(self, trial: Trial) -> bool:
        """Whether a job of the trial is queued or runs."""
        known = (read_record(trial.folder) or {}).get(JOB, "")
        number = self._job_of(trial, known)
        if not number:
            return False
        self._jobs[trial.id] = number
        return True

    def _job_of(self, trial: Trial, known: str) -> str:
        """The number of a trial's job in the queue: the recorded one, or one of its folder."""
        self._look()
        if self._is_queued(known):
            return known
        script = str((trial.folder / _SCRIPT).resolve())
        return next((n for n, command in self._commands.items() if command == script), "")

    def state(self, trial: Trial) -> str:
        """SLURM's state of the trial's job; "" where none is queued or runs."""
        return self._states[self._jobs[trial.id]] if self.find(trial) else ""

    def ended(self, trial: Trial) -> Ended | None:
        """How a trial's job ended: by its output, else by SLURM's state."""
        number = self._jobs.get(trial.id) or (read_record(trial.folder) or {}).get(JOB, "")
        self._look()
        if self._is_queued(number):
            return None
        found = how_ended(trial.folder, None)
        if found.state != UNKNOWN or not number:
            return found
        state, code = _end_of(number)
        if state == "CANCELLED":
            return Ended(FAILED, f"job {number} was cancelled: {found.line}")
        if state == "FAILED" and 0 < code < 128 and code != exit_status.LOST:
            return Ended(FAILED, found.line)
        return Ended(LOST, f"job {number} ended as {state}: {found.line}")

    def stop(self, trial: Trial) -> None:
        """Nothing: the job is SLURM's."""

    def _is_queued(self, number: str) -> bool:
        return bool(number) and self._states.get(number, "") not in ("", *_OVER)

    def _look(self) -> None:
        """Read the queue, at most every few seconds."""
        if time.monotonic() - self._looked < self.look_s:
            return
        lines = _ask("squeue", "-h", "--me", "-o", "%i|%T|%o").splitlines()
        rows = [line.split("|", 2) for line in lines if line.count("|") >= 2]
        self._states = {number: state for number, state, _ in rows}
        self._commands = {number: command for number, state, command in rows if state not in _OVER}
        self._looked = time.monotonic()


def _end_of(number: str) -> tuple[str, int]:
    """State and exit status of a job that is over, while SLURM still knows it."""
    try:
        out = _ask("scontrol", "show", "job", "-o", number)
    except ConfigError:
        return "UNKNOWN", 0
    fields = dict(re.findall(r"(\w+)=(\S*)", out))
    return fields.get("JobState", "UNKNOWN"), int(fields.get("ExitCode", "0:0").split(":")[0])


def _ask(*command: str) -> str:
    """What a command of SLURM prints.

    Raises:
        ConfigError: it is not installed, or failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]} is not on the PATH; --on=slurm needs SLURM's tools"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} does not answer for two minutes") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise ConfigError(f"{command[0]}: {said[-1]}")
    return done.stdout
