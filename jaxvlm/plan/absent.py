"""Devices that are not there, for shapes and shardings alone: no compiler is asked.

Those that a compiler knows are in ``topology``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from jaxvlm.config import MeshConfig
from jaxvlm.parallel.mesh import AXES


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh and the strategies ask of a ``jax.Device``."""

    id: int
    platform: str
    """cpu | gpu | tpu."""
    device_kind: str = ""
    process_index: int = 0
    slice_index: int = 0


def devices(platform: str, count: int, a_host: int = 0) -> list[Any]:
    """So many, ``a_host`` of them a process; 0: one process has all."""
    return [Device(i, platform, platform, i // (a_host or count)) for i in range(count)]


@functools.lru_cache(maxsize=256)
def mesh(sizes: MeshConfig, platform: str) -> Mesh:
    """A mesh of a resolved config's shape."""
    shape = tuple(getattr(sizes, axis) for axis in AXES)
    grid = np.array(devices(platform, int(np.prod(shape))), dtype=object).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
