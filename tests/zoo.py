"""Five kinds of tiny models, each with a batch and a loss, to test strategies on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from builders import LENGTH, PATCHES, TINY, VOCAB, random_batch

from jaxvlm.config import (
    ConnectorConfig,
    DecoderConfig,
    DualConfig,
    ModelConfig,
    TextConfig,
    VisionConfig,
)
from jaxvlm.losses.next_token import NextToken
from jaxvlm.types import Batch, Out, Sums

ROWS = 16
LLAVA = dataclasses.replace(
    TINY,
    vision=VisionConfig(
        image_size=16, patch_size=8, width=32, depth=3, num_heads=8, mlp_dim=64,
        class_token=True, pre_norm=True, feature_layer=-2,
    ),
    decoder=dataclasses.replace(TINY.decoder, tied_embeddings=False, depth=4),
)  # fmt: skip
QWEN3 = ModelConfig(
    vision=VisionConfig(
        image_size=16, patch_size=4, width=32, depth=3, num_heads=8, mlp_dim=64, packed=True,
        patch_layout="cthw", frames=2, merge_block=2, rope_theta=1e4, feature_layers=(-1, -3, -2),
    ),
    connector=ConnectorConfig(hidden=64, merge=2, norm="layer", deepstack_levels=2),
    decoder=DecoderConfig(
        vocab_size=VOCAB, width=32, depth=4, num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=64,
        qk_norm=True, rope_sections=(2, 1, 1), rope_interleaved=True,
    ),
)  # fmt: skip
MOE = dataclasses.replace(
    QWEN3, decoder=dataclasses.replace(QWEN3.decoder, num_experts=4, experts_per_token=2)
)
GEMMA3 = ModelConfig(
    vision=VisionConfig(image_size=32, patch_size=8, width=32, depth=2, num_heads=8, mlp_dim=64),
    connector=ConnectorConfig(
        kind="linear", merge=2, pool="mean", norm="rms_plus_one", norm_merged=True, bias=False
    ),
    decoder=DecoderConfig(
        vocab_size=VOCAB, width=32, depth=4, num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=64,
        norm="rms_plus_one", qk_norm=True, post_norms=True, window=5, window_pattern=(True, False),
        local_rope_theta=100.0, visual_mask="prefix", activation="gelu_tanh", embed_scale=32**0.5,
    ),
)  # fmt: skip
DUAL = DualConfig(
    vision=VisionConfig(
        image_size=16, patch_size=8, width=32, depth=2, num_heads=8, mlp_dim=64, pool="attention"
    ),
    text=TextConfig(vocab_size=VOCAB, width=48, depth=2, num_heads=8, mlp_dim=64),
    embed_dim=24,
    has_bias=True,
)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """SigLIP's loss over all pairs of a batch: no sum over examples."""

    additive: bool = False

    def coefficients(self):
        return {"loss": 1.0}

    def weights(self, batch):
        return {"loss": jnp.float32(batch.tokens.shape[0])}

    def __call__(self, out: Out, batch: Batch) -> Sums:
        logits = jnp.exp(out.scale) * out.hidden[:, 0] @ out.hidden[:, 1].T + out.bias
        same = 2 * jnp.eye(len(logits)) - 1
        return Sums({"loss": -jnp.sum(jax.nn.log_sigmoid(same * logits))}, {})


def on_stages(config: ModelConfig) -> ModelConfig:
    """``config`` adapted for pipeline parallelism."""
    if not isinstance(config, ModelConfig):
        return config
    return dataclasses.replace(
        config,
        vision=dataclasses.replace(config.vision, remat="dots"),
        decoder=dataclasses.replace(config.decoder, remat="dots"),
    )


class Kind(NamedTuple):
    """A model to train."""

    config: Any
    loss: Any
    batch: Any
    """(seed, packed) -> Batch of ROWS sequences."""


def text_and_images(config: ModelConfig, seed: int, packed: bool) -> Batch:
    """Sequences of packed segments, or of one; a quarter of them has no image."""
    batch = random_batch(seed, ROWS)
    if not packed:
        used = batch.segment > 0
        place = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), used.shape)
        batch = batch._replace(
            segment=used.astype(np.int32), parent=None, positions=np.where(used, place, 0)[:, None]
        )
    rng = np.random.default_rng(seed)
    image = np.zeros(batch.tokens.shape, bool)
    image[:, 1 : 1 + PATCHES] = (batch.image_start >= 0).any(1)[:, None]
    if config.decoder.visual_mask == "prefix":
        batch = batch._replace(bidirectional=image.astype(np.int32))
    if not config.vision.packed:
        side = config.vision.image_size
        return batch._replace(pixels=rng.integers(0, 256, (ROWS, 2, side, side, 3), np.uint8))
    # A 4 x 4 grid makes 4 tokens; their places are (time, row, column) of the merged grid.
    grid = np.where(batch.image_start[..., None] >= 0, [1, 4, 4], 0).astype(np.int32)
    positions = np.repeat(batch.positions, 3, axis=1)
    offset = np.asarray([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]], np.int32)
    there = image[:, None, 1 : 1 + PATCHES]
    positions[..., 1 : 1 + PATCHES] = np.where(there, 1 + offset, positions[..., 1 : 1 + PATCHES])
    patches = rng.integers(0, 256, (ROWS, 32, 96), np.uint8)
    return batch._replace(pixels=None, patches=patches, grid=grid, positions=positions)


def pairs(seed: int, packed: bool) -> Batch:
    """One image and one text per sequence."""
    rng = np.random.default_rng(seed)
    real = np.arange(12) < rng.integers(3, 13, (ROWS, 1))
    return Batch(
        tokens=rng.integers(0, VOCAB, real.shape).astype(np.int32),
        loss_weight=np.zeros(real.shape, np.float32),
        positions=np.broadcast_to(np.arange(12, dtype=np.int32), (ROWS, 1, 12)).copy(),
        segment=real.astype(np.int32),
        pixels=rng.integers(0, 256, (ROWS, 1, 16, 16, 3)).astype(np.uint8),
    )


KINDS = {
    name: Kind(config, NextToken(chunk=8), functools.partial(text_and_images, config))
    for name, config in (("llava", LLAVA), ("qwen3", QWEN3), ("moe", MOE), ("gemma3", GEMMA3))
} | {"dual": Kind(DUAL, Pairs(), pairs)}
