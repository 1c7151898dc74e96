"""Sweeps whose trials are JobSets, with a kubectl of the test's own."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import yaml

from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError
from jaxvlm.sweep import gke, jobs
from tests.sweep import driver, stub

GRID = "optim.learning_rate=0.1,0.2,0.3,0.4"

# A JobSet with maxRestarts 3: an end with 1 or 2 fails it, another one starts its pod again.
TOOL = """#!{python} -IS
import json, os, pathlib, subprocess, sys
folder, (verb, namespace, *words) = pathlib.Path({folder!r}), sys.argv[1:]
assert namespace == "--namespace=default", namespace
if verb == "apply":
    manifest = json.loads(pathlib.Path(words[0].split("=")[1]).read_text())
    name = manifest["metadata"]["name"]
    path = folder / f"{{name}}.jobset"
    if path.exists():
        sys.exit()  # unchanged
    path.write_text(json.dumps(manifest))
    with (folder / "applied").open("a") as applied:
        applied.write(name + "\\n")
    code = (
        "import subprocess, sys\\n"
        "base, *words = sys.argv[1:]\\n"
        "for _ in range(4):\\n"
        "    with open(base + '.log', 'wb') as log:\\n"
        "        end = subprocess.run(words, stdout=log, stderr=log).returncode\\n"
        "    if end in (0, 1, 2):\\n"
        "        break\\n"
        "open(base + '.end', 'w').write(str(end))\\n"
    )
    command = [sys.executable, "-ISc", code, str(folder / name), *manifest["command"]]
    pod = subprocess.Popen(command, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
    (folder / f"{{name}}.pod").write_text(str(pod.pid))
elif verb == "get":
    items = []
    for path in folder.glob("*.jobset"):
        end = path.with_suffix(".end")
        status = {{"replicatedJobsStatus": [{{"name": "workers", "active": 1, "ready": 1}}]}}
        if end.exists() and end.read_text():
            kind = "Failed" if end.read_text() != "0" else "Completed"
            status = {{"conditions": [
                {{"type": "StartupPolicyCompleted", "status": "True"}},
                {{"type": kind, "status": "True", "message": "jobset " + kind.lower()}}]}}
        items.append({{"metadata": {{"name": path.stem}}, "status": status}})
    items.append({{"metadata": {{"name": "another"}}}})
    print(json.dumps({{"items": items}}))
elif verb == "logs":
    name = words[0].partition("jobset-name=")[2].partition(",")[0]
    print((folder / f"{{name}}.log").read_text(), end="")
elif verb == "delete":
    pod = folder / f"{{words[1]}}.pod"
    if pod.exists() and not pod.with_suffix(".end").exists():  # else its number may be another's
        os.killpg(int(pod.read_text()), 9)
    for suffix in ("jobset", "end", "log", "pod"):
        (folder / f"{{words[1]}}.{{suffix}}").unlink(missing_ok=True)
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The folder of the JobSets; kubectl is on the PATH."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "kubectl").write_text(TOOL.format(python=sys.executable, folder=str(folder)))
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(jobs, "LOOK_S", 0.05)
    return folder


def applied(cluster):
    """Names of JobSets, as often as they were made."""
    return (cluster / "applied").read_text().split()


def test_every_trial_is_a_jobset_and_what_fails_is_named(cluster, tmp_path):
    said, workdir = [], tmp_path / "s"
    grid = f"optim.learning_rate=0.1,{stub.FAILS},{stub.ALWAYS_LOST}"
    assert driver.run(workdir, grid, parallel=3, say=said.append, on="gke")
    assert driver.counts(workdir) == {"done": 1, "failed": 2}
    text = "\n".join(said)
    assert "jobset failed: jaxvlm: config.data.train: no such file" in text
    assert "jobset failed: a peer is lost" in text, "the cluster itself tried it again"
    # Failed trials are tried again under their own names, the one that is done is not.
    before = applied(cluster)
    assert len(before) == len(set(before)) == 3
    assert driver.run(workdir, grid, parallel=3, on="gke")
    again = applied(cluster)[3:]
    assert len(again) == 2 and set(again) < set(before)


def test_what_is_known_of_a_trial_stays_when_its_jobset_is_deleted(cluster, tmp_path):
    workdir, grid = tmp_path / "s", "optim.learning_rate=0.1"
    stopped = []

    def say(line):
        if line.endswith("starts"):
            stopped.append(os.kill(os.getpid(), signal.SIGTERM))

    assert not driver.run(workdir, grid, say=say, on="gke")
    driver.wait_for(lambda: bool(list(cluster.glob("*.end"))))
    assert driver.counts(workdir) == {"done": 1}
    [log] = workdir.glob("*/log.txt")
    kept = log.read_text()
    assert kept
    for path in cluster.glob("*.jobset"):
        path.unlink()
    assert driver.counts(workdir) == {"done": 1} and log.read_text() == kept


def test_a_cluster_that_is_silent_for_a_moment_ends_no_sweep(cluster, tmp_path, monkeypatch):
    workdir, grid = tmp_path / "s", "optim.learning_rate=0.1"
    read, fails = gke.Gke._read, [False, True, True, False, True]

    def flaky(self):
        if fails and fails.pop(0):
            raise ConfigError("kubectl: connection refused")
        read(self)

    monkeypatch.setattr(gke.Gke, "_read", flaky)
    assert driver.run(workdir, grid, on="gke") and not fails
    monkeypatch.undo()
    (cluster / "kubectl").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver.counts(workdir) == {"done": 1}, "what is done needs no cluster"


def test_output_that_is_no_text_is_no_error(tmp_path):
    tool = tmp_path / "tool"
    tool.write_bytes(b"#!/bin/sh\nprintf '\\377x'\n")
    tool.chmod(0o755)
    assert jobs.ask(str(tool), on="gke").endswith("x")


def test_a_sweep_that_is_killed_makes_nothing_twice(cluster, tmp_path):
    workdir = tmp_path / "s"
    driver.kill_thrice(workdir, GRID, "gke")
    assert driver.run(workdir, GRID, parallel=4, on="gke")
    assert driver.counts(workdir) == {"done": 4} and len(applied(cluster)) == 4
    assert not list(workdir.glob("*/twice"))


def test_a_signal_leaves_the_jobsets(cluster, tmp_path):
    workdir = tmp_path / "s"
    said = driver.interrupted(workdir, GRID, "gke")
    assert "jobs stay in the queue; the same command goes on" in said[-1]
    driver.wait_for(lambda: len(list(cluster.glob("*.end"))) == 4)
    assert driver.run(workdir, GRID, parallel=4, on="gke")
    assert driver.counts(workdir) == {"done": 4} and len(applied(cluster)) == 4


def is_free(path):
    """Whether a trial's lock is held by no process: a killed one is gone a moment later."""
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_one_that_is_deleted_has_failed_and_starts_again(cluster, tmp_path):
    workdir, said = tmp_path / "s", []

    def say(line):
        said.append(line)
        if line.endswith("starts"):
            [jobset] = cluster.glob("*.jobset")
            kubectl = [str(cluster / "kubectl"), "delete", "--namespace=default"]
            subprocess.run([*kubectl, "jobset", jobset.stem], check=True)
            driver.wait_for(lambda: all(map(is_free, workdir.glob("*/.lock"))))

    grid = "optim.learning_rate=0.1"
    assert driver.run(workdir, grid, say=say, on="gke")
    assert "is gone; the same command starts it again" in said[-1]
    assert driver.counts(workdir) == {"failed": 1}
    assert driver.run(workdir, grid, on="gke") and driver.counts(workdir) == {"done": 1}


def test_states_are_those_of_jobset():
    def state(**status):
        return gke._state_of(status)[0]

    assert state() == jobs.QUEUED, "it is new, or Kueue holds it back"
    assert state(replicatedJobsStatus=[{"active": 0, "ready": 0, "suspended": 1}]) == jobs.QUEUED
    assert state(replicatedJobsStatus=[{"active": 1, "ready": 0}]) == jobs.QUEUED, "pods pend"
    assert state(replicatedJobsStatus=[{"active": 1, "ready": 1}]) == jobs.RUNNING
    assert state(conditions=[{"type": "Failed", "status": "False"}]) == jobs.QUEUED
    assert state(conditions=[{"type": "Completed", "status": "True"}]) == "Completed"


SWEEP = ["sweep", f"--config={driver.ROOT / 'configs' / 'quickstart.py'}:smoke", "--grid=seed=0,1"]
LAUNCH = "--launch=--devices=h100:16 --image=r/i:1 --namespace=team --claim=runs --skip_plan"


@pytest.mark.parametrize(
    "launch, workdir, why",
    [
        (LAUNCH, "runs/s", "mount the volume at /runs on this machine too"),
        (LAUNCH.replace(" --claim=runs", ""), "/runs/s", "give --claim and --mount in --launch"),
        (LAUNCH.replace("--image=r/i:1 ", ""), "/runs/s", "launch gke needs --image"),
        (f"{LAUNCH} --partition=x", "/runs/s", "--partition is for launch slurm"),
    ],
)
def test_what_is_refused(cluster, capsys, launch, workdir, why):
    assert cli([*SWEEP, "--on=gke", launch, f"--workdir={workdir}"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert why in error, error
    assert not pathlib.Path(workdir).exists() and not (cluster / "applied").exists()


def test_each_jobset_has_its_trials_command(cluster, tmp_path, capsys):
    """Of a real recipe; the cluster keeps nothing here."""
    (cluster / "kubectl").write_text(
        f'#!/bin/bash\necho "$@" >>{cluster}/calls\n[ "$1" != get ] || echo \'{{"items": []}}\'\n'
    )
    workdir = tmp_path / "My sweep"
    launch = f"{LAUNCH} --mount={tmp_path}"
    code = cli([*SWEEP, "--on=gke", launch, f"--workdir={workdir}", "--json"])
    assert code == 1, "both are gone"
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["counts"] == {"failed": 2}
    token = json.loads((workdir / "sweep.json").read_text())["token"]
    for seed, row in enumerate(result["trials"]):
        manifest = yaml.safe_load((workdir / row["id"] / "job.yaml").read_text())
        name = f"my-sweep-{token}-{row['id']}"
        assert manifest["metadata"] == {"name": name, "namespace": "team"}
        text = json.dumps(manifest)
        assert f"--config.seed={seed}" in text and str(workdir / row["id"]) in text
        assert f"apply --namespace=team --filename={workdir}/{row['id']}/job.yaml" in (
            cluster / "calls"
        ).read_text().replace("\\ ", " ")
    # The sweep's names stay, also where it is given again.
    cli([*SWEEP, "--on=gke", launch, f"--workdir={workdir}"])
    assert json.loads((workdir / "sweep.json").read_text())["token"] == token
    assert cli(["sweep", "status", f"--workdir={workdir}"]) == 0


def test_without_kubectl_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="kubectl is not on the PATH; --on=gke needs it"):
        driver.run(tmp_path / "s", GRID, on="gke")
