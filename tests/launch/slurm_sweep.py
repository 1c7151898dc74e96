"""`python -m tests.launch.slurm_sweep TOOL --json=FILE`: `jaxvlm sweep --on=slurm` on a real SLURM.

``TOOL`` is that of slurm_ends.py. A sweep of four trials, two jobs at a time, is killed once while
jobs run and once while they wait, and given again each time; one trial is cancelled by scancel.
Every other one is submitted once, and has the losses of the same sweep on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.common import environment
from tests import runs
from tests.kills import runner
from tests.launch.slurm_ends import LIMIT_S, ROOT, Cluster

SEEDS = (0, 1, 2, 3)


class Sweep:
    """The command, with one grid."""

    def __init__(self, workdir: pathlib.Path, data: pathlib.Path, env: dict[str, str], *on: str):
        recipe = f"--config={ROOT}/tests/launch/slurm_recipe.py:{data}:slow" * bool(on)
        recipe = recipe or f"--config={ROOT}/tests/launch/slurm_recipe.py:{data}"
        self.workdir, self.env, self.log = workdir, env, workdir.with_suffix(".txt")
        self.command = [
            *(sys.executable, "-m", "jaxvlm", "sweep", recipe, f"--workdir={workdir}", "--json"),
            *(f"--grid=seed={','.join(map(str, SEEDS))}", "--config.steps=40", *on),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again."""
        self.log.write_text("")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command, env=self.env, cwd=ROOT, stdout=log)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.wait()

    def end(self) -> dict[str, Any]:
        """Wait for its end; its result."""
        self.process.wait(timeout=LIMIT_S)
        return json.loads(self.said().splitlines()[-1])

    def said(self) -> str:
        """What it has printed since its last start."""
        return self.log.read_text()

    def trials(self) -> dict[int, pathlib.Path]:
        """Seed -> folder, of those that were started."""
        found = self.workdir.glob("*/trial.json")
        return {json.loads(p.read_text())["values"]["seed"]: p.parent for p in found}


def wait(until: Any, what: str) -> None:
    """Wait until something holds."""
    end = time.monotonic() + LIMIT_S
    while not until():
        if time.monotonic() > end:
            raise RuntimeError(f"not {what}")
        time.sleep(0.2)


def run(tool: str, folder: pathlib.Path) -> dict[str, Any]:
    """The sweep, killed twice; what came of it, and under ``wrong`` what is not as it has to be."""
    runner.prepare(folder / "data")
    variables = runs.environment(
        devices=1, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu",
        JAXVLM_COMPILE_CACHE=str(runs.compile_cache()),
        PATH=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    )  # fmt: skip
    plain = Sweep(folder / "plain", folder / "data", variables)
    plain.start()
    plain.end()
    with Cluster(tool, folder / "slurm") as cluster:
        variables["SLURM_CONF"] = str(cluster.folder / "slurm.conf")
        launch = "--launch=--devices=cpu:1 --time=0:10:00 --partition=low"
        sweep = Sweep(
            folder / "s", folder / "data", variables, "--on=slurm", "--parallel=2", launch
        )

        def jobs() -> list[dict[str, str]]:
            text = cluster.ask("scontrol", "show", "job", "-o")
            return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]

        def steps() -> list[int]:
            rows = [runner.rows(path) for path in sweep.trials().values()]
            return [found[-1]["step"] for found in rows if found]

        sweep.start()
        wait(lambda: len(sweep.trials()) == 2, "two are submitted")
        sweep.kill()
        sweep.start()
        wait(lambda: len(steps()) == 2 and min(steps()) >= 5, "two train")
        sweep.kill()
        cancelled = next(job for job in jobs() if job["JobState"] == "RUNNING")
        sweep.start()
        wait(lambda: "runs since an earlier sweep" in sweep.said(), "found")
        cluster.ask("scancel", cancelled["JobId"])
        first = sweep.end()
        names = [job["JobName"] for job in jobs()]
        sweep.start()  # tries the one that was cancelled again
        second = sweep.end()
        again = [job["JobName"] for job in jobs()]
    wrong = []
    if first["counts"] != {"done": 3, "stopped": 1}:  # scancel's SIGTERM made it save
        wrong.append(f"first: {first['counts']}")
    if second["counts"] != {"done": 4}:
        wrong.append(f"second: {second['counts']}")
    if len(names) != 4 or len(set(names)) != 4:
        wrong.append(f"jobs: {names}")
    if len(again) != 5 or len(set(again)) != 4:
        wrong.append(f"jobs at the end: {again}")
    for seed, path in plain.trials().items():
        wrong += runner.differences("losses", path, sweep.trials()[seed])[:2]
    return {"first": first["counts"], "second": second["counts"],
            "jobs": len(again), "same_bits": not wrong, "wrong": wrong}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", help="A script that starts a SLURM of two nodes on loopback.")
    parser.add_argument("--json", help="File for the results.")
    given = parser.parse_args()
    machine = environment()
    machine["command"] = "python -m tests.launch.slurm_sweep TOOL --json=FILE"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        result = run(given.tool, pathlib.Path(name))
    print(json.dumps(result, indent=1))
    if given.json:
        document = {"environment": machine, "sweep": result}
        pathlib.Path(given.json).write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(bool(result["wrong"]))
