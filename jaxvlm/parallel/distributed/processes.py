"""Processes of a run: settings before JAX starts, initialization, preemption, exit without a hang.

A program calls :func:`initialize` before any other use of JAX, wraps its work in
:func:`guard_peers`, calls :func:`should_stop` once a step, and exits with :func:`exit_now`
where its exit status matters.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import json
import logging
import os
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxvlm.config import ConfigError
from jaxvlm.parallel.distributed.heartbeat import PeerWatch, die_of_absence, flush_and_exit

HEARTBEAT_S = 40  # JAX's own heartbeat, the fallback of PeerWatch; ends a hang within a minute
START_S = 280  # how long to wait for the others to start
SHARED_S = 20  # how long a network's file system may take to show a new file
SHUTDOWN_S = 600  # how long a finished process waits for the others to finish

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h
_liveness: list[PeerWatch] = []  # none, or the one of this process
_failed: list[BaseException] = []
_asked_to_stop: list[int] = []


class JoinError(RuntimeError):
    """The other processes of the run can't be reached."""


class ProcessPlace(NamedTuple):
    """A process's index, and how to reach the others."""

    coordinator: str
    """HOST:PORT on which process 0 listens."""
    num_processes: int
    process_id: int
    local_devices: list[int] | None
    """Indices of this machine's devices that this process uses; None: all."""


_COUNTS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "FLUX_JOB_SIZE": "FLUX_TASK_RANK",
    "JSM_NAMESPACE_SIZE": "JSM_NAMESPACE_RANK",
    "AWS_BATCH_JOB_NUM_NODES": "AWS_BATCH_JOB_NODE_INDEX",
    "JAX_NUM_PROCESSES": "JAX_PROCESS_ID",
    "WORLD_SIZE": "RANK",
    "SKYPILOT_NUM_NODES": "SKYPILOT_NODE_RANK",
    "MEGASCALE_NUM_SLICES": "MEGASCALE_SLICE_ID",
    "PROCESSES_IN_JOB": "JOB_COMPLETION_INDEX",
}
"""Others' variables that say how many processes there are -> which of them this one is."""


def set_up_process(compile_cache: str) -> None:
    """Apply the settings below; to be called before JAX starts its threads.

    Args:
        compile_cache: see :func:`use_compile_cache`.

    Raises:
        ConfigError: a setting of JAX is set that jaxvlm does not work with, or the environment
            describes several processes that nothing has joined.
    """
    if not jax.distributed.is_initialized():
        refuse_alone(os.environ)
    for name, value in (("jax_enable_x64", False), ("jax_numpy_dtype_promotion", "standard")):
        if jax.config.values[name] != value:
            raise ConfigError(
                f"{name.upper()}={jax.config.values[name]} is set: jaxvlm computes with JAX's "
                f"default, {value}; unset the variable"
            )
    keep_freed_memory()
    use_compile_cache(compile_cache)


def use_compile_cache(setting: str) -> None:
    """Enable JAX's persistent compilation cache, so that the next start is fast.

    Args:
        setting: a folder, ``auto`` (``~/.cache/jaxvlm/xla``), or ``""`` for none.

    Raises:
        ConfigError: the folder that is named can't be made.
    """
    if not setting or jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = pathlib.Path("~/.cache/jaxvlm/xla" if setting == "auto" else setting).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if setting != "auto":
            raise ConfigError(f"config.compile_cache={setting}: {error.strerror}") from None
        return  # a read-only home: slower, not wrong
    jax.config.update("jax_compilation_cache_dir", str(folder))


def keep_freed_memory() -> None:
    """Let glibc reuse memory that a CPU step frees, instead of returning it to the kernel.

    Every step allocates its temporary buffers; page faults on returned memory cost a fifth of a
    step. To be called before JAX starts its threads. Does nothing on a machine with an
    accelerator, whose buffers are not in host memory, or with another C library.
    """
    platforms = jax.config.values["jax_platforms"] or ""
    accelerators = ("/dev/nvidiactl", "/dev/accel0", "/dev/vfio/0", "/dev/kfd")
    if platforms != "cpu" and any(pathlib.Path(path).exists() for path in accelerators):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1):
            mallopt(option, value)


def initialize() -> bool:
    """Join the processes of this run, if the environment describes several.

    Reads ``JAXVLM_COORDINATOR``, ``JAXVLM_NUM_PROCESSES``, ``JAXVLM_PROCESS_ID``; then the
    variables of a SLURM step with several tasks; then ``JAXVLM_DISTRIBUTED=auto`` or several
    ``TPU_WORKER_HOSTNAMES``, where JAX detects the cluster itself (TPU pods). Call it before any
    other use of JAX. Calling it again does nothing. ``JAXVLM_NUM_PROCESSES=1`` joins none.

    Returns:
        True if this run has several processes.

    Raises:
        ConfigError: the variables are incomplete or not numbers, or they describe several
            processes that nothing joins (:func:`refuse_alone`).
        JoinError: the other processes can't be reached.
    """
    if _liveness:
        return True
    place = find_place(os.environ)
    if place is None and not _tpu_pod(os.environ):
        refuse_alone(os.environ)
        return False
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    settings: dict[str, Any] = {}
    if place is not None:
        settings = {
            "coordinator_address": place.coordinator,
            "num_processes": place.num_processes,
            "process_id": place.process_id,
            "local_device_ids": place.local_devices,
            "cluster_detection_method": "deactivate",
        }
    # JAX's own end of the wait, an abort with a C++ stack that names none, comes after ours.
    where_and_how_many = place[:3] if place else None
    joined = threading.Event()
    waiting = (START_S, where_and_how_many, joined)
    threading.Thread(target=die_of_absence, args=waiting, daemon=True).start()
    try:
        jax.distributed.initialize(
            initialization_timeout=START_S + 20,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
            **settings,
        )
    except (RuntimeError, ValueError) as error:  # ValueError: JAX finds no cluster
        where = f"process 0 at {place.coordinator}" if place else "the other hosts"
        raise JoinError(
            f"could not join {where}: {error}. Check that every process was started, that they "
            "agree on address and count, and that no firewall or proxy stands between"
        ) from error
    finally:
        joined.set()
    if place is not None:
        check_same("JAXVLM_NUM_PROCESSES", place.num_processes)
    if jax.process_count() == 1:
        refuse_alone(os.environ)
        return False
    if jax.process_index():
        logging.getLogger("jaxvlm").setLevel(logging.WARNING)  # process 0 logs for all
    _liveness.append(PeerWatch(jax.process_index(), jax.process_count()))
    # Registered after JAX's own exit handler, so it runs before it: JAX's waits for all peers.
    atexit.register(_leave)
    return True


def is_silent() -> bool:
    """Whether this process should print nothing: process 0 prints for all."""
    return bool(_liveness) and jax.process_index() > 0


@contextlib.contextmanager
def guard_peers() -> Iterator[None]:
    """Context manager for work with collectives: an error ends all processes instead of hanging.

    The error is raised to the caller; but if a peer's death caused it, one line ends the process.
    """
    try:
        yield
    except BaseException as error:
        if _liveness and not isinstance(error, GeneratorExit):
            time.sleep(2.0 if isinstance(error, Exception) else 0.0)  # a peer's death may be why
            _liveness[0].die_if_a_peer_broke(error)
            _failed.append(error)
            _liveness[0].leave(failed=True)
        raise


def end_if_a_peer_failed(error: Exception) -> None:
    """End the process with one line if a peer that failed is why a collective broke."""
    if _liveness:
        time.sleep(2.0)  # what the peer says may still be on its way
        _liveness[0].die_if_a_peer_broke(error)


def check_same(what: str, value: Any) -> None:
    """Refuse to continue where processes differ; they would mix data or deadlock.

    Args:
        what: the name of ``value`` in the error.
        value: JSON-able; compared by its hash.

    Raises:
        ConfigError: in every process, naming those that differ from process 0.
    """
    if jax.process_count() == 1:
        return
    text = json.dumps(value, sort_keys=True, default=str)
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
    every = np.asarray(multihost_utils.process_allgather(mine))
    others = [i for i, theirs in enumerate(every) if not np.array_equal(theirs, every[0])]
    if others:
        raise ConfigError(
            f"{what}: process {', '.join(map(str, others))} differs from process 0; every host "
            "must run the same command and see the same files"
        )


def check_shared(folder: pathlib.Path) -> None:
    """Refuse a folder that is not one folder for all processes: each would save a part of a run.

    Raises:
        ConfigError: in every process, naming those that do not see what process 0 writes.
    """
    if jax.process_count() == 1:
        return
    token = np.frombuffer(os.urandom(16), np.uint32)
    token = np.asarray(multihost_utils.broadcast_one_to_all(token))
    path = folder / f".shared-{token.tobytes().hex()}"
    if not jax.process_index():
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    barrier("the folder's token is written")
    end = time.monotonic() + SHARED_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.2)  # a network's file system shows a new file late
    sees = np.asarray(multihost_utils.process_allgather(np.asarray([path.exists()])))
    if not jax.process_index():
        path.unlink()
    if others := np.flatnonzero(~sees.reshape(-1)).tolist():
        raise ConfigError(
            f"--workdir={folder}: process {', '.join(map(str, others))} does not see what process "
            "0 writes there; give a folder on a file system that all hosts share"
        )


def barrier(name: str) -> None:
    """Wait for all processes; do nothing in a single one."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def exit_now(code: int) -> None:
    """End the process with ``code``, without waiting for peers if that is an error.

    Args:
        code: exit status; 0 exits normally, through the exit handlers.

    Raises:
        SystemExit: ``code`` is 0, or this run has one process.
    """
    if code == 0 or not _liveness:
        raise SystemExit(code)
    _liveness[0].leave(failed=True)
    flush_and_exit(code)


def catch_sigterm() -> None:
    """Make the next SIGTERM set :func:`should_stop` instead of ending the process.

    A second SIGTERM ends the process as usual. With several processes JAX has installed its
    handler in :func:`initialize`. Outside of the main thread, where Python handles no signals, it
    does nothing.
    """
    _asked_to_stop.clear()
    if not _liveness and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: Any) -> None:
    _asked_to_stop.append(number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def should_stop(step: int) -> bool:
    """Whether to save and stop now; the result is the same at the same step in every process.

    Args:
        step: the step about to be taken; each process must call it once at every step.
    """
    if _liveness:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    return bool(_asked_to_stop)


def find_place(environ: Any) -> ProcessPlace | None:
    """Read this process's place from environment variables; None for a single process.

    Args:
        environ: mapping of names to strings.

    Raises:
        ConfigError: the variables are incomplete or not numbers.
    """
    if _is_asked_alone(environ):
        return None
    names = ("JAXVLM_COORDINATOR", "JAXVLM_NUM_PROCESSES", "JAXVLM_PROCESS_ID")
    given = [name for name in names if environ.get(name)]
    if given and len(given) < len(names):
        missing = ", ".join(name for name in names if name not in given)
        raise ConfigError(f"{', '.join(given)} is set but {missing} is not: set all three or none")
    if given:
        count, process = (_number(environ, name) for name in names[1:])
        if process >= count:
            raise ConfigError(f"JAXVLM_PROCESS_ID is {process}; it must be below {count}")
        return ProcessPlace(environ[names[0]], count, process, None) if count > 1 else None
    return _slurm_place(environ)


def refuse_alone(environ: Any) -> None:
    """Refuse to work alone as one of several processes: each would do the whole work.

    ``JAXVLM_NUM_PROCESSES=1`` says that a process is meant to be alone.

    Args:
        environ: mapping of names to strings, of a process that nothing has joined to others.

    Raises:
        ConfigError: a launcher's variable says that there are several processes, or is malformed.
    """
    if _is_asked_alone(environ):
        return
    said = ""
    for name, index in _COUNTS.items():
        if environ.get(name) and _number(environ, name) > 1:
            said = f"{name}={environ[name]}: this is one of {environ[name]} processes"
            said += f" (number {index}={environ[index]})" if environ.get(index) else ""
            break
    hosts = environ.get("TPU_WORKER_HOSTNAMES", "")
    if not said and "," in hosts:
        said = f"TPU_WORKER_HOSTNAMES={hosts}: this is one of {hosts.count(',') + 1} processes"
    said = said or _jobset(environ) or _slurm_without_step(environ)
    if said:
        raise ConfigError(
            f"{said}, but nothing joins them; set JAXVLM_COORDINATOR=HOST:PORT, "
            "JAXVLM_NUM_PROCESSES and JAXVLM_PROCESS_ID in each (JAXVLM_DISTRIBUTED=auto on TPU "
            "slices, srun under SLURM), or JAXVLM_NUM_PROCESSES=1 to work alone"
        )


def _is_asked_alone(environ: Any) -> bool:
    return environ.get("JAXVLM_NUM_PROCESSES") == "1" and environ.get("JAXVLM_PROCESS_ID", "0") in (
        "",
        "0",
    )


def _jobset(environ: Any) -> str:
    """What says that this may be one of a JobSet's pods; "" where it is the only one."""
    if not environ.get("JOB_COMPLETION_INDEX"):
        return ""
    names = [n for n in ("JOBSET_NAME", "REPLICATED_JOB_NAME") if environ.get(n)]
    others = [n for n in ("JOB_COMPLETION_INDEX", "JOB_INDEX") if environ.get(n)]
    if above := [n for n in others if _number(environ, n) > 0]:
        return f"{above[0]}={environ[above[0]]}: this is one of several pods"
    # Neither Kubernetes nor JobSet says how many pods there are: xpk does, and TPUs' hosts do.
    if not names or environ.get("PROCESSES_IN_JOB") or environ.get("TPU_WORKER_HOSTNAMES"):
        return ""
    return f"{names[0]}={environ[names[0]]}: this is a pod of a JobSet, of any number"


def _slurm_without_step(environ: Any) -> str:
    """What says that SLURM has several tasks, of which srun did not start this process.

    A shell of ``salloc`` has no SLURM_PROCID; a step of one task is meant to be one.
    """
    if environ.get("SLURM_STEP_NUM_TASKS") or not environ.get("SLURM_PROCID"):
        return ""
    if not environ.get("SLURM_NTASKS") or _number(environ, "SLURM_NTASKS") < 2:
        return ""
    return f"SLURM_NTASKS={environ['SLURM_NTASKS']}: the job has several tasks"


def _slurm_place(environ: Any) -> ProcessPlace | None:
    # SLURM_STEP_NUM_TASKS exists only under srun; SLURM_NTASKS also in the batch script, where
    # one process would wait for peers that are never started.
    if not environ.get("SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_STEP_NUM_TASKS") < 2:
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    port = 61440 + _number(environ, "SLURM_JOB_ID") % 4096
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    return ProcessPlace(
        f"{first_host(nodes)}:{port}",
        _number(environ, "SLURM_STEP_NUM_TASKS"),
        _number(environ, "SLURM_PROCID"),
        # JAX's own detection would give each process one GPU; jaxvlm runs one process a node.
        None if re.match(r"1\b", per_node) else [_number(environ, "SLURM_LOCALID")],
    )


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: ``gpu[07-09,12],login`` -> ``gpu07``.

    Raises:
        ConfigError: the list is empty.
    """
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?", nodes)
    if not match:
        raise ConfigError("SLURM_STEP_NODELIST is empty: start the command with srun")
    prefix, ranges = match.groups()
    return prefix + (re.split(r"[-,]", ranges)[0] if ranges else "")


def _number(environ: Any, name: str) -> int:
    value = environ.get(name, "")
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    return int(value)


def _tpu_pod(environ: Any) -> bool:
    if _is_asked_alone(environ):
        return False
    hosts = environ.get("TPU_WORKER_HOSTNAMES", "")
    return environ.get("JAXVLM_DISTRIBUTED") == "auto" or "," in hosts


def _leave() -> None:
    """At exit: after success send bye, and JAX waits for the peers; after an error do not wait."""
    crashed = bool(_failed) or getattr(sys, "last_value", None) is not None
    _liveness[0].leave(failed=crashed)
    if crashed:
        flush_and_exit(1)
