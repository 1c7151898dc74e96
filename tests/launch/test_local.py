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
if end == "traced":
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN, "it would end the process"
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    (folder / f"waits-{number}").touch()
    time.sleep(60)
if end == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"waits-{number}").touch()
    time.sleep(60)
if end == "waits":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    (folder / f"waits-{number}").touch()
    time.sleep(60)
sys.exit(end)
"""


def supervise(folder, ends, sizes, restarts=5, platform="cpu", devices=2, wait_s=60):
    """Run the program in a process of its own, whose signals are the supervisor's."""
    (folder / "ends.json").write_text(json.dumps(ends))
    words = [sys.executable, "-c", PROGRAM, str(folder)]
    code = (
        f"from jaxvlm.launch import local; local.WAIT_S = {wait_s}; import sys;"
        f"made = local.Supervisor({words!r}, {sizes!r}, {devices}, {platform!r}, {{}});"
        f"sys.exit(made.run({restarts}))"
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
        ([2, 1], [[75, 75], [0, 0]], [2, 2], 0, "a process stopped; starting again with 2"),
        (
            [4, 3],
            [["killed", 75, 75, "killed"], [0] * 4],
            [4, 4],
            0,
            "2 are fewer than 3, so all are tried again; starting again with 4",
        ),
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


def test_a_process_that_hangs_is_killed(tmp_path):
    process = supervise(tmp_path, [["waits", "killed"], [0]], [2, 1], wait_s=0.5)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 0 and "a process does not end 0 s after another one" in said, said
    assert "1 of 2 processes lost; starting again with 1" in said, "the one that hung is not lost"


def test_a_trace_is_asked_of_all(tmp_path):
    process = supervise(tmp_path, [["traced", "traced"]], [2])
    while len(list(tmp_path.glob("waits-*"))) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR2)
    assert process.communicate(timeout=30)[1] == "" and process.returncode == 0


def test_the_devices_of_a_lost_process_are_left_out(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ends = [["killed", 75, 75], [75, "killed"], [0, 0, 0]]
    process = supervise(tmp_path, ends, [3, 2], platform="gpu", devices=1)
    process.communicate(timeout=30)
    shown = [
        [
            json.loads((tmp_path / f"{name}-{i}").read_text())["CUDA_VISIBLE_DEVICES"]
            for i in range(n)
        ]
        for name, n in (("0-of-3", 3), ("1-of-2", 2))
    ]
    assert shown == [["0", "1", "2"], ["1", "2"]]
    assert (tmp_path / "2-of-3-0").is_file(), "one is too few, so all are tried again"


def test_fewer_gpus_than_asked_for_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    flags = ["--sizes=4", "--devices=1", "--platform=gpu", "--restarts=0", "--", "train"]
    words = [sys.executable, "-m", "jaxvlm.launch.local", *flags]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "CUDA_VISIBLE_DEVICES=4,5 shows 2 GPUs, and --devices asks for 4" in done.stderr


def test_a_second_signal_is_no_success(tmp_path):
    process = supervise(tmp_path, [["ignores"]], [1])
    while not list(tmp_path.glob("waits-*")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL


def test_a_signal_saves_and_starts_nothing_again(tmp_path):
    process = supervise(tmp_path, [["waits", "waits"]], [2, 1])
    while len(list(tmp_path.glob("waits-*"))) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1]
    assert said == "launch local: stopped; the same command resumes\n" and process.returncode == 0
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
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown:
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
