"""What the compilers and the transport are told before JAX starts, by platform, in one place.

Sources: JAX's "GPU performance tips", NVIDIA's JAX-Toolbox, and the flags that MaxText publishes
for TPU. The tests check that each exists: a compiler ends the process over one it does not know.
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
    },
    "cpu": {},
}
"""Platform -> group -> the variable that holds flags ("": each is a variable), and the flags.

``overlap`` sends while it computes; ``collective_matmul`` cuts matmuls under ``tensor`` into pieces
that are sent while others are computed; ``nccl`` gives small messages across hosts their buffers.
"""
KNOWN = ("overlap", "collective_matmul", "nccl")


def platform(environ: MutableMapping[str, str] = os.environ) -> str:
    """``gpu``, ``tpu`` or ``cpu``: what JAX will start on, without starting it."""
    asked = environ.get("JAX_PLATFORMS", "").split(",")[0]
    if asked:
        return {"cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}.get(asked, "cpu")
    if pathlib.Path("/dev/nvidiactl").exists():
        return "gpu"
    tpu = any(pathlib.Path(path).exists() for path in ("/dev/accel0", "/dev/vfio/0"))
    return "tpu" if tpu else "cpu"


def apply(groups: Iterable[str], environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set the variables of some groups for this machine's platform, before JAX starts.

    What a variable says already is left as it is: a user's flag is stronger.

    Args:
        groups: of :data:`KNOWN`; those that the platform does not have do nothing.
        environ: of the process.

    Returns:
        The variables that were changed.

    Raises:
        ConfigError: an unknown group.
    """
    changed = {}
    for name in groups:
        if name not in KNOWN:
            raise ConfigError(f"--xla_flags={name}; known: {', '.join(KNOWN)}, or nothing")
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
    """A line for each flag: platform, group, the flag."""
    return [
        f"{of} {group}: {variable + ' ' if variable else ''}{flag}={value}"
        for of, groups in GROUPS.items()
        for group, (variable, flags) in groups.items()
        for flag, value in flags.items()
    ]
