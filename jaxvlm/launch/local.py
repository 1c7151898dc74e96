"""This machine: its devices divided among processes, which are started again where one is lost.

``jaxvlm launch local`` calls this module as a program, which needs no JAX itself.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.launch.job import STOPPED, Job, Rendered
from jaxvlm.parallel.distributed import exit_status
from jaxvlm.planner.hardware.machine import Machine

WAIT_S = 120.0
"""Seconds that processes have to end once one has ended otherwise than well."""
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
    return Rendered({}, call, in_place=True)


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

    Raises:
        ConfigError: ``CUDA_VISIBLE_DEVICES`` shows fewer GPUs than the processes have.
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
        self.environment, self.is_stopped = {**os.environ, **environment}, False
        self.status_of_stop = 0
        self.running: list[subprocess.Popen[bytes]] = []
        self.hung: set[int] = set()
        """Processes that did not end by themselves, and were killed here: not lost."""
        self.slots = list(range(sizes[0]))
        """Parts of the machine's devices that are left, one a process."""
        self.gpus = [str(i) for i in range(sizes[0] * devices)]
        if platform == "gpu" and "CUDA_VISIBLE_DEVICES" in self.environment:
            shown = self.environment["CUDA_VISIBLE_DEVICES"]
            self.gpus = [gpu for gpu in shown.split(",") if gpu]
            if len(self.gpus) < sizes[0] * devices:
                raise ConfigError(
                    f"CUDA_VISIBLE_DEVICES={shown} shows {len(self.gpus)} GPUs, and --devices asks "
                    f"for {sizes[0] * devices}"
                )

    def run(self, restarts: int) -> int:
        """Run to the end, starting again where a process is lost; return the status to end with.

        Args:
            restarts: how often.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGUSR2, lambda *_: self._signal_all(signal.SIGUSR2))
        size = self.sizes[0]
        for attempt in range(restarts + 1):
            ends = self._once(size)
            if failed := [end for end in ends if exit_status.is_error(end)]:
                return max(failed)
            killed = [i for i, end in enumerate(ends) if _is_signal(end) and i not in self.hung]
            if self.is_stopped:
                _say("stopped; the same command resumes")
                return max((_as_shell(ends[i]) for i in killed), default=self.status_of_stop)
            if not any(ends):
                return 0
            words = f"{len(killed)} of {size} processes lost" if killed else "a process stopped"
            if len(self.sizes) > 1:
                size, more = self._fewer(killed)
                words += more
            if attempt < restarts:
                _say(f"{words}; starting again with {size}")
        _say(f"given up after {restarts} restarts")
        return exit_status.LOST

    def _fewer(self, killed: Sequence[int]) -> tuple[int, str]:
        """The number of processes to go on with, on the parts that are left; and what to say."""
        lost = {self.slots[number] for number in killed}
        self.slots = [slot for slot in self.slots if slot not in lost]
        left = [n for n in self.sizes if n <= len(self.slots)]
        if left:
            return left[0], ""
        more = f"; {len(self.slots)} are fewer than {self.sizes[-1]}, so all are tried again"
        self.slots = list(range(self.sizes[0]))
        return self.sizes[0], more

    def _once(self, size: int) -> list[int]:
        """Start the processes; the status of each."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if self.is_stopped:
            return []
        self.running = [
            subprocess.Popen(
                self.command,
                env=self.environment | self._variables(i, size, port),
                start_new_session=True,
                preexec_fn=_prepare,
            )
            for i in range(size)
        ]
        if self.is_stopped:
            self._signal_all(signal.SIGTERM)
        deadline, self.hung = math.inf, set()
        while None in (ends := [process.poll() for process in self.running]):
            if deadline == math.inf and any(ends):
                deadline = time.monotonic() + WAIT_S
            if time.monotonic() > deadline and not self.is_stopped:
                _say(f"a process does not end {WAIT_S:.0f} s after another one; it is killed")
                self.hung |= {i for i, end in enumerate(ends) if end is None}
                for process in self.running:
                    process.kill()
            time.sleep(0.1)
        return [process.wait() for process in self.running]

    def _variables(self, process: int, size: int, port: int) -> dict[str, str]:
        """Variables of a process: its place, and its devices."""
        own = {
            "JAXVLM_COORDINATOR": f"127.0.0.1:{port}",
            "JAXVLM_NUM_PROCESSES": str(size),
            "JAXVLM_PROCESS_ID": str(process),
            STOPPED[0]: STOPPED[1],
        }
        if self.platform == "cpu":
            words = self.environment.get("XLA_FLAGS", "").split()
            words = [word for word in words if _CPU_DEVICES not in word]
            own["XLA_FLAGS"] = " ".join([*words, f"{_CPU_DEVICES}={self.devices}"])
            own["JAX_PLATFORMS"] = "cpu"
        else:
            first = self.slots[process] * self.devices
            own["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[first : first + self.devices])
        return own

    def _stop(self, number: int, frame: Any) -> None:
        """Have the run save and stop; a second signal ends it unsaved."""
        if self.is_stopped:
            for process in self.running:
                process.kill()
        self.is_stopped = True
        self.status_of_stop = int(os.environ.get("JAXVLM_STOPPED_STATUS", "0"))
        if number == signal.SIGINT:
            self.status_of_stop = 130  # as of any command that Ctrl-C ends
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for process in self.running:
            process.send_signal(number)


def _is_signal(status: int) -> bool:
    return status < 0 or status >= 128


def _as_shell(status: int) -> int:
    """The status of a process that a signal ended, as a shell gives it."""
    return 128 - status if status < 0 else status


def _prepare() -> None:
    """What a process is started with.

    Linux ends it where its supervisor is killed: it would keep the run's folder. A signal that asks
    for a trace does nothing until the run listens to it.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _say(line: str) -> None:
    print(f"launch local: {line}", file=sys.stderr, flush=True)


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
    try:
        made = Supervisor(command, sizes, given.devices, given.platform, variables)
    except ConfigError as error:
        print(f"jaxvlm: {error}", file=sys.stderr)
        return 2
    return made.run(given.restarts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
