"""Sweeps whose trials are jobs of SLURM, with sbatch, squeue and scontrol of the test's own."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import pytest

from jaxvlm.cli.main import run as cli
from jaxvlm.sweep import jobs
from tests.sweep import driver, stub

GRID = "optim.learning_rate=0.1,0.2,0.3,0.4"

TOOL = """#!{python} -S
import json, os, pathlib, subprocess, sys
folder, name = pathlib.Path({folder!r}), pathlib.Path(sys.argv[0]).name
jobs = sorted(int(path.stem) for path in folder.glob("*.job"))
if name == "sbatch":
    log, script = sys.argv[2].removeprefix("--output="), sys.argv[3]
    number = max(jobs, default=0) + 1
    path = folder / f"{{number}}.job"
    path.write_text(script)
    runs = f'bash "{{script}}" >>"{{log}}" 2>&1; echo $? >"{{folder}}/{{number}}.end"'
    subprocess.Popen(["bash", "-c", runs], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
    print(number)
elif name == "squeue":
    for number in jobs:
        if not (folder / f"{{number}}.end").exists():
            print(f"{{number}}|RUNNING|" + (folder / f"{{number}}.job").read_text())
elif name == "scontrol":
    code = int((folder / f"{{sys.argv[-1]}}.end").read_text())
    state = "CANCELLED" if code == 143 else "FAILED" if code else "COMPLETED"
    print(f"JobId={{sys.argv[-1]}} JobState={{state}} ExitCode={{code}}:0")
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """The folder of the jobs; the tools are on the PATH."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scontrol"):
        (folder / name).write_text(TOOL.format(python=sys.executable, folder=str(folder)))
        (folder / name).chmod(0o755)
    (folder / "jaxvlm").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(jobs, "LOOK_S", 0.05)
    return folder


def jobs_of(queue):
    return [pathlib.Path(path.read_text()).parent.name for path in queue.glob("*.job")]


def test_every_trial_is_a_job_and_what_fails_is_named(queue, tmp_path):
    said = []
    grid = f"optim.learning_rate=0.1,{stub.FAILS},{stub.LOST_ONCE_A_STEP},{stub.ALWAYS_LOST}"
    assert driver.run(tmp_path / "s", grid, parallel=4, say=said.append, on="slurm")
    assert driver.counts(tmp_path / "s") == {"done": 2, "failed": 2}
    text = "\n".join(said)
    assert "lost 4 times without a new checkpoint" in text and "is tried again" in text
    assert "failed: jaxvlm: config.data.train: no such file" in text


def test_a_sweep_that_is_killed_submits_nothing_twice(queue, tmp_path, monkeypatch):
    workdir = tmp_path / "s"
    driver.kill_thrice(workdir, GRID, "slurm")
    assert driver.run(workdir, GRID, parallel=4, on="slurm")
    assert driver.counts(workdir) == {"done": 4}
    assert sorted(jobs_of(queue)) == sorted(
        {path.parent.name for path in workdir.glob("*/log.txt")}
    )
    assert not list(workdir.glob("*/twice"))


def test_a_signal_leaves_the_jobs_in_the_queue(queue, tmp_path):
    workdir = tmp_path / "s"
    said = driver.interrupted(workdir, GRID, "slurm")
    assert "jobs stay in the queue; the same command goes on" in said[-1]
    found = driver.counts(workdir)
    assert sum(found.values()) == 4 and not found.get("failed")
    driver.wait_for(lambda: driver.counts(workdir) == {"done": 4})
    assert driver.run(workdir, GRID, parallel=4, on="slurm") and len(jobs_of(queue)) == 4


def test_fewer_at_a_time(queue, tmp_path):
    most, workdir = 0, tmp_path / "s"

    def say(line):
        nonlocal most
        ends = len(list(queue.glob("*.end")))
        most = max(most, len(list(queue.glob("*.job"))) - ends)

    assert driver.run(workdir, GRID, parallel=2, say=say, on="slurm")
    assert driver.counts(workdir) == {"done": 4} and 1 <= most <= 2


SWEEP = ["sweep", f"--config={driver.ROOT / 'configs' / 'quickstart.py'}:smoke", "--grid=seed=0,1"]
LAUNCH = "--launch=--devices=cpu:2 --time=1:00:00 --partition=low"


@pytest.mark.parametrize(
    "words, why",
    [
        (["--on=ray"], "--on='ray'; known: local, slurm, gke"),
        (["--on=slurm"], "launch needs --devices"),
        ([LAUNCH], "is for --on=slurm and gke; leave it out"),
        (["--on=slurm", LAUNCH, "--devices=0;1"], "give the machine in --launch"),
        (["--on=slurm", "--launch=--devices=cpu:2 --dry_run"], "--dry_run is the sweep's own"),
        (["--on=slurm", "--launch=--devices=cpu:2 --tpu=x"], "--tpu is for launch tpu"),
        (["--on=slurm", "--launch=--devices=cpu:2 --part=x"], "--launch=--devices=cpu:2 --part=x"),
        (["--on=slurm", "--launch=--devices=cpu:2 train"], "train is the sweep's own"),
    ],
)
def test_what_is_refused(queue, tmp_path, capsys, words, why):
    assert cli([*SWEEP, *words, f"--workdir={tmp_path / 's'}"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert why in error, error
    assert not jobs_of(queue)


def test_each_job_has_its_trials_command(queue, tmp_path, capsys, monkeypatch):
    """Of a real recipe; the job itself is not run here."""
    (queue / "sbatch").write_text("#!/bin/bash\necho 7\n")
    (queue / "squeue").write_text("#!/bin/bash\n")
    (queue / "scontrol").write_text("#!/bin/bash\necho JobState=CANCELLED ExitCode=0:15\n")
    workdir = tmp_path / "My sweep"
    code = cli([*SWEEP, "--on=slurm", LAUNCH, f"--workdir={workdir}", "--json"])
    assert code == 1, "both were cancelled"
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["counts"] == {"failed": 2}
    assert all("job 7 was cancelled" in row["line"] for row in result["trials"])
    for seed, row in enumerate(result["trials"]):
        text = (workdir / row["id"] / "job.sbatch").read_text()
        token = json.loads((workdir / "sweep.json").read_text())["token"]
        assert f"#SBATCH --job-name=my-sweep-{token}-{row['id']}" in text
        assert "#SBATCH --partition=low" in text and "#SBATCH --time=1:00:00" in text
        assert "WANDB_RUN_GROUP='My sweep'" in text
        assert f"--config.seed={seed}" in text and "--json" in text


def test_without_slurm_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Exception, match="squeue is not on the PATH; --on=slurm needs it"):
        driver.run(tmp_path / "s", GRID, on="slurm")
