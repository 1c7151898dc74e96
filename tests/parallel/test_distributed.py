"""Two processes find each other, stop together, and neither outlives the other."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import isolation
import pytest

from jaxvlm.config import ConfigError
from jaxvlm.parallel.distributed import processes
from jaxvlm.parallel.distributed.processes import ProcessPlace, find_place, first_host

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
        processes.catch_sigterm()
        assert not processes.should_stop(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert processes.should_stop(2)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        processes.catch_sigterm()
        assert not processes.should_stop(3)
    finally:
        signal.signal(signal.SIGTERM, before)
        processes._asked_to_stop.clear()


def test_the_environment_says_where():
    assert find_place({}) is None
    assert not processes.initialize()
    given = {"JAXVLM_COORDINATOR": "h:1", "JAXVLM_NUM_PROCESSES": "2", "JAXVLM_PROCESS_ID": "1"}
    assert find_place(given) == ProcessPlace("h:1", 2, 1, None)
    assert find_place(given | {"JAXVLM_NUM_PROCESSES": "1", "JAXVLM_PROCESS_ID": "0"}) is None
    with pytest.raises(ValueError, match="JAXVLM_PROCESS_ID is not: set all three"):
        find_place({name: given[name] for name in list(given)[:2]})
    with pytest.raises(ValueError, match="must be below 2"):
        find_place(given | {"JAXVLM_PROCESS_ID": "2"})
    with pytest.raises(ValueError, match="must be a number"):
        find_place(given | {"JAXVLM_PROCESS_ID": "one"})


SEVERAL = {
    "OpenMPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    "PMI": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "MVAPICH2": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    "Flux": {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"},
    "AWS Batch": {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"},
    "names like JAX's own": {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
    "torchrun": {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
    "SkyPilot": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"},
    "slices": {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "localhost"},
    "TPU hosts": {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "0"},
    "xpk": {"PROCESSES_IN_JOB": "2", "JOB_COMPLETION_INDEX": "0", "JOBSET_NAME": "run"},
    "an indexed Job": {"JOB_COMPLETION_INDEX": "1"},
    "a replicated job": {"JOB_INDEX": "1", "JOB_COMPLETION_INDEX": "0", "JOBSET_NAME": "run"},
    "JobSet": {"JOBSET_NAME": "run", "JOB_COMPLETION_INDEX": "0"},
    "SLURM without srun": {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
}
ALONE = {
    "nothing": {},
    "OpenMPI": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "torchrun": {"WORLD_SIZE": "1", "RANK": "0"},
    "SkyPilot": {"SKYPILOT_NUM_NODES": "1"},
    "one TPU host": {"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "1"},
    "xpk": {"PROCESSES_IN_JOB": "1", "JOB_COMPLETION_INDEX": "0", "JOBSET_NAME": "run"},
    "a JobSet's TPU": SEVERAL["JobSet"] | {"TPU_WORKER_HOSTNAMES": "localhost"},
    "an indexed Job's first": {"JOB_COMPLETION_INDEX": "0"},
    "a shell of salloc": {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
    "srun -n1": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
}


@pytest.mark.parametrize("launcher", SEVERAL)
def test_one_of_several_that_nothing_joins_is_refused(launcher):
    name = next(iter(SEVERAL[launcher]))
    with pytest.raises(ConfigError, match=rf"^{name}=.*nothing joins them; set JAXVLM_COORD"):
        processes.refuse_alone(SEVERAL[launcher])
    processes.refuse_alone(SEVERAL[launcher] | {"JAXVLM_NUM_PROCESSES": "1"})


@pytest.mark.parametrize("launcher", ALONE)
def test_a_process_that_is_alone_is_not_refused(launcher):
    processes.refuse_alone(ALONE[launcher])
    assert find_place(ALONE[launcher]) is None


@pytest.mark.parametrize("value", ["two", "-2", "2.0", "\u00b2"])
@pytest.mark.parametrize("name", ["WORLD_SIZE", "SKYPILOT_NUM_NODES"])
def test_a_malformed_count_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name} must be a number, not"):
        processes.refuse_alone({name: value})


def test_asked_to_be_alone_it_joins_none():
    alone = {"JAXVLM_NUM_PROCESSES": "1"}
    assert find_place(alone | {"SLURM_STEP_NUM_TASKS": "2"}) is None
    assert not processes._tpu_pod(alone | {"TPU_WORKER_HOSTNAMES": "a,b"})
    with pytest.raises(ConfigError, match="JAXVLM_COORDINATOR is not"):
        find_place(alone | {"JAXVLM_PROCESS_ID": "1"})


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


def test_no_test_sees_a_launchers_variables():
    names = {name for environ in SEVERAL.values() for name in environ}
    assert all(name.startswith(isolation.OF_OTHERS) for name in names)


def test_slurm_variables():
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "gpu[07-09,12]",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    }
    assert find_place(step) == ProcessPlace("gpu07:61447", 4, 3, None)
    assert find_place(step | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}).local_devices == [1]
    assert find_place({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("nodes", "host"), [("a1,b2", "a1"), ("n[3,5]", "n3"), ("x-[010-020]", "x-010"), ("q", "q")]
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host
