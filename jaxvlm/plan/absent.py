"""Devices and batches that are not there, for shapes and shardings alone: no compiler is asked.

Those that a compiler knows are in ``topology``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxvlm.config import DualConfig, MeshConfig, ModelConfig
from jaxvlm.parallel.mesh import AXES
from jaxvlm.types import Batch, Pairs


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


class Rows(NamedTuple):
    """Of a batch: what each has room for."""

    length: int
    """Tokens; 0: pictures alone."""
    pictures: int = 0
    patches: int = 0
    """Of its pictures, where they come packed."""


def batch(
    model: ModelConfig | DualConfig,
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

    sections = 0 if isinstance(model, DualConfig) else len(model.decoder.rope_sections)
    made = Batch(
        tokens=of(np.int32, length),
        loss_weight=of(np.float32, length),
        positions=of(np.int32, max(1, sections), length),
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


def pairs(
    model: ModelConfig | DualConfig,
    query: Rows,
    document: Rows,
    documents: int,
    examples: int,
    sharding: jax.sharding.Sharding | None = None,
) -> Pairs:
    """Shapes of a batch of pairs.

    Args:
        model: dims.
        query: an example's.
        document: likewise, each of its documents.
        documents: of an example.
        examples: of the batch.
        sharding: of each field.
    """

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((examples, *shape), dtype, sharding=sharding)

    asked, found = (batch(model, examples, *rows, sharding) for rows in (query, document))
    found = jax.tree.map(lambda x: of(x.dtype, documents, *x.shape[1:]), found)
    number, numbers = of(np.int32), of(np.int32, documents)
    return Pairs(asked, found, of(np.bool_, documents), number, numbers, example_id=number)
