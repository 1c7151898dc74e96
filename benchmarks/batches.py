"""Made-up batches."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxvlm.config import ModelConfig
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.types import Batch


def pictures_and_text(model: ModelConfig, rows: int, length: int, pictures: int) -> Batch:
    """Rows of one segment: pictures in front, a loss on the second half."""
    rng = np.random.default_rng(0)
    side = model.vision.image_size
    tokens = (side // model.vision.patch_size) ** 2
    place = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    start = 1 + tokens * np.arange(pictures, dtype=np.int32)
    return Batch(
        tokens=rng.integers(0, model.decoder.vocab_size, (rows, length)).astype(np.int32),
        loss_weight=(place >= length // 2).astype(np.float32),
        positions=np.ascontiguousarray(place[:, None]),
        segment=np.ones((rows, length), np.int32),
        pixels=rng.integers(0, 256, (rows, pictures, side, side, 3), np.uint8),
        image_start=np.tile(start, (rows, 1)),
    )


def abstract_batch(
    model: ModelConfig,
    mesh: jax.sharding.Mesh,
    rows: int,
    length: int,
    pictures: int,
    patches: int = 0,
) -> Batch:
    """Shapes of a batch on ``mesh``; ``patches`` of a row, where pictures come packed."""

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=batch_sharding(mesh))

    batch = Batch(
        tokens=of(np.int32, length),
        loss_weight=of(np.float32, length),
        positions=of(np.int32, max(1, len(model.decoder.rope_sections)), length),
        segment=of(np.int32, length),
        image_start=of(np.int32, pictures),
    )
    vision = model.vision
    if vision.packed:
        width = 3 * vision.frames * vision.patch_size**2
        packed = of(np.uint8, patches, width)
        return batch._replace(patches=packed, grid=of(np.int32, pictures, 3))
    side = vision.image_size
    return batch._replace(pixels=of(np.uint8, pictures, side, side, 3))
