"""Made-up batches."""

from __future__ import annotations

import numpy as np

from jaxvlm.config import ModelConfig
from jaxvlm.planner.compiled.verify import abstract_batch
from jaxvlm.types import Batch

__all__ = ["abstract_batch", "images_and_text"]


def images_and_text(model: ModelConfig, rows: int, length: int, images: int) -> Batch:
    """Rows of one segment: images in front, a loss on the second half."""
    rng = np.random.default_rng(0)
    side = model.vision.image_size
    tokens = (side // model.vision.patch_size) ** 2
    place = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    start = 1 + tokens * np.arange(images, dtype=np.int32)
    return Batch(
        tokens=rng.integers(0, model.decoder.vocab_size, (rows, length)).astype(np.int32),
        loss_weight=(place >= length // 2).astype(np.float32),
        positions=np.ascontiguousarray(place[:, None]),
        segment=np.ones((rows, length), np.int32),
        pixels=rng.integers(0, 256, (rows, images, side, side, 3), np.uint8),
        image_start=np.tile(start, (rows, 1)),
    )
