"""Tests that neither read nor touch the machine around them. Imported before JAX.

A test run reads no variable that a user, a scheduler or a cloud has set, finds none of their
commands, writes below a temporary home folder, connects to this machine alone and leaves no
process behind. The compiled programs' folder is the one thing that is shared with the next run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import stat
import sys
import tempfile

from runs import FLAGS, compile_cache

OF_OTHERS = (
    "SLURM", "SRUN_", "SBATCH_", "OMPI_", "PMI", "PRTE_", "MPI_", "MV2_", "HYDRA_", "FLUX_", "JSM_",
    "PBS_",
    "JAX", "XLA_", "LIBTPU_", "TPU_", "CLOUD_TPU_", "MEGASCALE_", "TF_", "NCCL_", "CUDA_",
    "NVIDIA_", "ROCR_", "HIP_", "TRITON_", "KUBERNETES_", "JOB_COMPLETION_", "JOBSET_", "SKYPILOT_",
    "JOB_INDEX", "REPLICATED_JOB_", "PROCESSES_IN_JOB", "CLUSTER_SPEC",
    "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT", "COORDINATOR_", "NODE_RANK", "NNODES", "RAY_", "MLFLOW_",
    "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "SENTENCE_TRANSFORMERS_",
    "TORCH_HOME", "WANDB_", "TENSORBOARD_", "COMET_", "AWS_", "GOOGLE_", "GCLOUD_", "CLOUDSDK_",
    "AZURE_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "XDG_", "IPYTHON", "JUPYTER_",
    "MPL", "PYTHONWARNINGS", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTEST_TIMEOUT", "ML_DTYPES_",
)  # fmt: skip
"""How the names begin of variables that change what jaxvlm or a library of its does."""

OURS = {"JAXVLM_WHOLE_MATRIX", "JAXVLM_TEST_FOLDER", "JAXVLM_TEST_DEADLINE"}
"""Options of the test run itself."""

COMMANDS = (
    "scancel", "scontrol", "srun", "sbatch", "squeue", "sinfo", "sacct", "salloc", "flux", "qsub",
    "mpirun", "mpiexec", "gcloud", "gsutil", "kubectl", "aws", "az", "sky", "ray", "xpk", "docker",
    "ssh", "scp", "rsync", "curl", "wget", "wandb", "nvidia-smi",
)  # fmt: skip
"""Commands by which a test could reach another job, machine or account."""


def isolate() -> None:
    """Clear the environment, set up a home folder and commands that refuse to be called."""
    is_worker = "JAXVLM_TEST_FOLDER" in os.environ
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"] if is_worker else str(compile_cache())
    for name in list(os.environ):
        if name.upper().startswith(OF_OTHERS) and name not in OURS:
            del os.environ[name]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FLAGS}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["HF_HUB_OFFLINE"] = "1"
    _adopt_orphans()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a shell starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests' children inherit it
    sys.addaudithook(_stay_on_this_machine)
    if is_worker:
        return
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxvlm-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAXVLM_TEST_FOLDER"] = str(folder)
    os.environ.setdefault("PYTHONUSERBASE", str(pathlib.Path.home() / ".local"))
    for name in ("home", "commands"):
        (folder / name).mkdir()
    os.environ["HOME"] = str(folder / "home")
    for name in COMMANDS:
        command = folder / "commands" / name
        command.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/called\nexit 97\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = f"{folder / 'commands'}{os.pathsep}{os.environ['PATH']}"


def called() -> list[str]:
    """Return what tests called of :data:`COMMANDS`, a line each."""
    path = pathlib.Path(os.environ["JAXVLM_TEST_FOLDER"]) / "called"
    return path.read_text().splitlines() if path.exists() else []


def resident_bytes() -> int:
    """Return the memory that this process has in use; 0 where that is not known."""
    path = pathlib.Path("/proc/self/statm")
    pages = int(path.read_text().split()[1]) if path.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def mappings() -> int:
    """Return the number of memory mappings of this process; 0 where that is not known."""
    path = pathlib.Path("/proc/self/maps")
    return len(path.read_text().splitlines()) if path.exists() else 0


def children() -> dict[int, str]:
    """Return this process's children, {process id: command line}, that no library keeps."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                found[int(path.name)] = words
    kept = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "import sys;exec(")
    return {pid: words for pid, words in found.items() if not any(name in words for name in kept)}


def end_children(but: dict[int, str]) -> dict[int, str]:
    """Kill this process's children, and what they leave to it, but for those of ``but``."""
    ended: dict[int, str] = {}
    while left := {pid: words for pid, words in children().items() if pid not in but}:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        ended |= left
    return ended


def _adopt_orphans() -> None:
    """Become the parent of a killed child's children, which would go unseen otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _stay_on_this_machine(event: str, args: tuple) -> None:
    if event != "socket.connect":
        return
    address = args[1]
    host = address[0] if isinstance(address, tuple) else ""
    if host and host != "localhost" and not str(host).startswith(("127.", "::1", "0.0.0.0")):
        raise RuntimeError(f"a test connects to {address}")
