"""Trials as JobSets of GKE, or of another Kubernetes cluster with JobSet, by ``kubectl``."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.sweep import jobs
from jaxvlm.sweep.local import DONE, FAILED, Ended
from jaxvlm.sweep.trial import LOG, Trial, read_record

_COMPLETED, _FAILED = "Completed", "Failed"
"""Conditions of a JobSet that is over. Source: jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2"""
_INDEX = "batch.kubernetes.io/job-completion-index"
_ask = functools.partial(jobs.ask, on="gke")


class Gke(jobs.Jobs):
    """Applies each trial's manifest; its JobSet's name says whose trial it is.

    Args:
        files: id of a trial -> its manifest.
        prefix: what the names of the sweep's JobSets begin with, before ``-`` and the trial's id.
        namespace: of the cluster.
        token: see :class:`jaxvlm.sweep.jobs.Jobs`.
        look_s: see there.
    """

    file = "job.yaml"

    def __init__(
        self,
        files: Mapping[str, str],
        prefix: str,
        namespace: str,
        token: str = "",
        look_s: float | None = None,
    ):
        super().__init__(files, token, look_s)
        self.prefix, self.namespace = prefix, namespace
        self._messages: dict[str, str] = {}

    def _kubectl(self, verb: str, *words: str, limit_s: float = 120.0) -> str:
        return _ask("kubectl", verb, f"--namespace={self.namespace}", *words, limit_s=limit_s)

    def _submit(self, trial: Trial, file: pathlib.Path, log: pathlib.Path) -> str:
        name = self._name(trial)
        if name in self._states:  # of an earlier try; a name is a JobSet's alone
            # With its pods, which may take their grace: a new one would adopt what is left of it.
            how = ("--ignore-not-found", "--cascade=foreground", "--wait", "--timeout=300s")
            self._kubectl("delete", "jobset", name, *how, limit_s=330.0)
        self._kubectl("apply", f"--filename={file}")
        return name

    def _name(self, trial: Trial) -> str:
        return f"{self.prefix}-{trial.id}"

    def _job_of(self, trial: Trial, known: str) -> str:
        name = self._name(trial)
        return name if self._active(name) else ""

    def _active(self, job: str) -> str:
        state = self._states.get(job, "")
        if state in ("", _COMPLETED, _FAILED):
            return ""
        return jobs.RUNNING if state == jobs.RUNNING else jobs.QUEUED

    def _read(self) -> None:
        found = json.loads(self._kubectl("get", "jobsets", "--output=json"))["items"]
        self._states, self._messages = {}, {}
        for jobset in found:
            name = jobset["metadata"]["name"]
            if name.startswith(f"{self.prefix}-"):
                self._states[name], self._messages[name] = _state_of(jobset.get("status", {}))

    def _keep_output(self, trial: Trial, job: str) -> None:
        """Of the pod of process 0, or of any that is left, while the cluster has them."""
        log, begin = trial.folder / LOG, (read_record(trial.folder) or {}).get("log_from", 0)
        is_kept = log.is_file() and log.stat().st_size > begin
        if is_kept or job not in self._states:
            return
        of_jobset = f"jobset.sigs.k8s.io/jobset-name={job}"
        first = f"{of_jobset},jobset.sigs.k8s.io/job-index=0,{_INDEX}=0"
        for selector in (first, of_jobset):
            try:
                text = self._kubectl("logs", f"--selector={selector}", "--tail=-1")
            except ConfigError:
                text = ""
            if text:
                with log.open("a") as file:
                    file.write(text)
                return

    def _without_result(self, job: str, found: Ended) -> Ended:
        state = self._states.get(job, "")
        if state == _COMPLETED:
            return Ended(DONE)
        if state == _FAILED:
            return Ended(FAILED, f"JobSet {job}: {self._messages[job]}: {found.line}")
        return Ended(FAILED, f"JobSet {job} is gone; the same command starts it again")


def _state_of(status: Mapping[str, Any]) -> tuple[str, str]:
    """A JobSet's state, and the message of a condition that says that it is over."""
    for condition in status.get("conditions", []):
        if condition["type"] in (_COMPLETED, _FAILED) and condition["status"] == "True":
            return condition["type"], condition.get("message", "")
    parts = status.get("replicatedJobsStatus", [])
    runs = any(part.get("ready") for part in parts)  # active ones may still be pending
    return jobs.RUNNING if runs else jobs.QUEUED, ""
