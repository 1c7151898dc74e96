"""A dual encoder gives one device's embeddings and gradients on every mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import MESHES, assert_gradients_close, devices_of
from jax.sharding import PartitionSpec as P
from numerics import close

from jaxvlm.config import DualConfig, TextConfig, VisionConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Batch

ROWS, LENGTH = 8, 12
CONFIG = DualConfig(
    vision=VisionConfig(
        image_size=16, patch_size=8, width=32, depth=2, num_heads=8, mlp_dim=64, pool="attention"
    ),
    text=TextConfig(
        vocab_size=64, width=48, depth=2, num_heads=8, mlp_dim=64, num_types=2, norm_after=True
    ),
    embed_dim=20,
    project_bias=True,
    has_bias=True,
)


def batch():
    rng = np.random.default_rng(0)
    real = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, (ROWS, 1))
    return Batch(
        tokens=rng.integers(0, 64, (ROWS, LENGTH)).astype(np.int32),
        loss_weight=np.zeros((ROWS, LENGTH), np.float32),
        positions=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, 1, LENGTH)).copy(),
        segment=real.astype(np.int32),
        pixels=rng.integers(0, 256, (ROWS, 1, 16, 16, 3)).astype(np.uint8),
    )


def run(name):
    mesh = make_mesh(MESHES[name], devices_of(MESHES[name]))
    model = build_model(CONFIG, mesh)

    def objective(params, batch):
        out = model.apply(params, batch)
        logits = jnp.exp(out.scale) * out.hidden[:, 0] @ out.hidden[:, 1].T + out.bias
        return -jnp.sum(jax.nn.log_sigmoid((2 * jnp.eye(ROWS) - 1) * logits)), out.hidden

    step = jax.jit(
        jax.value_and_grad(objective, has_aux=True), out_shardings=(None, model.shardings)
    )
    params = model.init(0)
    (loss, hidden), grads = step(params, to_global(mesh, batch(), ROWS))
    return model, params, float(loss), np.asarray(hidden), jax.device_get(grads)


@pytest.fixture(scope="module")
def reference():
    return run("one")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) for n in ("fsdp8", "data2_fsdp2_tensor2")]
)
def test_embeddings_and_gradients_equal_one_device(name, reference):
    model, _, loss, hidden, grads = run(name)
    _, _, expected, embeddings, gradients = reference
    close(loss, expected, 1e-5)
    np.testing.assert_allclose(hidden, embeddings, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(hidden, axis=-1), 1, atol=1e-6)
    assert_gradients_close(grads, gradients)
    if name != "fsdp8":
        specs = {path: s.spec for path, s in model.shardings.items()}
        assert specs["text/table"] == P("tensor", "fsdp")
        assert specs["text/position"] == specs["text/types"] == P(None, "fsdp")
        assert specs["text/stack/blocks/attn/wq"] == P(None, "fsdp", "tensor", None)
        assert specs["text/stack/blocks/mlp/w_in"] == P(None, "fsdp", "tensor")
        assert specs["vision/head/attn/wq"] == P("fsdp", "tensor", None)
        assert specs["head/text"] == specs["head/vision"] == P("fsdp", None)
        assert specs["head/scale"] == specs["head/bias"] == P()


def test_rows_hold_what_they_hold(reference):
    """Sequences of an image, of a text, of both; other sequences are refused."""
    model, params, _, hidden, _ = reference
    full = batch()
    apply = jax.jit(model.apply)
    parts = (full._replace(pixels=None), 1), (full._replace(tokens=full.tokens[:, :0]), 0)
    for part, where in parts:
        out = apply(params, part)
        assert out.hidden.shape == (ROWS, 1, 20)
        np.testing.assert_allclose(out.hidden[:, 0], hidden[:, where], atol=1e-5)
    two = full._replace(pixels=np.concatenate([full.pixels] * 2, axis=1))
    with pytest.raises(ValueError, match="one image per sequence"):
        apply(params, two)
    with pytest.raises(ValueError, match="nothing that this model encodes"):
        apply(params, full._replace(pixels=None, tokens=full.tokens[:, :0]))


def test_bfloat16_embeddings_are_near(reference):
    model, params, _, hidden, _ = reference
    half = build_model(dataclasses.replace(CONFIG, dtype="bfloat16"), model.mesh)
    out = jax.jit(half.apply)(params, batch())
    assert out.hidden.dtype == jnp.float32
    cosine = np.sum(np.asarray(out.hidden) * hidden, axis=-1)
    assert cosine.min() > 0.999 and np.abs(np.asarray(out.hidden) - hidden).max() > 1e-5
