"""A sweep of stubs: ``python -m tests.sweep.driver WORKDIR GRID ... [parallel=N]``."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from jaxvlm.config import Config, DataConfig
from jaxvlm.sweep import definition, sweep
from jaxvlm.sweep.trial import Trial

ROOT = pathlib.Path(__file__).resolve().parents[2]
STUB = pathlib.Path(__file__).with_name("stub.py")


def resolve(recipe: str, overrides: Mapping[str, str]) -> Config:
    """``recipe`` is the number of steps."""
    config = Config(data=DataConfig(train="x", eval="y"), steps=int(recipe))
    checkpoint = dataclasses.replace(config.checkpoint, metric="exact_match")
    config = dataclasses.replace(config, checkpoint=checkpoint)
    for path, text in overrides.items():
        group, _, name = path.rpartition(".")
        value = ast.literal_eval(text)
        if group:
            value = dataclasses.replace(getattr(config, group), **{name: float(value)})
        config = dataclasses.replace(config, **{group or name: value})
    return config


def command(trial: Trial) -> list[str]:
    return [sys.executable, "-I", "-S", str(STUB), str(trial.folder), json.dumps(trial.values)]


def run(
    workdir: pathlib.Path, *grids: str, recipe="10", parallel=1, devices=(), say=print, on="local"
):
    rows = definition.read_rows(grids)
    asked = sweep.Definition(recipe, {}, rows, parallel=parallel, devices=list(devices), on=on)
    asked = sweep.resolved(workdir, asked, resolve)
    asked = sweep.with_token(workdir, asked)
    files = None
    if on == "slurm":
        lines = {trial.id: shlex.join(command(trial)) for trial in asked.trials}
        files = {name: f"#!/bin/bash\n{line}\n" for name, line in lines.items()}
    elif on == "gke":
        prefix = sweep.job_prefix(workdir, asked)
        files = {x.id: json.dumps(jobset(f"{prefix}-{x.id}", command(x))) for x in asked.trials}
    return sweep.run_sweep(workdir, asked, say, command, poll_s=0.01, files=files)


def jobset(name: str, words: list[str]) -> dict[str, object]:
    """A manifest, of what the tests' kubectl reads."""
    return {"kind": "JobSet", "metadata": {"name": name}, "command": words}


def kill_thrice(workdir: pathlib.Path, grid: str, on: str) -> None:
    """Start a sweep of its own process three times, each killed a little later than the last."""
    words = [sys.executable, "-m", __name__, str(workdir), grid, "parallel=4", f"on={on}"]
    for delay in (0.8, 1.0, 1.3):
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
        time.sleep(delay)
        process.kill()
        process.wait()


def interrupted(workdir: pathlib.Path, grid: str, on: str) -> list[str]:
    """What a sweep says that SIGTERM reaches at its fourth line."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    assert not run(workdir, grid, parallel=4, say=say, on=on)
    return said


def counts(workdir: pathlib.Path) -> dict[str, int]:
    """Trials by state, read from the folder: a sweep need not run."""
    return sweep.read_status(workdir)["counts"]


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


if __name__ == "__main__":
    words = [text for text in sys.argv[2:] if text.startswith(("parallel=", "on="))]
    grids = [text for text in sys.argv[2:] if text not in words]
    options = dict(text.split("=") for text in words)
    parallel, on = int(options.get("parallel", "1")), options.get("on", "local")
    whole = run(pathlib.Path(sys.argv[1]), *grids, parallel=parallel, on=on)
    print("whole" if whole else "stopped", flush=True)
