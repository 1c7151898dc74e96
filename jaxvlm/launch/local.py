"""This machine: its devices divided among processes, which are started again where one is lost.

``jaxvlm launch local`` calls this module as a program, which needs no JAX itself.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.launch.job import Job, Rendered
from jaxvlm.parallel.distributed.exit_status import LOST
from jaxvlm.planner.hardware.machine import Machine

_CPU_DEVICES = "--xla_force_host_platform_device_count"


def render(job: Job, processes: int = 0) -> Rendered:
    """Call this module with the job's command.

    Args:
        job: to run; its machine is this one, and ``sizes`` are numbers of processes.
        processes: among which the devices are divided; 0: a process for each device.

    Raises:
        ConfigError: another machine, or devices that can't be divided so.
    """
    count = processes_of(job.machine, processes)
    flags = [f"--sizes={','.join(map(str, job.sizes or (count,)))}"]
    flags += [f"--devices={job.machine.devices // count}", f"--platform={job.machine.platform}"]
    flags += [f"--restarts={job.restarts}"]
    variables = [f"--env={name}={value}" for name, value in job.environment]
    call = (sys.executable, "-m", "jaxvlm.launch.local", *flags, *variables, "--", *job.arguments)
    return Rendered({}, call)


def processes_of(machine: Machine, processes: int) -> int:
    """The number of processes on a machine.

    Raises:
        ConfigError: it is none that processes of one machine can share, or does not divide.
    """
    if machine.hosts > 1:
        raise ConfigError(
            f"launch local starts processes on this machine, and {machine.name}:{machine.devices} "
            "is several; use launch slurm, ray or gke"
        )
    if machine.platform == "tpu":
        raise ConfigError(
            "launch local divides GPUs or CPU devices; the chips of a TPU VM belong to one process"
        )
    count = processes or machine.devices
    if count < 1 or machine.devices % count:
        raise ConfigError(
            f"--processes={count} does not divide {machine.devices} devices; name a divisor"
        )
    return count


class Supervisor:
    """Processes of one run on this machine.

    Args:
        command: of each process.
        sizes: numbers of processes with which the run may go on, most first; it starts with the
            first.
        devices: of a process.
        platform: ``cpu`` or ``gpu``.
        environment: more variables of the processes.
    """

    def __init__(
        self,
        command: Sequence[str],
        sizes: Sequence[int],
        devices: int,
        platform: str,
        environment: Mapping[str, str],
    ):
        self.command, self.sizes, self.devices, self.platform = command, sizes, devices, platform
        self.environment, self.is_stopped = environment, False
        self.running: list[subprocess.Popen[bytes]] = []

    def run(self, restarts: int) -> int:
        """Run to the end, starting again where a process is lost; return the status to end with.

        Args:
            restarts: how often.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        size = self.sizes[0]
        for attempt in range(restarts + 1):
            ends = self._once(size)
            failed = [end for end in ends if 0 < end < 128 and end != LOST]
            if failed or not any(ends) or self.is_stopped:
                return max((*failed, *([] if failed else ends)), default=0)
            lost = sum(end < 0 or end >= 128 for end in ends)
            left = [n for n in self.sizes if n <= size - lost]
            words = f"{lost} of {size} processes lost" if lost else "a process can't be reached"
            if len(self.sizes) > 1 and lost and not left:
                return _end(f"{words}; {size - lost} are too few: --min_nodes={self.sizes[-1]}")
            size = left[0] if len(self.sizes) > 1 and lost else size
            if attempt < restarts:
                _say(f"{words}; starting again with {size}")
        return _end(f"given up after {restarts} restarts")

    def _once(self, size: int) -> list[int]:
        """Start the processes; the status of each."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if self.is_stopped:
            return [LOST]
        self.running = [
            subprocess.Popen(
                self.command,
                env=self._variables(i, size, port),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            for i in range(size)
        ]
        if self.is_stopped:
            self._signal_all()
        return [process.wait() for process in self.running]

    def _variables(self, process: int, size: int, port: int) -> dict[str, str]:
        """Variables of a process: its place, and its devices."""
        own = {
            "JAXVLM_COORDINATOR": f"127.0.0.1:{port}",
            "JAXVLM_NUM_PROCESSES": str(size),
            "JAXVLM_PROCESS_ID": str(process),
        }
        given = {**os.environ, **self.environment}
        if self.platform == "cpu":
            words = [w for w in given.get("XLA_FLAGS", "").split() if _CPU_DEVICES not in w]
            own["XLA_FLAGS"] = " ".join([*words, f"{_CPU_DEVICES}={self.devices}"])
            own["JAX_PLATFORMS"] = "cpu"
        else:
            shown = given.get("CUDA_VISIBLE_DEVICES", "")
            every = shown.split(",") if shown else None
            mine = range(process * self.devices, (process + 1) * self.devices)
            own["CUDA_VISIBLE_DEVICES"] = ",".join(every[i] if every else str(i) for i in mine)
        return given | own

    def _stop(self, number: int, frame: Any) -> None:
        """Have the run save and stop; a second signal ends it unsaved."""
        if self.is_stopped:
            for process in self.running:
                process.kill()
        self.is_stopped = True
        self._signal_all()

    def _signal_all(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGTERM)


def _end_with_parent() -> None:
    """Let Linux end the process where its supervisor is killed: it would keep the run's folder."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _say(line: str) -> None:
    print(f"launch local: {line}", file=sys.stderr, flush=True)


def _end(line: str) -> int:
    _say(line)
    return LOST


def main(words: Sequence[str]) -> int:
    """Run the command after ``--``; see :class:`Supervisor`."""
    parser = argparse.ArgumentParser(prog="python -m jaxvlm.launch.local")
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--platform", required=True)
    parser.add_argument("--restarts", type=int, required=True)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(words)
    command = [sys.executable, "-m", "jaxvlm", *given.command]
    variables = dict(pair.split("=", 1) for pair in given.env)
    sizes = [int(size) for size in given.sizes.split(",")]
    return Supervisor(command, sizes, given.devices, given.platform, variables).run(given.restarts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
