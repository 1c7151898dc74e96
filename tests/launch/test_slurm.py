"""launch/slurm.sbatch runs as it stands, with an srun, squeue and scontrol of the test's own."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "slurm.sbatch"

COMMANDS = {
    # As srun, it starts the tasks at once and tells the highest status.
    "srun": """#!/bin/bash
count=${COUNT:-2} nodes=(n0 n1 n2 n3)
while [[ $1 == --* ]]; do
  [[ $1 == --ntasks=* ]] && count="${1#*=}"
  [[ $1 == --nodelist=* ]] && IFS=, read -r -a nodes <<<"${1#*=}" && echo "on ${nodes[*]}"
  shift
done
START=0
while [[ -e $0.$RUN.$START ]]; do START=$((START + 1)); done
touch "$0.$RUN.$START"
export START
export SLURM_STEP_NUM_TASKS=$count SLURM_STEP_NODELIST=localhost
export SLURM_STEP_TASKS_PER_NODE="1(x$count)"
for ((number = 0; number < count; number++)); do
  SLURM_PROCID=$number SLURM_LOCALID=0 SLURMD_NODENAME=${nodes[number]} setsid "$@" &
  tasks[number]=$!
done
highest=0
for task in "${tasks[@]}"; do
  wait "$task"; status=$?
  [[ $status -gt $highest ]] && highest=$status
done
exit $highest
""",
    "squeue": '#!/bin/bash\necho "${STATE:-RUNNING}"\n',
    "scontrol": """#!/bin/bash
if [[ $* == "show hostnames"* ]]; then tr , '\\n' <<<"$3"; else echo "scontrol $*"; fi
""",
}

ENDS = """
import os, pathlib, signal, sys, time

def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a run of one process: a second one kills
    time.sleep(2)
    os._exit(0)

number = int(os.environ["SLURM_PROCID"])
end = os.environ[("ENDS", "ENDS_AGAIN", "ENDS_LAST")[int(os.environ["START"])]].split()[number]
if not number:
    print("started", *sys.argv[1:], flush=True)
if "saves" in os.environ:
    workdir = sys.argv[-1].removeprefix("--workdir=")
    pathlib.Path(workdir, "checkpoints", os.environ["saves"]).mkdir(parents=True, exist_ok=True)
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "lost":
    os.killpg(0, signal.SIGKILL)
if end in ("stopped", "task_stopped"):
    signal.signal(signal.SIGTERM, stop)
    # The whole task, or, as cgroups have it, the process that srun started alone.
    os.killpg(0, signal.SIGTERM) if end == "stopped" else os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(20)
    sys.exit("no signal came")
sys.exit(int(end))
"""


@pytest.fixture
def launch(tmp_path):
    """Run the batch file: ``launch(program, *arguments, variable=value)``."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ends.py").write_text(ENDS)

    def run(*arguments: str, program: str = "ends.py train", **variables: str):
        env = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(SCRIPT.parent.parent),
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "n0,n1",
            "RUN": str(len(list(tmp_path.glob("srun.*.0")))),  # how often it was called before
            "JAXVLM_COMMAND": f"{sys.executable} {tmp_path / program}",
            "JAXVLM_COMPILE_CACHE": str(tmp_path / "xla"),
            "JAXVLM_LATE_FILES": "2",
        }
        # A session of its own, whose end is awaited; a task that hangs ends with the test run.
        return subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            env=env | variables,
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
            start_new_session=True,
        )

    return run


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        ("0 0", 0, ""),
        ("2 75", 2, "process 0 failed with status 2"),
        ("75 1", 1, "process 1 failed with status 1"),
        ("1 1", 1, "process 1 failed with status 1"),
        ("75 127", 127, "process 1 failed with status 127"),
        ("killed 1", 1, "process 1 failed with status 1"),
        ("task_stopped 2", 2, "process 1 failed with status 2"),
        ("killed 75", 137, "back in the queue: a process was lost"),
        ("75 143", 143, "back in the queue: a process was lost"),
        ("75 134", 134, "back in the queue: a process was lost"),
        ("139 75", 139, "back in the queue: a process was lost"),
        ("75 75", 75, "back in the queue: a process was lost"),
        ("0 75", 75, "back in the queue: a process was lost"),
        ("stopped stopped", 0, "back in the queue: stopped"),
        ("task_stopped task_stopped", 0, "back in the queue: stopped"),
        ("task_stopped 75", 75, "back in the queue: a process was lost"),
    ],
)
def test_what_the_processes_ends_mean(launch, ends, status, says):
    done = launch("--workdir=run", ENDS=ends)
    assert done.returncode == status, done
    assert says in done.stderr
    assert ("scontrol requeue 7" in done.stdout) == ("back in the queue" in says)
    assert ("slurm.sbatch:" in done.stderr) == bool(says)


def test_a_process_whose_node_is_gone_says_nothing(launch, tmp_path):
    (tmp_path / "sleep").write_text("#!/bin/bash\n")  # its file is waited for
    (tmp_path / "sleep").chmod(0o755)
    done = launch("--workdir=run", ENDS="75 lost")
    assert "scontrol requeue 7" in done.stdout, done
    done = launch("--workdir=run", ENDS="1 lost")
    assert done.returncode == 1 and "scontrol" not in done.stdout, done


def test_a_job_goes_on_with_the_nodes_that_are_left(launch, tmp_path):
    ends = {"JAXVLM_NODES": "2 1", "ENDS": "lost 75", "ENDS_AGAIN": "0"}
    done = launch(f"--workdir={tmp_path}", **ends)
    assert done.returncode == 0, done
    assert "1 nodes are left; going on with 1" in done.stderr
    assert "on n1" in done.stdout and "requeue" not in done.stdout
    # A process that is killed leaves its node; so does one that can't be reached.
    done = launch(f"--workdir={tmp_path}", **ends | {"ENDS": "killed 75"})
    assert "on n1" not in done.stdout and "scontrol requeue 7" in done.stdout


def test_a_job_waits_where_too_few_nodes_are_left(launch, tmp_path):
    done = launch(f"--workdir={tmp_path}", JAXVLM_NODES="2", ENDS="lost 75")
    assert "1 nodes are left, and the job goes on with 2: it waits" in done.stderr
    assert "scontrol requeue 7" in done.stdout


def test_spare_nodes_are_used_later(launch, tmp_path):
    """Of four nodes one is lost, so two are used and one is spare; then one of the two is lost."""
    nodes = {"SLURM_JOB_NODELIST": "n0,n1,n2,n3", "SLURM_NTASKS": "4", "JAXVLM_NODES": "2 4"}
    done = launch(f"--workdir={tmp_path}", ENDS="lost 75 75 75", ENDS_AGAIN="lost 75", COUNT="4",
                  ENDS_LAST="0 0", **nodes)  # fmt: skip
    assert done.returncode == 0, done
    assert [line for line in done.stdout.splitlines() if line.startswith("on ")] == [
        "on n1 n2", "on n2 n3",
    ]  # fmt: skip
    assert "3 nodes are left; going on with 2" in done.stderr
    assert "2 nodes are left; going on with 2" in done.stderr


def test_a_cancelled_job_does_not_go_on(launch, tmp_path):
    lost = {"JAXVLM_NODES": "2 1", "ENDS": "lost 75", "ENDS_AGAIN": "0"}
    done = launch(f"--workdir={tmp_path}", STATE="COMPLETING", **lost)
    assert "on n1" not in done.stdout and "requeue" not in done.stdout


@pytest.mark.parametrize("nodes, what", [("four", "four"), ("4 -2", "-2"), ("4 0", "0")])
def test_numbers_of_nodes_are_checked(launch, tmp_path, nodes, what):
    done = launch(f"--workdir={tmp_path}", JAXVLM_NODES=nodes, ENDS="0 0")
    assert done.returncode == 2 and f"{what} is no number of nodes" in done.stderr


def test_going_on_counts_as_a_restart(launch, tmp_path):
    again = {"JAXVLM_NODES": "2 1", "ENDS": "lost 75", "ENDS_AGAIN": "75"}
    done = launch(f"--workdir={tmp_path}", JAXVLM_RESTARTS="1", **again)
    assert done.returncode == 1 and "given up: 1 restarts in a row" in done.stderr


@pytest.mark.parametrize("ends", ["task_stopped task_stopped", "killed 75"])
def test_a_job_that_is_cancelled_is_not_put_back(launch, ends):
    done = launch("--workdir=run", ENDS=ends, STATE="COMPLETING")
    assert "scontrol" not in done.stdout and "queue" not in done.stderr, done


def test_a_few_restarts_without_a_checkpoint_are_the_end(launch):
    def start(number: int, **variables: str) -> bool:
        given = {"ENDS": "killed 75", "SLURM_RESTART_COUNT": str(number), "JAXVLM_RESTARTS": "2"}
        done = launch("--workdir=run", **given | variables)
        if "scontrol requeue" in done.stdout:
            return True
        assert done.returncode == 1, done
        assert "restarts in a row brought no new checkpoint in run/checkpoints" in done.stderr
        return False

    assert start(0, saves="10.orbax-checkpoint-tmp")
    assert start(1, saves="damaged-5")
    assert start(2, saves="10")
    assert start(3) and start(4)
    assert not start(5)
    assert not start(6, saves="20"), "SLURM itself restarts it: it is over before a process starts"
    assert start(0), "another job counts anew"


def test_the_default_is_five_restarts(launch):
    for number in range(7):
        done = launch("--workdir=run", ENDS="killed 75", SLURM_RESTART_COUNT=str(number))
        assert ("scontrol requeue" in done.stdout) == (number < 5), number
        assert ("started" in done.stdout) == (number < 6), number


@pytest.mark.parametrize(
    "arguments",
    [["--workdir=a b/run"], ["--workdir", "a b/run"], ["-workdir=c", "--workdir=a b/run"]],
)
def test_the_workdir_is_found_in_the_arguments(launch, tmp_path, arguments):
    done = launch("--config=x y.py", *arguments, ENDS="0 0")
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == [" ".join(["started train --config=x y.py", *arguments])]
    assert (tmp_path / "a b" / "run" / "slurm" / "7" / "restarts").read_text() == "0\n"


def test_train_needs_a_workdir_and_others_do_not(launch, tmp_path):
    done = launch("--config=x.py", ENDS="0 0")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines() == [
        "slurm.sbatch: train needs a folder that all nodes see: --workdir=DIR"
    ]
    done = launch("--workdir=run", ENDS="0 0", JAXVLM_RESTARTS="many")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    done = launch(program="ends.py eval", ENDS="75 killed")
    assert "scontrol requeue" in done.stdout and (tmp_path / "xla" / "slurm" / "7").is_dir()
    done = launch("--workdir=gs://bucket/run", ENDS="2 2")
    assert done.returncode == 2 and not (tmp_path / "gs:").exists()


def test_checkpoints_in_a_bucket_count_as_progress(launch, tmp_path):
    """The run touches a file, and the restarts in a row begin anew."""
    job = tmp_path / "xla" / "slurm" / "7"
    job.mkdir(parents=True)
    for touches in (False, True):
        (job / "restarts").write_text("5\n")
        os.utime(job / "restarts", (1, 1))
        if touches:
            (job / "saved").touch()
        done = launch("--workdir=gs://bucket/run", ENDS="75 killed", SLURM_RESTART_COUNT="5")
        assert ("given up: " in done.stderr + done.stdout) is not touches, done
        if not touches:
            assert "no new checkpoint in gs://bucket/run/checkpoints" in done.stderr + done.stdout


PROGRAM = """
import os, signal, sys, time
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
    line = " ".join(["devices", str(int(jax.jit(jnp.sum)(ones))), *sys.argv[1:]])
    os.write(1, f"{line}\\n".encode())  # whole: both processes write to one pipe
    step = 0
    if not jax.process_index():
        os.kill(os.getppid(), signal.SIGTERM)
    while True:
        step += 1
        assert float(jax.jit(jnp.sum)(ones))
        if distributed.should_stop(step):
            os.write(1, f"saved at {step}\\n".encode())
            break
        time.sleep(0.01)
"""


def test_two_processes_make_one_run_which_sigterm_to_one_stops(launch, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launch(
        "--config=a b.py",
        "--workdir=run",
        program="program.py",
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        SLURM_JOB_ID=str(random.randrange(10**6)),
    )
    assert done.returncode == 0, done
    assert done.stdout.count("devices 8 --config=a b.py --workdir=run") == 2
    steps = [line for line in done.stdout.splitlines() if line.startswith("saved at")]
    assert len(steps) == 2 and steps[0] == steps[1]
    assert "scontrol requeue" in done.stdout
    assert (tmp_path / "xla").is_dir()
