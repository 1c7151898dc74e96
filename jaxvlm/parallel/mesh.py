"""Device meshes: build a ``jax.sharding.Mesh`` from ``config.mesh``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from jaxvlm.config import ConfigError, MeshConfig

ISLAND = "island"
"""The mesh axis whose parts train apart between two outer updates."""
AXES = (ISLAND, "data", "pipeline", "fsdp", "expert", "context", "tensor")
"""Mesh axes, from the slowest links to the fastest."""

BATCH_AXES = (ISLAND, "data", "fsdp", "expert")
"""The mesh axes that the batch dimension is sharded over; see :func:`batch_axes`."""


def mesh_config(given: MeshConfig | str | None) -> MeshConfig:
    """Return the sizes of a mesh, of which ``"fsdp=4,tensor=2"`` names some.

    Args:
        given: the sizes; of axes that a text does not name it is 1. ``None`` or "" puts all devices
            on ``data``.

    Raises:
        ConfigError: it is neither.
    """
    if given is None or given == "":
        return MeshConfig()
    if isinstance(given, MeshConfig):
        return given
    axes = [field.name for field in dataclasses.fields(MeshConfig)]
    sizes = dict.fromkeys(axes, 1)
    for part in given.split(",") if isinstance(given, str) else [""]:
        axis, _, size = part.partition("=")
        if axis not in axes or not size.removeprefix("-").isdecimal():
            raise ConfigError(f"--mesh={given}: use AXIS=N,AXIS=N with the axes {', '.join(axes)}")
        sizes[axis] = int(size)
    return MeshConfig(**sizes)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Build the device mesh that ``config`` describes.

    Args:
        config: number of devices along each axis; one axis may be -1 and takes the remaining
            devices.
        devices: the devices to use; all of them if ``None``.

    Returns:
        A mesh with the axes :data:`AXES`, of type Auto: the compiler propagates shardings.

    Raises:
        ConfigError: the product of the sizes is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sized = resolved(config, len(devices))
    shape = tuple(getattr(sized, axis) for axis in AXES)
    # JAX's new default is Explicit axes; optax's losses need Auto.
    auto = (jax.sharding.AxisType.Auto,) * len(AXES)
    slices = num_hosts(devices)
    if devices[0].platform == "tpu" and slices > 1:
        across = _across_slices(sized, slices)
        inside = tuple(size // parts for size, parts in zip(shape, across))
        grid = mesh_utils.create_hybrid_device_mesh(
            inside, across, devices, allow_split_physical_axes=True
        )
        return jax.sharding.Mesh(grid, AXES, axis_types=auto)
    if devices[0].platform == "tpu":
        # It follows the physical torus.
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return jax.sharding.Mesh(grid, AXES, axis_types=auto)
    return jax.sharding.Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=auto)


def _across_slices(sized: MeshConfig, slices: int) -> tuple[int, ...]:
    """Return how often each axis crosses the slow links between slices: islands do, then data.

    Raises:
        ConfigError: another axis would have to.
    """
    islands = math.gcd(sized.island, slices)
    if sized.data % (slices // islands):
        also = f" and config.mesh.island={sized.island}" if sized.island > 1 else ""
        raise ConfigError(
            f"config.mesh.data={sized.data}{also} is not a multiple of the {slices} TPU slices: "
            "only the island and data axes may cross the slow links between slices"
        )
    return (islands, slices // islands, *(1 for _ in AXES[2:]))


def num_hosts(devices: Sequence[Any]) -> int:
    """Count groups of devices with fast links among them: slices on TPU, processes elsewhere."""
    if devices[0].platform == "tpu":
        return len({getattr(device, "slice_index", 0) for device in devices})
    return len({device.process_index for device in devices})


def mesh_text(mesh: jax.sharding.Mesh) -> str:
    """Format the mesh's axes and sizes, e.g. ``data=2 x fsdp=4``."""
    return " x ".join(_shown(mesh.shape))


def _shown(sizes: Mapping[str, int]) -> list[str]:
    """Format axes and sizes; islands are left out where there are none."""
    return [f"{axis}={n}" for axis, n in sizes.items() if axis != ISLAND or n != 1]


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Return the number of shards of the batch dimension."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def on_island() -> bool:
    """Whether the caller is traced for one island."""
    return ISLAND in jax.sharding.get_abstract_mesh().manual_axes


def batch_axes() -> tuple[str, ...]:
    """Return the batch axes that the compiler splits over: a ``shard_map``'s manual axes are not
    among them, so that what runs on an island knows of no other."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in BATCH_AXES if axis not in manual)


def shards_here(mesh: jax.sharding.Mesh) -> int:
    """Return the number of batch shards that the compiler makes, over :func:`batch_axes`."""
    return math.prod(mesh.shape[axis] for axis in batch_axes())


def mesh_here(mesh: jax.sharding.Mesh) -> Any:
    """Return the mesh as a nested ``shard_map`` takes it: with the manual axes of those around."""
    around = jax.sharding.get_abstract_mesh()
    return mesh if around.empty else around


def _nearest(sizes: Sequence[int], num_devices: int) -> str:
    """Suggest a size for the first axis that can make the mesh fit ``num_devices``."""
    for axis, size in zip(AXES, sizes):
        others = math.prod(n for a, n in zip(AXES, sizes) if a != axis and n > 0)
        if size > 1 and num_devices % others == 0:
            left = num_devices // others
            return f"; {axis}={nearest_divisor(left, size) if -1 in sizes else left} would do"
    return ""


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number``, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest_divisor(number: int, to: int) -> int:
    """Return the divisor of ``number`` that is nearest to ``to``."""
    return min(divisors(number), key=lambda n: abs(n - to))


def resolved(config: MeshConfig, num_devices: int) -> MeshConfig:
    """Replace the -1 in ``config`` by the number of devices that it stands for.

    Raises:
        ConfigError: the product of the sizes is not ``num_devices``.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    text = ", ".join(_shown(dict(zip(AXES, sizes))))
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise ConfigError(
            f"config.mesh ({text}): sizes must be positive; one may be -1 (all remaining devices)"
        )
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
