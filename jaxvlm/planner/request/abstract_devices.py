"""Abstract devices and batches: enough for shapes and shardings, without any compiler.

``topology`` has the devices that a compiler can compile for.
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
    """The attributes of a ``jax.Device`` that a mesh and the strategies read."""

    id: int
    platform: str
    """cpu | gpu | tpu."""
    device_kind: str = ""
    process_index: int = 0
    slice_index: int = 0


def devices(platform: str, count: int, devices_per_host: int = 0) -> list[Any]:
    """Abstract devices, ``devices_per_host`` of them per process; 0: one process has all."""
    return [Device(i, platform, platform, i // (devices_per_host or count)) for i in range(count)]


@functools.lru_cache(maxsize=256)
def mesh(sizes: MeshConfig, platform: str) -> Mesh:
    """A mesh of abstract devices, of a resolved config's shape."""
    shape = tuple(getattr(sizes, axis) for axis in AXES)
    grid = np.array(devices(platform, int(np.prod(shape))), dtype=object).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


class BatchShape(NamedTuple):
    """Sizes of a batch's fields, per packed sequence or example."""

    length: int
    """Tokens; 0: images alone."""
    images: int = 0
    patches: int = 0
    """Patches of its images, for models with packed images."""


def batch(
    model: ModelConfig | DualConfig,
    rows: int,
    length: int,
    images: int,
    patches: int = 0,
    sharding: jax.sharding.Sharding | None = None,
) -> Batch:
    """Abstract batch.

    Args:
        model: dims.
        rows: packed sequences in the batch.
        length: tokens of a packed sequence.
        images: images of a packed sequence.
        patches: patches of a packed sequence, for models with packed images.
        sharding: sharding of each field.
    """

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding)

    sections = 0 if isinstance(model, DualConfig) else len(model.decoder.rope_sections)
    shapes = Batch(
        tokens=of(np.int32, length),
        loss_weight=of(np.float32, length),
        positions=of(np.int32, max(1, sections), length),
        segment=of(np.int32, length),
    )
    if not images:
        return shapes
    shapes = shapes._replace(image_start=of(np.int32, images))
    if isinstance(model, ModelConfig) and model.decoder.visual_mask != "causal":
        shapes = shapes._replace(bidirectional=of(np.int32, length))
    if isinstance(model, ModelConfig) and model.connector.newline:
        shapes = shapes._replace(image_source=of(np.int32, length, 1))
    vision = model.vision
    if vision.packed:
        width = 3 * vision.frames * vision.patch_size**2
        packed = of(np.uint8, patches, width)
        return shapes._replace(patches=packed, grid=of(np.int32, images, 3))
    side = vision.image_size
    return shapes._replace(pixels=of(np.uint8, images, side, side, 3))


def pairs(
    model: ModelConfig | DualConfig,
    query: BatchShape,
    document: BatchShape,
    documents: int,
    examples: int,
    sharding: jax.sharding.Sharding | None = None,
) -> Pairs:
    """Abstract batch of pairs.

    Args:
        model: dims.
        query: shape of an example's query.
        document: shape of each of its documents.
        documents: documents per example.
        examples: examples in the batch.
        sharding: sharding of each field.
    """

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((examples, *shape), dtype, sharding=sharding)

    queries, one = (batch(model, examples, *rows, sharding) for rows in (query, document))
    several = jax.tree.map(lambda x: of(x.dtype, documents, *x.shape[1:]), one)
    number, numbers = of(np.int32), of(np.int32, documents)
    valid = of(np.bool_, documents)
    return Pairs(queries, several, valid, number, numbers, example_id=number)
