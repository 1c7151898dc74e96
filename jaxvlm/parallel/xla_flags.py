"""Flags of XLA, libtpu and NCCL that are set before JAX starts, by platform.

Sources: JAX's "GPU performance tips", NVIDIA's JAX-Toolbox, and the flags that MaxText publishes
for TPU. The tests check that each exists: XLA ends the process over a flag that it does not know.
None is set unless asked for: benchmarks/results/overlap_aot.json says what ``overlap`` adds to what
the compilers do by themselves, and each time it is memory too.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, MutableMapping

from jaxvlm.config import ConfigError

GROUPS: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "gpu": {
        "overlap": (
            "XLA_FLAGS",
            {
                "--xla_gpu_enable_latency_hiding_scheduler": "true",
                "--xla_gpu_enable_pipelined_all_gather": "true",
                "--xla_gpu_enable_pipelined_reduce_scatter": "true",
                "--xla_gpu_enable_pipelined_all_reduce": "true",
            },
        ),
        "collective_matmul": (
            "XLA_FLAGS",
            {
                "--xla_gpu_threshold_for_windowed_einsum_mib": "0",
                "--xla_gpu_multi_streamed_windowed_einsum": "true",
            },
        ),
        "nccl": (
            "",
            {
                "NCCL_LL128_BUFFSIZE": "-2",
                "NCCL_LL_BUFFSIZE": "-2",
                "NCCL_PROTO": "SIMPLE,LL,LL128",
            },
        ),
    },
    "tpu": {
        "overlap": (
            "LIBTPU_INIT_ARGS",
            {
                "--xla_tpu_enable_async_collective_fusion": "true",
                "--xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
                "--xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
                "--xla_tpu_overlap_compute_collective_tc": "true",
                "--xla_enable_async_all_gather": "true",
                "--xla_enable_async_collective_permute": "true",
                "--xla_tpu_enable_data_parallel_all_reduce_opt": "true",
                "--xla_tpu_data_parallel_opt_different_sized_ops": "true",
            },
        ),
        "collective_matmul": (
            "LIBTPU_INIT_ARGS",
            {"--xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"},
        ),
        "whole_matmul": (
            "LIBTPU_INIT_ARGS",
            {"--xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
        ),
    },
    "cpu": {},
}
"""Platform -> group -> the environment variable that holds flags ("": each flag is a variable of
its own), and the flags.

``overlap`` overlaps collectives with computation; ``collective_matmul`` splits tensor-parallel
matmuls into pieces that are sent while others are computed; ``whole_matmul`` gathers weights before
they are multiplied, where libtpu by itself adds up products of their shards in memory; ``nccl``
sets buffers for small messages between hosts.
"""
KNOWN = ("overlap", "collective_matmul", "whole_matmul", "nccl")


def platform(environ: MutableMapping[str, str] = os.environ) -> str:
    """Return the platform that JAX will use, without starting it: ``gpu``, ``tpu`` or ``cpu``."""
    requested = environ.get("JAX_PLATFORMS", "").split(",")[0]
    if requested:
        return {"cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}.get(requested, "cpu")
    if pathlib.Path("/dev/nvidiactl").exists():
        return "gpu"
    tpu = any(pathlib.Path(path).exists() for path in ("/dev/accel0", "/dev/vfio/0"))
    return "tpu" if tpu else "cpu"


def apply(groups: Iterable[str], environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set the environment variables of some flag groups for this platform, before JAX starts.

    Flags and variables that the user has set already take precedence and are not changed.

    Args:
        groups: names in :data:`KNOWN`; groups that the platform does not have do nothing.
        environ: the process's environment.

    Returns:
        The variables that were changed, with their new values.

    Raises:
        ConfigError: an unknown group, or two that contradict each other.
    """
    changed, groups = {}, list(groups)
    if {"collective_matmul", "whole_matmul"} <= set(groups):
        raise ConfigError(
            "--xla_flags=collective_matmul splits matmuls and whole_matmul does not; leave one out"
        )
    for name in groups:
        if name not in KNOWN:
            raise ConfigError(f"--xla_flags={name}; known: {', '.join(KNOWN)}, or empty")
        variable, flags = GROUPS[platform(environ)].get(name, ("", {}))
        for flag, value in flags.items():
            key = variable or flag
            before = environ.get(key, "")
            if f"{flag}=" in before or (before and not variable):
                continue
            environ[key] = f"{before} {flag}={value}".strip() if variable else value
            changed[key] = environ[key]
    return changed


def table() -> list[str]:
    """Format one line for each flag: platform, group, flag."""
    return [
        f"{of} {group}: {variable + ' ' if variable else ''}{flag}={value}"
        for of, groups in GROUPS.items()
        for group, (variable, flags) in groups.items()
        for flag, value in flags.items()
    ]
