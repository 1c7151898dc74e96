"""A run that loses a process goes on with the others, with the batches that it would have had."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import time

import pytest
from runs import HERE, command, environment, finish, losses, start

from jaxvlm.train.metrics import DOWN, STEPS, read_goodput

STEPS_TAKEN = 12


def launched(workdir, data, rows, least, *more):
    train = [f"--config={HERE / 'recipe.py'}:{data}", f"--workdir={workdir}"]
    train += [f"--config.data.batch_size={rows}", f"--config.data.eval={data}", *more]
    launch = ["launch", "local", "--devices=cpu:4", f"--min_nodes={least}", "--", "train", *train]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(*launch), env=environment(), **pipes)


def process_of(workdir: pathlib.Path, number: int) -> int | None:
    """The id of a process of the run."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            variables = (folder / "environ").read_text().split("\0")
        except OSError:
            continue
        is_run = f"--workdir={workdir}" in words and words[3:4] == ["train"]
        if is_run and f"JAXVLM_PROCESS_ID={number}" in variables:
            return int(folder.name)
    return None


def kill_at(workdir: pathlib.Path, step: int, number: int, running: subprocess.Popen) -> None:
    """Kill a process once the run has taken a step."""
    metrics = workdir / "metrics.jsonl"
    while running.poll() is None:
        rows = metrics.read_text().splitlines() if metrics.exists() else []
        if rows and json.loads(rows[-1])["step"] >= step:
            break
        time.sleep(0.02)
    victim = process_of(workdir, number)
    assert victim is not None, "the run was over"
    os.kill(victim, signal.SIGKILL)


@pytest.mark.long
def test_ctrl_c_has_all_of_them_save(data, tmp_path):
    running = launched(tmp_path, data, 12, 2, "--config.steps=100000", "--config.data.eval=")
    while len(losses(tmp_path) if (tmp_path / "metrics.jsonl").exists() else ()) < 2:
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    said = "".join(running.communicate(timeout=300))
    assert running.returncode == 130 and "stopped; the same command resumes" in said, said[-2000:]
    saved = max(int(x.name) for x in (tmp_path / "checkpoints").iterdir() if x.name.isdigit())
    assert saved == max(losses(tmp_path)) > 0, said[-2000:]
    assert process_of(tmp_path, 0) is None and "starting again" not in said


DRAWS = 10


@pytest.mark.long
@pytest.mark.parametrize(
    "rows, least, left, draw",
    [(12, 3, 3, 0), (32, 2, 2, 0), *((12, 2, 3, draw) for draw in range(1, DRAWS))],
)
def test_a_run_goes_on_with_those_that_are_left(data, tmp_path, rows, least, left, draw):
    drawn = random.Random(draw)
    step, number = drawn.randrange(1, STEPS_TAKEN - 1), drawn.randrange(4)
    alone, elastic = tmp_path / "alone", tmp_path / "elastic"
    given = (f"--config.data.batch_size={rows}", f"--config.data.eval={data}")
    finish(start(alone, data, *given, devices=1))
    begun = time.time()
    running = launched(elastic, data, rows, least)
    kill_at(elastic, step, number, running)
    said = finish(running)
    whole = time.time() - begun
    assert f"1 of 4 processes lost; starting again with {left}" in said
    one, several = losses(alone), losses(elastic)
    assert one.keys() == several.keys() == set(range(1, STEPS_TAKEN + 1))
    assert max(abs(one[i] - several[i]) for i in one) < 1e-5, (step, number)
    made = json.loads((elastic / "config.json").read_text())
    assert made["devices"].startswith(f"{left} x")
    seconds = read_goodput(elastic)
    # Besides: Python's start of the launcher, its plan, and the processes' way out.
    lines = [json.loads(x) for x in (elastic / "goodput.jsonl").read_text().splitlines()]
    first, last = lines[0]["began"], lines[-1]["time"]
    assert sum(seconds.values()) == pytest.approx(last - first, rel=0.01)
    assert begun < first < last < begun + whole
    assert seconds[STEPS] > 0 and seconds[DOWN] > 0
