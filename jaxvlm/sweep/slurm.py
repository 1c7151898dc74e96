"""Trials as jobs of SLURM."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Mapping

from jaxvlm.config import ConfigError
from jaxvlm.parallel.distributed import exit_status
from jaxvlm.sweep import jobs
from jaxvlm.sweep.local import FAILED, LOST, Ended
from jaxvlm.sweep.trial import Trial

_OVER = ("", "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL",
         "OUT_OF_MEMORY", "TIMEOUT")  # fmt: skip
_ask = functools.partial(jobs.ask, on="slurm")


class Slurm(jobs.Jobs):
    """Submits each trial by ``sbatch``, with its batch file."""

    file = "job.sbatch"

    def __init__(self, files: Mapping[str, str], token: str = "", look_s: float | None = None):
        super().__init__(files, token, look_s)
        self._commands: dict[str, str] = {}

    def _submit(self, trial: Trial, file: pathlib.Path, log: pathlib.Path) -> str:
        out = _ask("sbatch", "--parsable", f"--output={log.resolve()}", str(file))
        return out.strip().split(";")[0]

    def _job_of(self, trial: Trial, known: str) -> str:
        """The recorded job, or the one of the batch file in its folder."""
        if self._active(known):
            return known
        file = str((trial.folder / self.file).resolve())
        return next((job for job, command in self._commands.items() if command == file), "")

    def _active(self, job: str) -> str:
        state = self._states.get(job, "")
        if state in _OVER:
            return ""
        return jobs.RUNNING if state == "RUNNING" else jobs.QUEUED

    def _read(self) -> None:
        lines = _ask("squeue", "-h", "--me", "-o", "%i|%T|%o").splitlines()
        rows = [line.split("|", 2) for line in lines if line.count("|") >= 2]
        self._states = {job: state for job, state, _ in rows}
        self._commands = {job: command for job, state, command in rows if state not in _OVER}

    def _keep_output(self, trial: Trial, job: str) -> None:
        """Nothing: SLURM writes it there itself."""

    def _without_result(self, job: str, found: Ended) -> Ended:
        state, code = _end_of(job)
        if state == "CANCELLED":
            return Ended(FAILED, f"job {job} was cancelled: {found.line}")
        if state == "FAILED" and 0 < code < 128 and code != exit_status.LOST:
            return Ended(FAILED, found.line)
        return Ended(LOST, f"job {job} ended as {state}: {found.line}")


def _end_of(job: str) -> tuple[str, int]:
    """State and exit status of a job that is over, while SLURM still knows it."""
    try:
        out = _ask("scontrol", "show", "job", "-o", job)
    except ConfigError:
        return "UNKNOWN", 0
    fields = dict(re.findall(r"(\w+)=(\S*)", out))
    return fields.get("JobState", "UNKNOWN"), int(fields.get("ExitCode", "0:0").split(":")[0])
