"""A whole Qwen3-VL against torch: packed pictures, positions of three rows, DeepStack."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.build.model import build_model
from jaxvlm.config import MeshConfig, ModelConfig
from jaxvlm.models.families import llama, qwen_vision, text
from jaxvlm.models.families.names import NameMap
from jaxvlm.nn.kv import KVCache
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.types import Batch

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

from towers import shaken, worst_gradient  # noqa: E402  # after the oracle is known to be there

IMAGE, VOCAB, LENGTH = 90, 96, 24
GRIDS = [[(1, 4, 4), (1, 2, 6)], [(1, 4, 6)]]
STARTS = [[3, 12], [10]]


@functools.cache
def oracle():
    """(torch model, our model, our parameters, our names)."""
    config = transformers.Qwen3VLConfig(
        vision_config={
            "depth": 3,
            "hidden_size": 24,
            "intermediate_size": 30,
            "num_heads": 3,
            "patch_size": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    theirs = shaken(transformers.Qwen3VLForConditionalGeneration(config))
    decoder = text.decoder_from_hf(config.text_config.to_dict(), "text_config.")
    group = config.vision_config.to_dict()
    vision, connector = qwen_vision.towers_from_hf(group, "qwen3_vl", decoder.width, "")
    model = build_model(
        ModelConfig(vision=vision, connector=connector, decoder=decoder),
        make_mesh(MeshConfig(data=1), jax.devices()[:1]),
    )
    weights = NameMap(
        (
            *llama.entries(decoder, "model.language_model.", ""),
            *qwen_vision.entries("qwen3_vl", "model.visual.", vision, connector.levels),
        ),
        qwen_vision.dims(vision, decoder.width) | llama.dims(decoder),
        {"vision": vision.depth, "connector": connector.levels, "decoder": decoder.depth},
    )
    params = weights.load({n: p.detach().numpy() for n, p in theirs.named_parameters()})
    assert {n: x.shape for n, x in params.items()} == {n: x.shape for n, x in model.shapes.items()}
    return theirs, model, params, weights


def make_batch(patch_dim):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, IMAGE, (2, LENGTH)).astype(np.int32)
    grid, start = np.zeros((2, 2, 3), np.int32), np.full((2, 2), -1, np.int32)
    for b, (grids, starts) in enumerate(zip(GRIDS, STARTS, strict=True)):
        grid[b, : len(grids)], start[b, : len(starts)] = grids, starts
        for g, at in zip(grids, starts, strict=True):
            tokens[b, at : at + np.prod(g) // 4] = IMAGE
    return Batch(
        tokens,
        np.ones(tokens.shape, np.float32),
        np.sort(rng.integers(0, 40, (2, 3, LENGTH)).astype(np.int32), axis=-1),
        np.ones(tokens.shape, np.int32),
        patches=rng.integers(0, 256, (2, 40, patch_dim)).astype(np.uint8),
        grid=grid,
        image_start=start,
    )


def normed(batch, model):
    vision = model.config.vision
    (mean,), (std,) = set(vision.pixel_mean), set(vision.pixel_std)
    return (batch.patches.astype(np.float32) / 255 - mean) / std


def test_logits_and_gradients_are_torchs():
    theirs, model, params, weights = oracle()
    batch = make_batch(3 * 2 * 4 * 4)
    used = batch.grid.prod(-1).sum(-1)
    out = theirs(
        input_ids=torch.from_numpy(batch.tokens).long(),
        pixel_values=torch.from_numpy(
            # Channels have one mean and one deviation here.
            np.concatenate([x[:n] for x, n in zip(normed(batch, model), used, strict=True)])
        ),
        image_grid_thw=torch.tensor([g for row in GRIDS for g in row]),
        position_ids=torch.from_numpy(batch.positions.transpose(1, 0, 2).copy()).long(),
    ).logits
    weight = np.random.default_rng(1).normal(size=out.shape).astype(np.float32)
    (out * torch.from_numpy(weight)).sum().backward()

    @jax.jit
    def run(params, batch):
        def objective(params):
            result = model.apply(params, batch)
            logits = result.hidden @ result.head
            return jnp.sum(logits * weight), logits

        return jax.value_and_grad(objective, has_aux=True)(params)

    (_, logits), grads = run(params, batch)
    expected = out.detach().numpy()
    error = np.linalg.norm(np.asarray(logits) - expected) / np.linalg.norm(expected)
    assert error < 1e-4
    theirs_grads = {n: p.grad.numpy() for n, p in theirs.named_parameters()}
    worst = worst_gradient(grads, weights.load(theirs_grads))
    print(f"Qwen3-VL: logits {error:.1e}, worst gradient {worst:.1e}")


def test_a_cache_changes_nothing():
    _, model, params, _ = oracle()
    batch = make_batch(3 * 2 * 4 * 4)
    d = model.config.decoder
    empty = jnp.zeros((d.depth, 2, LENGTH, d.num_kv_heads, d.head_dim))

    @jax.jit
    def run(params, batch):
        module = model.module(params)
        stream = module.pre(batch)
        cached = stream._replace(kv=KVCache(empty, empty), length=jnp.int32(0))
        return module.blocks(stream).x, module.blocks(cached)

    x, cached = run(params, batch)
    np.testing.assert_allclose(cached.x, x, rtol=1e-5, atol=1e-5)
    assert cached.kv.k.shape == empty.shape
