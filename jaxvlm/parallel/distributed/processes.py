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
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxvlm.config import ConfigError
from jaxvlm.parallel.distributed.heartbeat import PeerWatch, die_of_absence, flush_and_exit
from jaxvlm.parallel.distributed.places import VARIABLES, find_place, is_asked_alone, refuse_alone

HEARTBEAT_S = 40  # JAX's own heartbeat, the fallback of PeerWatch; ends a hang within a minute
START_S = 280  # how long to wait for the others to start
SHARED_S = 20  # how long a network's file system may take to show a new file
SHUTDOWN_S = 600  # how long a finished process waits for the others to finish

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h
_liveness: list[PeerWatch] = []  # none, or the one of this process
_failed: list[BaseException] = []
_asked_to_stop: list[int] = []
_asked_for_trace: list[int] = []


class JoinError(RuntimeError):
    """The other processes of the run can't be reached."""


def set_up_process(compile_cache: str) -> None:
    """Apply the settings below; to be called before JAX starts its threads.

    Args:
        compile_cache: see :func:`use_compile_cache`.

    Raises:
        ConfigError: a setting of JAX is set that jaxvlm does not work with, or the environment
            describes several processes that nothing has joined.
    """
    if not (VARIABLES.isdisjoint(os.environ) or jax.distributed.is_initialized()):
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

    Reads the variables that :func:`jaxvlm.parallel.distributed.places.find_place` knows; with
    ``JAXVLM_DISTRIBUTED=auto`` JAX finds the processes itself (TPU VMs). Call it before any other
    use of JAX. Calling it again does nothing. ``JAXVLM_NUM_PROCESSES=1`` joins none.

    Returns:
        True if this run has several processes.

    Raises:
        ConfigError: the variables are incomplete or not numbers, or they describe several
            processes that nothing joins (:func:`refuse_alone`).
        JoinError: the other processes can't be reached.
    """
    if _liveness:
        return True
    if VARIABLES.isdisjoint(os.environ):
        return False
    place = find_place(os.environ)
    if place is None and not _detects_pod(os.environ):
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
    if place is not None:
        _wait_for_name(place.coordinator)
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


def from_first_process(call: Callable[[], Any]) -> Any:
    """What ``call`` returns in process 0, JSON-able; the others do not call it.

    Raises:
        RuntimeError: process 0 failed; it raises its own error.
    """
    failed, text = None, b""
    if not jax.process_index():
        try:
            text = json.dumps([call()]).encode()
        except Exception as error:
            failed = error
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    if failed is not None:
        raise failed
    if not size:
        raise RuntimeError("process 0 failed, and says why")
    data = np.zeros(size, np.uint8)
    data[: len(text)] = np.frombuffer(text, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes())[0]


def from_every_process(number: float) -> np.ndarray:
    """f32[processes]: each process's number, in all of them; all must call it."""
    if jax.process_count() == 1:
        return np.asarray([number], np.float32)
    return np.asarray(multihost_utils.process_allgather(np.float32(number))).reshape(-1)


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


def began() -> float:
    """When this process was started, in seconds of ``time.time()``; now where that is unknown."""
    try:
        ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


def catch_signals() -> None:
    """Make the next SIGTERM set :func:`should_stop` instead of ending the process.

    A second SIGTERM ends the process as usual. With several processes JAX has installed its
    handler in :func:`initialize`. SIGUSR2 asks for a trace. Outside of the main thread, where
    Python handles no signals, it does nothing.
    """
    _asked_to_stop.clear()
    catch_sigusr2()
    if not _liveness and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)


def catch_sigusr2() -> None:
    """Make SIGUSR2 set :func:`is_trace_asked` instead of ending the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR2, _on_sigusr2)


def _on_sigusr2(number: int, frame: Any) -> None:
    _asked_for_trace[:] = [number]


def is_trace_asked() -> bool:
    """Whether SIGUSR2 came to this process since the last call."""
    asked = bool(_asked_for_trace)
    _asked_for_trace.clear()
    return asked


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


def _detects_pod(environ: Mapping[str, str]) -> bool:
    """Whether JAX is to find the processes itself, by asking a TPU VM's metadata server."""
    return environ.get("JAXVLM_DISTRIBUTED") == "auto" and not is_asked_alone(environ)


def _wait_for_name(address: str) -> None:
    """Wait until a host's name is known: a pod's or a new node's may be published late.

    Ends with :func:`die_of_absence`, which ends the process.
    """
    host = address.rpartition(":")[0].strip("[]")
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError:
            time.sleep(1.0)


def _leave() -> None:
    """At exit: after success send bye, and JAX waits for the peers; after an error do not wait."""
    crashed = bool(_failed) or getattr(sys, "last_value", None) is not None
    _liveness[0].leave(failed=crashed)
    if crashed:
        flush_and_exit(1)
