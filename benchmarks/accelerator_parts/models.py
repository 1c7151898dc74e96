"""Published models' dims, real and as toys, and rows of batches for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks.accelerator_parts.layout import Layout, laid_out
from jaxvlm.config import DualConfig, ModelConfig
from jaxvlm.hf import model_zoo
from jaxvlm.hf.families import any_family, config_reader
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import Batch, Pairs


class Rows(NamedTuple):
    """Rows of a batch, or examples."""

    rows: int
    length: int = 0
    chunks: int = 1
    """Conversations of a row."""
    images: int = 0
    """Images of a row, a multiple of ``chunks``."""
    side: int = 0
    """For images of any size: patches of a side, on average; a multiple of 8."""


REAL = {
    "qwen3-vl-2b": Rows(4, 4096, 4, 8, 32),  # 8192 patches a row
    "paligemma2-3b": Rows(8, 512, 1, 1),
    "llava-1.5-7b": Rows(4, 2048, 2, 2),
    "smolvlm-256m": Rows(4, 2048, 1, 24),  # 64 tokens a tile
    "clip-vit-b-32": Rows(1024, 77),
}
TINY = {
    "qwen3-vl-2b": Rows(4, 128, 2, 2, 8),
    "paligemma2-3b": Rows(2, 32, 1, 1),
    "llava-1.5-7b": Rows(2, 64, 2, 2),
    "smolvlm-256m": Rows(2, 32, 1, 2),
    "clip-vit-b-32": Rows(8, 16),
}
_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 256,
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
           "num_attention_heads": 2}  # fmt: skip
_TOYS: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": {
        "text_config": _TEXT, "image_token_id": 250, "video_token_id": 251,
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
    },
    "paligemma2-3b": {
        "text_config": {**_TEXT, "head_dim": 32}, "image_token_index": 255, "projection_dim": 64,
        "hidden_size": 64, "vision_config": {**_VISION, "image_size": 56, "projection_dim": 64},
    },
    "llava-1.5-7b": {
        "text_config": _TEXT, "image_token_index": 255, "pad_token_id": 0,
        "vision_config": {**_VISION, "num_hidden_layers": 3, "image_size": 56},
    },
    "smolvlm-256m": {
        "text_config": {**_TEXT, "pad_token_id": 0}, "image_token_id": 255,
        "vision_config": {**_VISION, "image_size": 128},
    },
    "clip-vit-b-32": {
        "text_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 16,
        },
        "projection_dim": 32, "vision_config": {**_VISION, "image_size": 64},
    },
}  # fmt: skip


def hf_config(name: str, tiny: bool) -> dict[str, Any]:
    """A published model's ``config.json``, or that of a toy of its kind."""
    given = model_zoo.published_config(name)
    if not tiny:
        return dict(given)
    toy = _TOYS[name]
    nested = {k: {**given[k], **v} for k, v in toy.items() if isinstance(v, dict)}
    return {**given, **toy, **nested}


def network(name: str, tiny: bool) -> ModelConfig | DualConfig:
    """The same as settings of ours."""
    given = hf_config(name, tiny)
    return config_reader.model_of(any_family(given, name), given)


def rows_of(name: str, tiny: bool) -> Rows:
    """The rows of a job's batch."""
    return (TINY if tiny else REAL)[name]


def grids(rows: Rows) -> np.ndarray:
    """i32[I, 3]: (t, h, w) of a row's images of any size, wide ones and tall ones by turns."""
    short, long = rows.side * 3 // 4, rows.side * 5 // 4
    each = [(1, short, rows.side), (1, long, rows.side)]
    return np.asarray([each[i % 2] for i in range(rows.images)], np.int32)


def batch(model: ModelConfig, rows: Rows, shared: bool = False) -> Batch:
    """Rows of conversations, each beginning with its images; a loss on the tokens after them.

    Args:
        model: dims.
        rows: sizes.
        shared: several questions, each a segment of its own, share a conversation's images.
    """
    rng = np.random.default_rng(0)
    B, T, vision = rows.rows, rows.length, model.vision
    laid = laid_out(Layout(B, T, rows.chunks, shared))
    if vision.packed:
        sizes = grids(rows).prod(1) // model.connector.merge**2
    else:
        sizes = np.full(rows.images, num_visual_tokens(model))
    per_chunk = rows.images // rows.chunks
    weight = (laid.segment > 0).astype(np.float32)
    starts = []
    for i, start in enumerate(laid.starts):
        own = sizes[i * per_chunk : (i + 1) * per_chunk]
        if 1 + own.sum() >= laid.room:
            raise ValueError(f"images of {own.sum()} tokens in segments of {laid.room}")
        starts += [start + 1 + own[:j].sum() for j in range(per_chunk)]
        weight[:, start : start + 1 + own.sum()] = 0
    sections = max(1, len(model.decoder.rope_sections))
    made = Batch(
        tokens=rng.integers(1, model.decoder.vocab_size, (B, T)).astype(np.int32),
        loss_weight=weight,
        positions=np.repeat(laid.positions, sections, axis=1),
        segment=laid.segment,
        parent=laid.parent,
        image_start=np.tile(np.asarray(starts, np.int32), (B, 1)),
    )
    if model.decoder.visual_mask != "causal":  # the prompt: here the images and what is before
        seen = np.where(weight > 0, 0, laid.segment)
        made = made._replace(bidirectional=seen.astype(np.int32))
    if vision.packed:
        count = rows.images * rows.side**2
        width = 3 * vision.frames * vision.patch_size**2
        patches = rng.integers(0, 256, (B, count, width), np.uint8)
        return made._replace(patches=patches, grid=np.tile(grids(rows), (B, 1, 1)))
    shape = (B, rows.images, vision.image_size, vision.image_size, 3)
    return made._replace(pixels=rng.integers(0, 256, shape, np.uint8))


def image_text_pairs(model: DualConfig, rows: Rows) -> Pairs:
    """Images, and a text for each."""
    rng, count, side = np.random.default_rng(0), rows.rows, model.vision.image_size
    none = np.zeros((count, 0), np.int32)
    images = Batch(
        none, none.astype(np.float32), none[:, None], none,
        pixels=rng.integers(0, 256, (count, 1, side, side, 3), np.uint8),
        image_start=np.zeros((count, 1), np.int32),
    )  # fmt: skip
    shape = (count, 1, rows.length)
    ones = np.ones(shape, np.int32)
    places = np.broadcast_to(np.arange(rows.length, dtype=np.int32), shape)[:, :, None]
    tokens = rng.integers(1, model.text.vocab_size, shape).astype(np.int32)
    texts = Batch(tokens, ones.astype(np.float32), np.ascontiguousarray(places), ones)
    key = np.arange(count, dtype=np.int32)
    return Pairs(images, texts, np.ones((count, 1), bool), key, key[:, None] + count,
                 example_id=key)  # fmt: skip
