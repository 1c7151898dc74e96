"""What benchmarks share: the machine in words, workers in processes of their own, ABAB."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"


def environment() -> dict[str, Any]:
    """Hardware, versions, load and the command, for a result's JSON."""
    from jaxvlm.checkpoint.run_record import (
        source_commit,  # with JAX, whose settings callers make first
    )

    cpu = "unknown"
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [
            x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        cpu = names[0] if names else cpu
    packages = ("jax", "jaxlib", "torch", "transformers", "flax", "optax", "numpy", "pillow")
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
        "versions": versions,
        "commit": source_commit(),
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
    }


def summary(seconds: list[list[float]]) -> dict[str, float]:
    """Of pairs (wall, CPU seconds): minimum and median in milliseconds."""
    wall, cpu = zip(*seconds, strict=True)
    return {
        "min_ms": round(1e3 * min(wall), 2),
        "median_ms": round(1e3 * statistics.median(wall), 2),
        "cpu_min_ms": round(1e3 * min(cpu), 2),
        "cpu_median_ms": round(1e3 * statistics.median(cpu), 2),
        "samples": len(seconds),
    }


def timed(work: Callable[[], Any]) -> list[float]:
    """[wall, CPU] seconds of ``work``.

    CPU time (of all threads) is what a shared machine does not distort.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return [time.perf_counter() - wall, time.process_time() - cpu]


def child(file: str, *given: str) -> dict[str, Any]:
    """Run a benchmark's own file with arguments; returns the JSON of the last line it prints."""
    command = [sys.executable, file, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(done.stdout.splitlines()[-1], flush=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write(name: str, result: dict[str, Any], folder: pathlib.Path = RESULTS) -> None:
    """Write ``result`` as JSON and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


def worst_leaf(
    grads: Mapping[str, Any], expected: Mapping[str, Any], bar: float = 1e-5
) -> tuple[float, str]:
    """The largest error of a gradient leaf by docs/design.md's measure, and which leaf's.

    Args:
        grads: path -> array.
        expected: path -> array.
        bar: an expected leaf below it is taken for the zero that it stands for (a key bias).
    """

    def norm(x: Any) -> float:
        return float(np.linalg.norm(np.asarray(x, np.float64)))

    whole = math.sqrt(sum(norm(g) ** 2 for g in expected.values()))
    count, worst = sum(g.size for g in expected.values()), (0.0, "")
    for path, g in expected.items():
        against = max(norm(g), 1e-2 * whole * math.sqrt(g.size / count))
        true = np.asarray(g) if norm(g) > bar * against else np.zeros_like(g)
        off = norm(np.asarray(grads[path]) - true) / against
        worst = max(worst, (off if math.isfinite(off) else math.inf, path))
    return worst


def kept(name: str) -> list[dict[str, Any]]:
    """Rows of the result ``name``, where there is one: what takes minutes a row goes on from it."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


class Worker:
    """A contestant in a process of its own, idle on its pipe while another runs.

    The process prints one JSON line when its first step is done, and one for each line it reads.
    """

    def __init__(self, name: str, script: str, *args: str, threads: int = 2):
        env = dict(os.environ, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", JAX_PLATFORMS="cpu")
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = env["NPROC"] = str(threads)
        # Spinning at barriers makes torch ten times slower where other work shares the cores.
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        if threads == 1:
            env["XLA_FLAGS"] = env.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
        # Every start is a cold one: no compiled program is found on disk.
        env.pop("JAX_COMPILATION_CACHE_DIR", None)
        self._cache = tempfile.TemporaryDirectory()
        env["TORCHINDUCTOR_CACHE_DIR"] = self._cache.name
        self.name = name
        start = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "workers" / script), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.ready = self._answer()
        self.start_to_first_step = time.perf_counter() - start

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line, wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._cache.cleanup()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"worker {self.name} ended with {self._process.wait()}")


def serve(ready: dict[str, Any], run: Any) -> None:
    """The worker's side: ``run(n)`` returns the seconds of n steps."""
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": run(int(line))}), flush=True)
