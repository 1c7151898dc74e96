"""`python -m tests.launch.slurm_ends TOOL --json=FILE`: launch/slurm.sbatch on a real SLURM.

``TOOL`` is a script that starts a SLURM of two nodes on loopback: ``TOOL up DIR`` (with a
DIR/slurm.conf; partitions ``low``, which ``high`` preempts), ``TOOL lose DIR N``, ``TOOL node DIR
N`` (a node dies, and comes back), ``TOOL down DIR``. A run of two processes ends in each way that
the table of launch/README.md has; one that goes on has the bits of a run that nothing stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.common import environment
from tests import runs
from tests.kills import runner

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 420  # of one wait
SOON = 30  # the step after which something happens; the run has 120
RESTARTS = 2


class Case(NamedTuple):
    """One way to end, and what is to come of it."""

    disturb: Callable[[Job], None]
    """Called once the job is submitted."""
    state: str
    """SLURM's, at the end."""
    restarts: int
    says: str = ""
    """A pattern that the job's log has."""
    fault: str = ""
    """See slurm_recipe.py."""
    options: tuple[str, ...] = ()
    """Of ``jaxvlm train``."""
    nodes: str = ""
    """Numbers of nodes with which the job may go on."""


class Cluster:
    """A SLURM of two nodes; as a context, stopped at its end."""

    def __init__(self, tool: str, folder: pathlib.Path):
        self.tool, self.folder = tool, folder

    def __enter__(self) -> Cluster:
        self.do("up")
        return self

    def __exit__(self, *_: Any) -> None:
        self.do("down")

    def do(self, what: str, *node: str) -> None:
        """Call the script."""
        subprocess.run([sys.executable, self.tool, what, str(self.folder), *node], check=True)

    def ask(self, *command: str, **variables: str) -> str:
        """What a command of SLURM prints."""
        env = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")} | variables
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout


class Job:
    """A run that was submitted by ``sbatch launch/slurm.sbatch``."""

    def __init__(self, cluster: Cluster, data: pathlib.Path, workdir: pathlib.Path, case: Case):
        self.cluster, self.workdir, self.log = cluster, workdir, workdir.with_suffix(".log")
        recipe = f"{ROOT}/tests/launch/slurm_recipe.py:{data}:{case.fault}"
        asked = ["--cpus-per-task=2", "--gpus-per-node=1", "--time=10", f"--output={self.log}"]
        train = [f"--config={recipe}", f"--workdir={workdir}", *case.options]
        variables = runs.environment(
            devices=1,
            PYTHONPATH=str(ROOT),
            JAX_PLATFORMS="cpu",
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAXVLM_COMMAND=f"{sys.executable} -m jaxvlm train",
            JAXVLM_COMPILE_CACHE=str(runs.compile_cache()),
            JAXVLM_RESTARTS=str(RESTARTS),
            JAXVLM_NODES=case.nodes,
        )
        asked += ["--no-kill"] if case.nodes else []
        script = str(ROOT / "launch" / "slurm.sbatch")
        sbatch = ["sbatch", "--parsable", *asked, script, *train]
        self.number = cluster.ask(*sbatch, **variables).strip()

    def shows(self) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        text = self.cluster.ask("scontrol", "show", "job", "-o", self.number)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def update(self, setting: str) -> None:
        """Change a setting of the job."""
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", setting)

    def step(self) -> int:
        """The last one in metrics.jsonl."""
        rows = runner.rows(self.workdir)
        return rows[-1]["step"] if rows else 0

    def has_joined(self, since: float) -> bool:
        """Whether the processes have met since a time, and none has taken a step."""
        config = self.workdir / "config.json"
        return config.exists() and config.stat().st_mtime > since

    def process(self, number: int) -> int | None:
        """The id of a process of the run; ``None``: it is not there."""
        wanted = {f"SLURM_JOB_ID={self.number}", f"SLURM_PROCID={number}"}
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_text().split("\0")
                if words[1:4] != ["-m", "jaxvlm", "train"]:
                    continue
                if wanted <= set((folder / "environ").read_text().split("\0")):
                    return int(folder.name)
        return None

    def wait(self, until: Callable[[], Any], what: str) -> Any:
        """Wait until something holds, and return it."""
        end = time.monotonic() + LIMIT_S
        while not (found := until()):
            if time.monotonic() > end:
                said = self.log.read_text()[-3000:] if self.log.exists() else ""
                raise RuntimeError(f"job {self.number}: not {what}: {self.shows()} {said}")
            time.sleep(0.1)
        return found

    def reach(self, step: int) -> None:
        """Wait until the run has taken a step."""
        self.wait(lambda: self.step() >= step, f"at step {step}")

    def requeued(self) -> None:
        """Wait until the job is back in the queue, and cut SLURM's pause of two minutes short."""
        self.wait(lambda: self.shows()["JobState"] == "PENDING", "requeued")
        time.sleep(3)  # the batch script's end, if it came later, would end the next start
        with contextlib.suppress(RuntimeError):  # it has started
            self.update("StartTime=now")

    def end(self) -> dict[str, str]:
        """Wait for the job's end, and return its fields."""

        def over() -> dict[str, str] | None:
            shown = self.shows()
            if shown["JobState"] == "PENDING" and shown["Restarts"] != "0":
                self.requeued()
            going = {"PENDING", "RUNNING", "SIGNALING", "COMPLETING", "CONFIGURING", "REQUEUED"}
            return shown if shown["JobState"] not in going else None

        return self.wait(over, "at its end")


def _nothing(job: Job) -> None:
    pass


def _time_limit(job: Job) -> None:
    """SLURM sends the signal of its own accord when less than three minutes are left."""
    job.reach(SOON)
    job.update("TimeLimit=3")
    job.wait(lambda: job.shows()["JobState"] == "PENDING", "requeued")
    job.update("TimeLimit=10")


def _preempt(job: Job) -> None:
    job.reach(SOON)
    words = ["--partition=high", "--nodes=2", "--exclusive", "--time=1", "--output=/dev/null"]
    job.cluster.ask("sbatch", *words, "--wrap=sleep 2")


def _lose(node: str) -> Callable[[Job], None]:
    def lose(job: Job) -> None:
        job.reach(SOON)
        job.cluster.do("lose", node)
        job.wait(lambda: job.shows()["JobState"] == "PENDING", "requeued")
        job.cluster.do("node", node)

    return lose


def _lose_for_good(job: Job) -> None:
    job.reach(SOON)
    job.cluster.do("lose", "2")
    job.wait(lambda: job.shows()["JobState"] not in ("RUNNING", "COMPLETING"), "over")
    job.cluster.do("node", "2")


def _signal(number: int) -> Callable[[Job], None]:
    def send(job: Job) -> None:
        job.reach(SOON)
        os.kill(job.wait(lambda: job.process(1), "running"), number)

    return send


def _cancel(job: Job) -> None:
    job.reach(SOON)
    job.cluster.ask("scancel", job.number)


def _kill_each_start(job: Job) -> None:
    """Before a process's first step, as often as the job starts."""
    for _ in range(RESTARTS + 1):
        begun = job.wait(lambda: job.process(1), "running")
        since = time.time()
        job.wait(functools.partial(job.has_joined, since), "about to train")
        os.kill(begun, signal.SIGKILL)
        job.wait(lambda: job.process(0) is None, "over")
        job.wait(lambda: job.shows()["JobState"] != "RUNNING", "over")
        if job.shows()["JobState"] != "FAILED":  # the last time it is not put back
            job.requeued()


CASES = {
    "finished": Case(_nothing, "COMPLETED", 0),
    "stopped at its time limit": Case(
        _time_limit, "COMPLETED", 1, "back in the queue: stopped", "slow"
    ),
    "preempted": Case(_preempt, "COMPLETED", 1),
    "a node lost": Case(_lose("2"), "COMPLETED", 1),
    "a node lost, and the job elastic": Case(
        _lose_for_good, "COMPLETED", 0, "1 nodes are left; going on with 1", nodes="2 1"
    ),
    "the batch script's node lost": Case(_lose("1"), "COMPLETED", 1),
    "a process killed": Case(
        _signal(signal.SIGKILL), "COMPLETED", 1, "back in the queue: a process was lost"
    ),
    "bad input": Case(_nothing, "FAILED", 0, "process 1 failed with status 2", "missing"),
    "an exception": Case(
        _signal(signal.SIGALRM), "FAILED", 0, "process 1 failed with status 1", "bug"
    ),
    "cancelled": Case(_cancel, "CANCELLED", 0),
    "killed at each start": Case(
        _kill_each_start, "FAILED", RESTARTS, f"given up: {RESTARTS} restarts in a row"
    ),
}


def run(cluster: Cluster, name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Make one case.

    Returns:
        What it ended as, and under ``wrong`` what is not as it has to be.
    """
    case, begin = CASES[name], time.monotonic()
    workdir = folder / name.replace(" ", "_").replace("'", "")
    job = Job(cluster, folder / "data", workdir, case)
    case.disturb(job)
    shown = job.end()
    said = job.log.read_text().replace(f"{folder}/", "")
    wrong = []
    for field, wanted in {"JobState": case.state, "Restarts": str(case.restarts)}.items():
        if shown[field] != wanted:
            wrong.append(f"{field} is {shown[field]}, not {wanted}")
    if not re.search(case.says, said):
        wrong.append(f"the log has no {case.says!r}")
    result = {
        "state": shown["JobState"],
        "restarts": int(shown["Restarts"]),
        "seconds": round(time.monotonic() - begin, 1),
        "says": [line for line in said.splitlines() if line.startswith("slurm.sbatch: ")],
        "last_step": job.step(),
    }
    if case.state == "CANCELLED":
        saved = max(map(int, runner._committed(workdir / "checkpoints")), default=0)
        if saved != job.step() or saved < SOON:
            wrong.append(f"step {job.step()} was taken, {saved} saved")
        job = Job(cluster, folder / "data", workdir, case)  # the same command goes on
        shown = job.end()
    if shown["JobState"] == "COMPLETED" and workdir != folder / "finished":
        if case.nodes:  # another mesh adds in another order
            one, other = (runs.losses(path) for path in (folder / "finished", workdir))
            result["largest_difference"] = max(abs(one[i] - other.get(i, 1e9)) for i in one)
            wrong += ["losses differ"] * (result["largest_difference"] > 1e-5)
        else:
            found = runner.differences("evaluations", folder / "finished", workdir)
            result["same_bits"] = not found
            wrong += found[:3]
    if wrong:
        wrong.append(said[-3000:])
    return result | {"wrong": wrong}


def every(tool: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(case, what came of it); the first is a run that nothing stops."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        runner.prepare(folder / "data")
        with Cluster(tool, folder / "slurm") as cluster:
            for case in names:
                yield case, run(cluster, case, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", help="A script that starts a SLURM of two nodes on loopback.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", help="File for the results.")
    given = parser.parse_args()
    machine = environment()
    machine["command"] = "python -m tests.launch.slurm_ends TOOL --json=FILE"
    results = {}
    for case, result in every(
        given.tool, ["finished", *given.cases[given.cases[0] == "finished" :]]
    ):
        results[case] = result
        print(case, json.dumps(result, indent=1), flush=True)
    if given.json:
        document = {"environment": machine, "cases": results}
        pathlib.Path(given.json).write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(any(result["wrong"] for result in results.values()))
