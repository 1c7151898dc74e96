"""``launch local``: what it makes of the ends of its processes, and with how many it goes on."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxvlm.config import ConfigError
from jaxvlm.launch import local, targets
from jaxvlm.launch.job import Job
from jaxvlm.planner.hardware.machine import parse

PROGRAM = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
ends = json.loads((folder / "ends.json").read_text())
size, number = int(os.environ["JAXVLM_NUM_PROCESSES"]), int(os.environ["JAXVLM_PROCESS_ID"])
names = "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "JAXVLM_COORDINATOR", "JAX_PLATFORMS"
said = {name: os.environ.get(name, "") for name in names}
attempt = len(list(folder.glob(f"*-of-*-{number}"))) if number else 0
attempt = len(list(folder.glob("*-of-*-0"))) if not number else attempt
(folder / f"{attempt}-of-{size}-{number}").write_text(json.dumps(said))
end = ends[attempt][number]
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "waits":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    (folder / f"waits-{number}").touch()
    time.sleep(60)
sys.exit(end)
"""


def supervise(folder, ends, sizes, restarts=5, platform="cpu", devices=2):
    """Run the program in a process of its own, whose signals are the supervisor's."""
    (folder / "ends.json").write_text(json.dumps(ends))
    words = [sys.executable, "-c", PROGRAM, str(folder)]
    code = (
        "from jaxvlm.launch.local import Supervisor; import sys;"
        f"sys.exit(Supervisor({words!r}, {sizes!r}, {devices}, {platform!r}, {{}}).run({restarts}))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "sizes, ends, starts, status, says",
    [
        ([2], [[0, 0]], [2], 0, ""),
        ([2], [[75, "killed"], [0, 0]], [2, 2], 0, "1 of 2 processes lost; starting again with 2"),
        ([3, 2, 1], [[75, "killed", 75], [0, 0]], [3, 2], 0, "starting again with 2"),
        ([4, 2], [["killed", 75, 75, 75], [0, 0]], [4, 2], 0, "starting again with 2"),
        ([4, 2, 1], [[75, "killed", "killed", "killed"], [0]], [4, 1], 0, "with 1"),
        ([2, 1], [[75, 75], [0, 0]], [2, 2], 0, "can't be reached; starting again with 2"),
        ([4, 3], [["killed", 75, 75, "killed"]], [4], 75, "2 are too few: --min_nodes=3"),
        ([2, 1], [[75, 1]], [2], 1, ""),
        ([2], [["killed", 2]], [2], 2, ""),
        ([1], [["killed"]] * 3, [1, 1, 1], 75, "given up after 2 restarts"),
    ],
)
def test_what_ends_mean(tmp_path, sizes, ends, starts, status, says):
    process = supervise(tmp_path, ends, sizes, restarts=2)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == status and says in said, said
    found = sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("*-of-*-0"))
    assert found == [f"{i}-of-{size}" for i, size in enumerate(starts)]


def test_a_signal_saves_and_starts_nothing_again(tmp_path):
    process = supervise(tmp_path, [["waits", "waits"]], [2, 1])
    while len(list(tmp_path.glob("waits-*"))) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == "" and process.returncode == 0
    assert len(list(tmp_path.glob("*-of-*"))) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells of a parent's end")
def test_processes_end_with_their_supervisor(tmp_path):
    process = supervise(tmp_path, [["waits"]], [1])
    while not list(tmp_path.glob("waits-*")):
        time.sleep(0.05)
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    [child] = map(int, pathlib.Path(children).read_text().split())
    process.kill()
    process.communicate(timeout=30)
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if pathlib.Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it lives on")


@pytest.mark.parametrize("shown, devices", [("", ["0,1", "2,3"]), ("4,5,6,7", ["4,5", "6,7"])])
def test_each_process_has_its_devices(tmp_path, monkeypatch, shown, devices):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    for platform in ("cpu", "gpu"):
        folder = tmp_path / platform
        folder.mkdir()
        process = supervise(folder, [[0, 0]], [2], platform=platform)
        assert process.communicate(timeout=60)[1] == "" and process.returncode == 0
        said = [json.loads((folder / f"0-of-2-{i}").read_text()) for i in range(2)]
        assert said[0]["JAXVLM_COORDINATOR"] == said[1]["JAXVLM_COORDINATOR"]
        if platform == "gpu":
            assert [x["CUDA_VISIBLE_DEVICES"] for x in said] == devices
        else:
            flags = "--xla_a=1 --xla_force_host_platform_device_count=2"
            assert all(x["XLA_FLAGS"] == flags and x["JAX_PLATFORMS"] == "cpu" for x in said)


@pytest.mark.parametrize(
    "devices, processes, why",
    [
        ("h200:16", 0, "is several; use launch slurm, ray or gke"),
        ("v5e:4", 0, "the chips of a TPU VM belong to one process"),
        ("cpu:8", 3, "--processes=3 does not divide 8 devices"),
    ],
)
def test_what_is_refused(devices, processes, why):
    job = Job("first", ("train",), parse(devices))
    with pytest.raises(ConfigError, match=why):
        targets.render("local", job, processes=processes)


def test_the_call_has_the_jobs_variables():
    job = Job("first", ("train", "--config=a b"), parse("h200:4"), "", (("A", "b 'c"),), 7, (4, 2))
    made = local.render(job, processes=0)
    assert not made.files and made.command[-3:] == ("--", "train", "--config=a b")
    assert set(made.command[3:-3]) == {
        "--sizes=4,2", "--devices=1", "--platform=gpu", "--restarts=7", "--env=A=b 'c",
    }  # fmt: skip
