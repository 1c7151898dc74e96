"""Where a program's time goes, by JAX's profiler: kernels of a GPU, operations of a TPU."""

from __future__ import annotations

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

MOST = 20
"""Kinds of kernels that are named; the rest is summed."""
KINDS = (
    ("matmuls", "nvjet|gemm|cutlass|cublas|dot|convolution"),
    ("attention", "flash|fmha|cudnn"),
    ("between devices", "nccl|all-reduce|all-gather|reduce-scatter|collective|all-to-all"),
    ("copies", "copy|memcpy|memset|transpose"),
    ("reductions", "reduce"),
    ("elementwise", ""),
)
"""What a kernel does, by the first pattern that its name has."""
_NUMBER = re.compile(r"[._]?\d+(?=[._]|$)")


def kernels(program: Callable[[], Any], runs: int) -> dict[str, Any]:
    """Milliseconds of a run that the first device spends in each kind of kernel.

    Args:
        program: runs once, and returns when the device has ended.
        runs: how often to run it; figures are of one run.

    Returns:
        ``busy_ms``: the sum of all; ``kinds_ms``: by ``KINDS``; ``kernels_ms``: name ->
        milliseconds, the most first; names are the compiler's, less their numbers. Empty if the
        profiler saw no device (on a CPU, say).
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                program()
        found = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        total = _device_times(found[0]) if found else {}
    if not total:
        return {}
    names: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for name, ns in total.items():
        ms = ns / runs / 1e6
        names["nvjet (cuBLAS)" if name.startswith("nvjet") else _NUMBER.sub("", name)[:80]] += ms
        kinds[next(kind for kind, pattern in KINDS if re.search(pattern, name.lower()))] += ms
    most = names.most_common(MOST)
    return {
        "busy_ms": round(sum(names.values()), 3),
        "kinds_ms": {name: round(ms, 3) for name, ms in kinds.most_common()},
        "kernels_ms": {name: round(ms, 3) for name, ms in most},
    }


def _device_times(file: pathlib.Path) -> dict[str, float]:
    """Nanoseconds of each kernel of the first device in a profile."""
    total: collections.Counter[str] = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if not re.fullmatch(r"/device:(GPU|TPU):0", plane.name):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream") or line.name == "XLA Ops":
                for event in line.events:
                    total[event.name] += event.duration_ns
    return total
