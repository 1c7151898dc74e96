"""Devices and batches that are not there, for shapes and shardings alone: no compiler is asked.

Those that a compiler knows are in ``topology``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxvlm.config import MeshConfig, ModelConfig
from jaxvlm.parallel.mesh import AXES
from jaxvlm.types import Batch


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


def batch(
    model: ModelConfig,
    rows: int,
    length: int,
    pictures: int,
    patches: int = 0,
    sharding: jax.sharding.Sharding | None = None,
) -> Batch:
    """Shapes of a batch.

    Args:
        model: dims.
        rows: of the batch.
        length: tokens of a row.
        pictures: of a row.
        patches: of a row, where pictures come packed.
        sharding: of each field.
    """

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding)

    made = Batch(
        tokens=of(np.int32, length),
        loss_weight=of(np.float32, length),
        positions=of(np.int32, max(1, len(model.decoder.rope_sections)), length),
        segment=of(np.int32, length),
    )
    if not pictures:
        return made
    made = made._replace(image_start=of(np.int32, pictures))
    vision = model.vision
    if vision.packed:
        width = 3 * vision.frames * vision.patch_size**2
        packed = of(np.uint8, patches, width)
        return made._replace(patches=packed, grid=of(np.int32, pictures, 3))
    side = vision.image_size
    return made._replace(pixels=of(np.uint8, pictures, side, side, 3))
