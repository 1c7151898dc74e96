"""Models and pairs of images and texts, and a loss that tells each term of a gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from builders import VOCAB
from zoo import DUAL, QWEN3, ROWS, text_and_images

from jaxvlm.config import EmbeddingConfig, MeshConfig, StrategyConfig
from jaxvlm.types import Batch, Embeddings, Pairs, Sums

K = 2
MESHES = {
    "one": MeshConfig(1),
    "data2": MeshConfig(2),
    "data4": MeshConfig(4),
    "data8": MeshConfig(8),
    "fsdp8": MeshConfig(1, 8),
    "data2_fsdp2_tensor2": MeshConfig(2, 2, 2),
    "data2_context2_tensor2": MeshConfig(data=2, context=2, tensor=2),
}
FSDP = StrategyConfig()
ZERO2 = StrategyConfig(params=(), all_gathered=(), gradients=("data",), optimizer=("data",))
DDP = StrategyConfig(params=(), all_gathered=(), gradients=(), optimizer=())
EMBEDDINGS = EmbeddingConfig(dim=24, learn_scale=True, learn_bias=True, bias=-1.0)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Each query against all documents; its positive is its first.

    The bias moves all but positives, each by its place. So the terms of the bias's gradient,
    probability times place, have one sign and its rounding is that of a term. Were positives moved
    too, terms of up to 30 would cancel to 0.15, and rounding alone would be 1e-5 of that.
    """

    additive: bool = False

    def coefficients(self):
        return {"loss": 1.0}

    def weights(self, batch: Pairs):
        return {"loss": jnp.float32(batch.valid.shape[0])}

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        documents = out.document.reshape(-1, out.document.shape[-1])
        place = jnp.arange(len(documents))
        place = jnp.where(place % batch.valid.shape[1] == 0, 0, place)
        logits = jnp.exp(out.scale) * out.query @ documents.T + out.bias * place
        logits = jnp.where(batch.valid.reshape(-1), logits, -1e9)
        own = jnp.arange(len(logits)) * batch.valid.shape[1]
        return Sums({"loss": -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(len(own)), own])}, {})


def texts(rng, rows, length=12):
    real = np.arange(length) < rng.integers(3, length + 1, (rows, 1))
    return Batch(
        tokens=rng.integers(0, VOCAB, real.shape).astype(np.int32),
        loss_weight=np.zeros(real.shape, np.float32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), (rows, 1, length)).copy(),
        segment=real.astype(np.int32),
    )


def images(rng, rows):
    empty = texts(rng, rows, 4)
    empty = Batch(*(x if x is None else x[..., :0] for x in empty))
    pixels = rng.integers(0, 256, (rows, 1, 16, 16, 3)).astype(np.uint8)
    return empty._replace(pixels=pixels, image_start=np.zeros((rows, 1), np.int32))


def both(rng, rows):
    """Text, an image, or both, by turns; and a row of nothing."""
    which = np.arange(rows) % 4
    made = texts(rng, rows)
    start = np.where(which == 0, -1, 0).astype(np.int32)[:, None]
    segment = np.where((which == 1)[:, None], 0, made.segment).astype(np.int32)
    start[rows - 1], segment[rows - 1] = -1, 0
    pixels = images(rng, rows).pixels
    return made._replace(segment=segment, pixels=pixels, image_start=start)


def documents(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x.reshape(ROWS, K, *x.shape[1:]), batch)


def pairs_of(query, document) -> Pairs:
    there = np.ones((ROWS, K), bool)
    there[1, 1] = there[5, 1] = False
    key = np.arange(ROWS * K, dtype=np.int32).reshape(ROWS, K)
    return Pairs(query, documents(document), there, key[:, 0], key)


def dual_pairs() -> Pairs:
    rng = np.random.default_rng(0)
    return pairs_of(images(rng, ROWS), texts(rng, ROWS * K))


def mixed_pairs() -> Pairs:
    rng = np.random.default_rng(1)
    return pairs_of(texts(rng, ROWS, 8), both(rng, ROWS * K))


def vlm_pairs() -> Pairs:
    one, two = (text_and_images(QWEN3, seed, packed=False) for seed in (2, 3))
    document = jax.tree.map(lambda a, b: np.stack([a, b], axis=1), one, two)
    query = text_and_images(QWEN3, 4, packed=False)
    return pairs_of(query, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), document))


KINDS: dict[str, Any] = {
    "dual": (DUAL, dual_pairs, ()),
    "mixed": (DUAL, mixed_pairs, ()),
    "locked": (DUAL, dual_pairs, ("vision/*",)),
    "locked whole": (
        dataclasses.replace(DUAL, project=("text",), embed_dim=32),
        dual_pairs,
        ("vision/*",),
    ),
    "vlm": (QWEN3, vlm_pairs, ()),
    "vlm, tower frozen": (QWEN3, vlm_pairs, ("vision/*",)),
}
