"""Device meshes from a config field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from jaxvlm.config import ConfigError, MeshConfig

AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")
"""Mesh axes, slowest links first."""

BATCH_AXES = ("data", "fsdp", "expert")
"""The mesh axes that batch rows are split over."""


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh of ``config``'s shape.

    Args:
        config: devices along each axis; one may be -1, which takes all that are left.
        devices: which devices; all of them if ``None``.

    Returns:
        A mesh with the axes :data:`AXES`, of type Auto: the compiler completes shardings.

    Raises:
        ConfigError: the shape does not use exactly the devices there are.
    """
    devices = jax.devices() if devices is None else list(devices)
    sized = resolved(config, len(devices))
    shape = tuple(getattr(sized, axis) for axis in AXES)
    # Explicit axes are JAX's new default; Auto is named here, once (optax's losses need it).
    auto = (jax.sharding.AxisType.Auto,) * len(AXES)
    slices = num_hosts(devices)
    if devices[0].platform == "tpu" and slices > 1:
        if shape[0] % slices:
            raise ConfigError(
                f"config.mesh.data={shape[0]} is not a multiple of the {slices} slices: the slow "
                "links between them are for data alone"
            )
        inside, across = (shape[0] // slices, *shape[1:]), (slices, *(1 for _ in shape[1:]))
        grid = mesh_utils.create_hybrid_device_mesh(
            inside, across, devices, allow_split_physical_axes=True
        )
        return jax.sharding.Mesh(grid, AXES, axis_types=auto)
    if devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(  # knows the torus
            shape, devices, allow_split_physical_axes=True
        )
        return jax.sharding.Mesh(grid, AXES, axis_types=auto)
    return jax.sharding.Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=auto)


def num_hosts(devices: Sequence[Any]) -> int:
    """Groups of devices with fast links among them: slices of a TPU, else processes."""
    if devices[0].platform == "tpu":
        return len({getattr(device, "slice_index", 0) for device in devices})
    return len({device.process_index for device in devices})


def mesh_text(mesh: jax.sharding.Mesh) -> str:
    """Its axes, for people."""
    return " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """How many parts batch rows are split into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def shards_here(mesh: jax.sharding.Mesh) -> int:
    """Likewise, by the compiler: without the axes of a ``shard_map`` around."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES if axis not in manual)


def _nearest(sizes: Sequence[int], num_devices: int) -> str:
    """What the first axis that can mend it would have to be."""
    for axis, size in zip(AXES, sizes):
        others = math.prod(n for a, n in zip(AXES, sizes) if a != axis and n > 0)
        if size > 1 and num_devices % others == 0:
            left = num_devices // others
            return f"; {axis}={nearest_divisor(left, size) if -1 in sizes else left} would do"
    return ""


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest_divisor(number: int, to: int) -> int:
    """The divisor of ``number`` that is nearest to ``to``."""
    return min(divisors(number), key=lambda n: abs(n - to))


def resolved(config: MeshConfig, num_devices: int) -> MeshConfig:
    """``config`` with a number in the place of -1.

    Raises:
        ConfigError: the sizes do not use exactly ``num_devices``.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    text = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes))
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise ConfigError(f"config.mesh ({text}): sizes are positive; one may be -1 (the rest)")
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and num_devices % known == 0:
        sizes[sizes.index(-1)] = num_devices // known
    if math.prod(sizes) != num_devices:
        raise ConfigError(
            f"config.mesh ({text}) does not fit {num_devices} devices; "
            f"set sizes whose product is {num_devices}, or one of them to -1"
            + _nearest(sizes, num_devices)
        )
    return MeshConfig(**dict(zip(AXES, sizes)))
