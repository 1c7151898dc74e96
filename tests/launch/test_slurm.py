"""The launch scripts run as they stand: as two faked SLURM tasks, and up to the gcloud call."""

import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"

PROGRAM = """
import os, pathlib, signal, sys, time
with pathlib.Path(__file__).with_name("pids").open("a") as file:
    file.write(f"{os.getpid()} ")
from jaxvlm.parallel.distributed import processes as distributed

assert distributed.initialize()
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
ones = jax.make_array_from_callback(
    (jax.device_count(),),
    NamedSharding(mesh, PartitionSpec("data")),
    lambda i: np.ones(jax.device_count(), np.float32)[i],
)
with distributed.guard_peers():
    print("devices", int(jax.jit(jnp.sum)(ones)), *sys.argv[1:], flush=True)
    step = 0
    while "--wait" in sys.argv:
        step += 1
        assert float(jax.jit(jnp.sum)(ones))
        if distributed.should_stop(step):
            print("saved at", step, flush=True)
            break
        time.sleep(0.01)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def start_two(*arguments: str) -> list[subprocess.Popen]:
        started.extend(start_tasks(tmp_path, *arguments))
        return started

    yield start_two
    for task in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGKILL)  # its programs too, which hold the pipes
        task.communicate()


# As SLURM's own: scancel signals each process of the job, which are children of both batch files.
SCANCEL = """#!/bin/bash
echo "scancel $*"
[ "$*" = "--signal=TERM $SLURM_JOB_ID" ] || exit 1
kill -TERM $(cat {folder}/pids)
"""


def start_tasks(tmp_path: Path, *arguments: str) -> list[subprocess.Popen]:
    """The body of the batch file, once for each task, as srun would set it up."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    texts = {
        "scontrol": '#!/bin/bash\necho "scontrol $*"\n',
        "scancel": SCANCEL.format(folder=tmp_path),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = random.randrange(10**6)
    tasks = []
    for process in range(2):
        env = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(LAUNCH.parent),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_PROCID": str(process),
            "SLURM_LOCALID": "0",
            "JAXVLM_SRUN": "env",
            "JAXVLM_COMMAND": f"{sys.executable} {program}",
            "JAXVLM_COMPILE_CACHE": str(tmp_path / "xla"),
        }
        command = ["bash", str(LAUNCH / "slurm.sbatch"), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        tasks.append(subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes))
    return tasks


def test_two_tasks_make_one_run(start, tmp_path):
    tasks = start("--config=a b.py")
    outputs = [task.communicate(timeout=90) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    for output, _ in outputs:
        assert output.splitlines()[-1] == "devices 8 --config=a b.py"
    assert (tmp_path / "xla").is_dir()


def test_sigterm_saves_and_requeues(start):
    tasks = start("--wait")
    for task in tasks:
        lines = iter(task.stdout.readline, "")
        assert any("devices 8" in line for line in lines), task.communicate()
    tasks[0].send_signal(signal.SIGTERM)
    outputs = [task.communicate(timeout=90) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert all("saved at" in output for output, _ in outputs)
    assert "scancel --signal=TERM" in outputs[0][0]
    assert "scontrol requeue" in outputs[0][0]
    assert "scontrol" not in outputs[1][0]


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_help():
    for script in ("slurm.sbatch", "tpu_vm.sh"):
        done = run("bash", str(LAUNCH / script), "--help")
        assert done.returncode == 0
        assert "--workdir=" in done.stdout


def test_tpu_vm_calls_gcloud_on_all_hosts():
    script = str(LAUNCH / "tpu_vm.sh")
    options = ["--tpu=pod", "--zone=z", "--project=p", "--install=jaxvlm[tpu]", "--dry_run"]
    done = run("bash", script, *options, "--", "train", "--config=x.py:a b")
    words = shlex.split(done.stdout)
    assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod"]
    assert {"--worker=all", "--zone=z", "--project=p"} <= set(words)
    remote = next(word for word in words if word.startswith("--command="))
    assert remote.endswith(r"jaxvlm train --config=x.py:a\ b")
    assert "JAXVLM_DISTRIBUTED=auto" in remote


@pytest.mark.parametrize("arguments", [["--tpu=a"], ["--what"], ["--tpu=a", "--zone=z", "--"]])
def test_tpu_vm_refuses_what_is_incomplete(arguments):
    done = run("bash", str(LAUNCH / "tpu_vm.sh"), *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
