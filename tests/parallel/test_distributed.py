"""Two processes find each other, stop together, and neither outlives the other."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from test_places import SEVERAL

from jaxvlm.config import ConfigError
from jaxvlm.parallel.distributed import processes

PROGRAM = """
import sys, time
from jaxvlm.parallel.distributed import processes as distributed

mode = sys.argv[1]
if mode == "absent":
    distributed.START_S = 4
assert distributed.initialize()
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
ones = jax.make_array_from_callback(
    (8,), NamedSharding(mesh, PartitionSpec("data")), lambda i: np.ones(8, np.float32)[i]
)
total = jax.jit(jnp.sum)
with distributed.guard_peers():
    for step in range(100_000):
        assert float(total(ones)) == 8
        if step == 3:
            print("running", flush=True)
            if mode == "finish":
                break
            if mode == "uneven" and jax.process_index() == 0:
                break  # waits for the other one in JAX's exit handler
            if mode == "uneven":
                time.sleep(1000)
            if mode == "error" and jax.process_index() == 1:
                raise ValueError("a bug in one process")
            if mode == "exit" and jax.process_index() == 1:
                print("bad input", file=sys.stderr)
                distributed.exit_now(2)
        if distributed.should_stop(step):
            print("stopped at", step, flush=True)
            break
        time.sleep(0.01)
"""


def start_pair(mode: str, which=(0, 1), count: int = 2) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pair = []
    for process in which:
        env = os.environ | {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
            "JAXVLM_COORDINATOR": f"127.0.0.1:{port}",
            "JAXVLM_NUM_PROCESSES": str(count),
            "JAXVLM_PROCESS_ID": str(process),
        }
        command = [sys.executable, "-c", PROGRAM, mode]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        pair.append(subprocess.Popen(command, env=env, text=True, **pipes))
    return pair


def until_running(pair: list[subprocess.Popen]) -> None:
    for process in pair:
        lines = iter(process.stdout.readline, "")
        assert any(line == "running\n" for line in lines), process.communicate()


@pytest.fixture
def started():
    pairs = []

    def start(mode: str, **how) -> list[subprocess.Popen]:
        pairs.append(start_pair(mode, **how))
        return pairs[-1]

    yield start
    for pair in pairs:
        for process in pair:
            process.kill()
            process.communicate()


def said_by_the_other(pair: list[subprocess.Popen], victim: int, number: int, within: int) -> str:
    """Signal one process; what the other wrote on stderr as it ended with 75 in time."""
    until_running(pair)
    pair[victim].send_signal(number)
    _, errors = pair[1 - victim].communicate(timeout=within)
    assert pair[1 - victim].returncode == 75, errors
    return errors


@pytest.mark.parametrize("mode", ["loop", "uneven"])
@pytest.mark.parametrize("victim", [0, 1])
def test_killing_one_ends_the_other(started, victim, mode):
    errors = said_by_the_other(started(mode), victim, signal.SIGKILL, within=60)
    assert f"jaxvlm: process {victim} of 2 is gone" in errors


def test_an_error_in_one_ends_both(started):
    pair = started("error")
    (_, first), (_, second) = [process.communicate(timeout=60) for process in pair]
    assert "process 1 of 2 stopped with an error or by Ctrl-C" in first
    assert "ValueError: a bug in one process" in second
    assert [process.returncode for process in pair] == [75, 1]


def test_exit_now_keeps_its_status(started):
    pair = started("exit")
    (_, first), (_, second) = [process.communicate(timeout=60) for process in pair]
    assert "process 1 of 2 stopped with an error or by Ctrl-C" in first
    assert second.rstrip().endswith("bad input")
    assert [process.returncode for process in pair] == [75, 2]


@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_in_one_ends_the_other_in_one_line(started, victim):
    errors = said_by_the_other(started("loop"), victim, signal.SIGINT, within=60)
    assert f"jaxvlm: process {victim} of 2 stopped with an error or by Ctrl-C" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("which", "count", "who"),
    [
        ([0], 2, "process 1"),
        ([1], 2, r"process 0 at 127\.0\.0\.1:\d+"),
        ([0, 2], 3, "(one of processes 1, 2|process 1)"),
    ],
)
def test_a_peer_that_never_starts_is_named(started, which, count, who):
    for process in started("absent", which=which, count=count):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 75, errors
        assert re.search(rf"jaxvlm: {who} has not joined within 4 seconds", errors), errors
        assert "stack trace" not in errors


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named(started, victim):
    errors = said_by_the_other(started("loop"), victim, signal.SIGSTOP, within=90)
    assert f"jaxvlm: process {victim} of 2 does not answer (stopped" in errors


def test_a_good_end_is_quiet(started):
    pair = started("finish")
    outputs = [process.communicate(timeout=60) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    assert not any("jaxvlm:" in errors for _, errors in outputs)


def test_sigterm_stops_both_at_one_step(started):
    pair = started("loop")
    until_running(pair)
    pair[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=60) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    steps = [output for output, _ in outputs]
    assert "stopped at" in steps[0]
    assert steps[0].split("stopped at")[1] == steps[1].split("stopped at")[1]


def test_sigterm_in_a_single_process():
    before = signal.getsignal(signal.SIGTERM)
    try:
        processes.catch_signals()
        assert not processes.should_stop(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert processes.should_stop(2)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        processes.catch_signals()
        assert not processes.should_stop(3)
    finally:
        signal.signal(signal.SIGTERM, before)
        processes._asked_to_stop.clear()


def test_sigusr2_asks_for_a_trace_once():
    before = signal.getsignal(signal.SIGUSR2)
    try:
        processes.catch_sigusr2()
        assert not processes.is_trace_asked()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert processes.is_trace_asked() and not processes.is_trace_asked()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_process_knows_when_it_began():
    code = "from jaxvlm.parallel.distributed import processes; print(processes.began())"
    before = time.time()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert before - 0.05 <= float(said) <= time.time()  # the kernel counts hundredths


@pytest.mark.parametrize("launcher", ["OpenMPI", "JobSet", "SLURM without srun"])
def test_every_way_to_start_refuses(monkeypatch, launcher):
    for name, value in SEVERAL[launcher].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="nothing joins them"):
        processes.initialize()
    with pytest.raises(ConfigError, match="nothing joins them"):
        processes.set_up_process("")


def test_train_under_mpirun_says_it_in_one_line(tmp_path):
    command = [sys.executable, "-m", "jaxvlm", "train", "--config=configs/quickstart.py"]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path / 'run'}"],
        env=os.environ | SEVERAL["OpenMPI"],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("jaxvlm: OMPI_COMM_WORLD_SIZE=2: this is one of 2 processes")
    assert not (tmp_path / "run").exists()
