"""Compile-only devices: descriptions of TPU pods and GPU clusters for the real compilers."""

from __future__ import annotations

import functools
import importlib.resources
import math
from typing import Any

from jaxvlm.config import ConfigError

_TARGETS = importlib.resources.files("jaxvlm.planner") / "targets"
"""One file per GPU, XLA's ``GpuTargetConfigProto``; figures from XLA's own
(``xla/backends/gpu/target_config/specs``), the RTX 4090's from NVIDIA's Ada white paper and the
CUDA programming guide's table of compute capabilities.
"""


@functools.cache
def gpus() -> tuple[str, ...]:
    """NVIDIA GPUs for which programs can be compiled."""
    names = (path.name for path in _TARGETS.iterdir())
    return tuple(sorted(n.removesuffix(".txtpb") for n in names if n.endswith(".txtpb")))


def devices(name: str, slices: int = 1) -> list[Any]:
    """Devices to compile for; no program can run on them.

    The compilers come with ``pip install 'jaxvlm[aot]'``. JAX itself should run on the CPU:
    ``JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1``.

    Args:
        name: ``v5p:4x4x4``, ``v5e:16x16``, ``v6e:16x16``: a TPU and its torus; ``h200:8``: a number
            of GPUs of a kind in :func:`gpus`, eight per host.
        slices: number of TPU slices of that topology, with slow links between them.

    Raises:
        ConfigError: unknown target, or its compiler is not installed.
    """
    from jax.experimental import topologies

    kind, _, size = name.partition(":")
    on_gpus = kind in gpus()
    if on_gpus and (not size.isdecimal() or (int(size) > 8 and int(size) % 8)):
        raise ConfigError(f"{name}: ask for up to 8 {kind.upper()}, or a multiple of 8")
    if on_gpus and slices != 1:
        raise ConfigError(f"{name} with slices={slices}: only TPUs have slices")
    try:
        if on_gpus:
            hosts, own = max(1, int(size) // 8), min(8, int(size))
            text = _TARGETS / f"{kind}.txtpb"
            description = topologies.get_topology_desc(
                "",
                platform="cuda",
                target_config=text.read_text(encoding="utf-8"),
                topology=f"1x{hosts}x{own}",
            )
        else:
            description = topologies.get_topology_desc(
                name, platform="tpu", num_slices=slices, **_one_host(size)
            )
    except (RuntimeError, ValueError) as error:  # JAX's own errors are RuntimeErrors too
        short = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{name}: unknown target, or its compiler is missing (pip install 'jaxvlm[aot]'): "
            f"{short}"
        ) from None
    return list(description.devices)


def _one_host(torus: str) -> dict[str, list[int]]:
    """Chips of a host, where there are fewer than libtpu takes a host to have."""
    dims = [int(n) for n in torus.split("x") if n.isdecimal()]
    few = math.prod(dims) <= 4
    return {"chips_per_host_bounds": (dims + [1, 1])[:3]} if few and dims else {}
