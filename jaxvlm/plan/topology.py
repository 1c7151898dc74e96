"""Devices that are not there: what the real compilers need to know of a TPU pod or GPU cluster."""

from __future__ import annotations

import importlib.resources
from typing import Any

from jaxvlm.config import ConfigError


def devices(name: str, slices: int = 1) -> list[Any]:
    """Devices to compile for; nothing can be run on them.

    The compilers come with ``pip install 'jaxvlm[aot]'``. JAX itself should run on the CPU:
    ``JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1``.

    Args:
        name: ``v5p:4x4x4``, ``v5e:16x16``, ``v6e:16x16``: a TPU and its torus; ``h200:8``: as many
            NVIDIA H200, eight a host.
        slices: of TPUs, such tori with slow links between them.

    Raises:
        ConfigError: no such target, or its compiler is not installed.
    """
    from jax.experimental import topologies

    kind, _, size = name.partition(":")
    if kind == "h200" and (not size.isdecimal() or (int(size) > 8 and int(size) % 8)):
        raise ConfigError(f"{name}: up to 8 H200, or a multiple of 8")
    if kind == "h200" and slices != 1:
        raise ConfigError(f"{name} with slices={slices}: slices are of TPUs")
    try:
        if kind == "h200":
            hosts, own = max(1, int(size) // 8), min(8, int(size))
            text = importlib.resources.files("jaxvlm.plan") / "targets" / "h200.txtpb"
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
