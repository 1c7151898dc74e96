"""Devices that are not there: what the real compilers need to know of a TPU pod or GPU cluster."""

from __future__ import annotations

import functools
import importlib.resources
from typing import Any

from jaxvlm.config import ConfigError

_TARGETS = importlib.resources.files("jaxvlm.plan") / "targets"
"""A file a GPU, as XLA's ``GpuTargetConfigProto``; figures from XLA's own
(``xla/backends/gpu/target_config/specs``)."""


@functools.cache
def gpus() -> tuple[str, ...]:
    """NVIDIA GPUs that can be compiled for."""
    names = (path.name for path in _TARGETS.iterdir())
    return tuple(sorted(n.removesuffix(".txtpb") for n in names if n.endswith(".txtpb")))


def devices(name: str, slices: int = 1) -> list[Any]:
    """Devices to compile for; nothing can be run on them.

    The compilers come with ``pip install 'jaxvlm[aot]'``. JAX itself should run on the CPU:
    ``JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1``.

    Args:
        name: ``v5p:4x4x4``, ``v5e:16x16``, ``v6e:16x16``: a TPU and its torus; ``h200:8``: as many
            of one of :func:`gpus`, eight a host.
        slices: of TPUs, such tori with slow links between them.

    Raises:
        ConfigError: no such target, or its compiler is not installed.
    """
    from jax.experimental import topologies

    kind, _, size = name.partition(":")
    on_gpus = kind in gpus()
    if on_gpus and (not size.isdecimal() or (int(size) > 8 and int(size) % 8)):
        raise ConfigError(f"{name}: up to 8 {kind.upper()}, or a multiple of 8")
    if on_gpus and slices != 1:
        raise ConfigError(f"{name} with slices={slices}: slices are of TPUs")
    try:
        if on_gpus:
            hosts, own = max(1, int(size) // 8), min(8, int(size))
            text = _TARGETS / f"{kind}.txtpb"
            found = topologies.get_topology_desc(
                "",
                platform="cuda",
                target_config=text.read_text(encoding="utf-8"),
                topology=f"1x{hosts}x{own}",
            )
        else:
            found = topologies.get_topology_desc(name, platform="tpu", num_slices=slices)
    except (RuntimeError, ValueError) as error:  # JAX's own errors are RuntimeErrors too
        short = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{name}: no such target, or its compiler is missing (pip install 'jaxvlm[aot]'): "
            f"{short}"
        ) from None
    return list(found.devices)
