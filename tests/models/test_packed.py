"""Packed patches: rows and columns, sequence indices of their tokens, the encoder on any mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import LENGTH, MESHES, TINY, VOCAB, assert_gradients_close, devices_of
from flax import nnx
from numerics import close_in_norm

from jaxvlm.config import ConfigError, ConnectorConfig, VisionConfig
from jaxvlm.models.connector import Connector
from jaxvlm.models.grid import places, token_index, windows
from jaxvlm.models.vit import ViT, per_value
from jaxvlm.models.vlm import check, num_visual_tokens
from jaxvlm.nn.param import Init, logical_axes, merge, split
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Batch

VISION = VisionConfig(
    image_size=16,
    patch_size=4,
    width=32,
    depth=2,
    num_heads=4,
    mlp_dim=48,
    gated=True,
    qk_norm_all=True,
    layer_scale=0.5,
    feature_layers=(-1, -2),
    norm="rms",
    packed=True,
    patch_layout="cthw",
    frames=2,
    merge_block=2,
    rope_theta=1e4,
    window=8,
    full_layers=(1,),
)
CONNECTOR = ConnectorConfig(hidden=64, merge=2, norm="rms", deepstack_levels=1)
GRIDS = [[(1, 4, 6), (2, 2, 4)], [(1, 2, 2), (0, 0, 0)], [(3, 4, 4), (1, 2, 4)], [(1, 6, 8)] * 1]


def inputs():
    grid = np.zeros((4, 2, 3), np.int32)
    for b, row in enumerate(GRIDS):
        grid[b, : len(row)] = row
    x = np.random.default_rng(0).normal(size=(4, 64, 3 * 2 * 4 * 4)).astype(np.float32)
    return x, grid


def on(name):
    """Loss, tokens and gradients on a mesh."""
    axes = Axes(make_mesh(MESHES[name], devices_of(MESHES[name])))
    init = Init(nnx.Rngs(params=jax.random.key(0)))
    modules = {
        "vision": ViT(init, axes, VISION, "auto"),
        "connector": Connector(init, axes, CONNECTOR, 64, 24),
    }
    graphs, params = {}, {}
    for tower, module in modules.items():
        graphs[tower], flat = split(module)
        words = logical_axes(module)
        params |= {
            f"{tower}/{n}": jax.device_put(p, axes.parameter(n, words[n], p.shape))
            for n, p in flat.items()
        }

    def objective(params, x, grid):
        tower, connector = (
            merge(graphs[t], {n[len(t) + 1 :]: p for n, p in params.items() if n.startswith(t)})
            for t in ("vision", "connector")
        )
        tokens = tower(x, grid)
        out = jnp.concatenate([connector(tokens, True)[None], connector.deep(tokens, True)])
        real = jnp.arange(out.shape[2]) < (jnp.sum(jnp.prod(grid, -1), -1) // 4)[:, None]
        out = jnp.where(real[None, :, :, None], out, 0)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params, *inputs())
    return np.asarray(out), jax.device_get(grads)


@pytest.mark.long
def test_tokens_and_gradients_are_those_of_one_device():
    out, grads = on("one")
    other_out, other_grads = on("data2_fsdp2_tensor2")
    close_in_norm(other_out, out, 1e-5)
    assert_gradients_close(other_grads, grads)


def test_every_patch_knows_its_place():
    grid = jnp.asarray([[(1, 2, 4), (2, 4, 2), (0, 0, 0)]])
    at = places(grid, 28, block=2)
    np.testing.assert_array_equal(at.row[0, :8], [0, 0, 1, 1, 0, 0, 1, 1])
    np.testing.assert_array_equal(at.column[0, :8], [0, 1, 0, 1, 2, 3, 2, 3])
    np.testing.assert_array_equal(at.row[0, 8:16], [0, 0, 1, 1, 2, 2, 3, 3])
    segments = [1] * 8 + [9] * 8 + [17] * 8 + [0] * 4
    np.testing.assert_array_equal(at.segment[0], segments)
    np.testing.assert_array_equal(at.image[0], [1] * 8 + [2] * 16 + [0] * 4)
    near = [1] * 4 + [2] * 4 + [9] * 4 + [10] * 4 + [17] * 4 + [18] * 4 + [0] * 4
    np.testing.assert_array_equal(windows(at, 2)[0], near)


def test_tokens_go_where_their_image_starts():
    grid = jnp.asarray([[(1, 2, 4), (2, 2, 2), (0, 0, 0)]])
    index = np.asarray(token_index(grid, jnp.asarray([[7, 2, -1]]), 6, 2))[0]
    np.testing.assert_array_equal(index[:4], [7, 8, 2, 3])
    assert len(set(index[4:])) == 2 and min(index[4:]) > 1e9  # padding has no place


def test_the_whole_model_takes_packed_images():
    vision = dataclasses.replace(VISION, feature_layers=())
    config = dataclasses.replace(
        TINY, vision=vision, connector=dataclasses.replace(CONNECTOR, deepstack_levels=0)
    )
    mesh = make_mesh(MESHES["one"], devices_of(MESHES["one"]))
    model = build_model(config, mesh)
    params = model.init(0)
    x, grid = inputs()
    tokens = np.random.default_rng(1).integers(5, VOCAB, (4, LENGTH)).astype(np.int32)
    start = np.asarray([[20, 3], [5, -1], [1, 20], [9, -1]], np.int32)
    batch = Batch(
        tokens,
        np.ones((4, LENGTH), np.float32),
        np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (4, 1, LENGTH)),
        np.ones((4, LENGTH), np.int32),
        patches=x,
        grid=grid,
        image_start=start,
    )

    @jax.jit
    def run(params, batch):
        module = model.module(params)
        visual = module.connector(module.encode(batch.patches, batch.grid), blocks=True)
        return module.pre(batch).x, module.decoder.embed(batch.tokens, jnp.float32), visual

    mixed, text, visual = jax.device_get(run(params, batch))
    expected = text.copy()
    for b, row in enumerate(grid):
        at = 0
        for first, n in zip(start[b], row.prod(-1) // 4, strict=True):
            expected[b, first : first + n] = visual[b, at : at + n]
            at += n
    np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("connector", "says"),
    [
        ({"merge": 1}, "vision.merge_block=2"),
        ({"deepstack_levels": 2}, "feature_layers"),
        ({"newline": True}, "images of one size"),
    ],
)
def test_connectors_that_do_not_fit_are_refused(connector, says):
    config = dataclasses.replace(
        TINY, vision=VISION, connector=dataclasses.replace(CONNECTOR, **connector)
    )
    with pytest.raises(ConfigError, match=says):
        check(config)


def test_values_are_normed_where_their_channel_lies():
    mean, p = (0.1, 0.2, 0.3), VISION.patch_size
    cthw = per_value(mean, VISION).reshape(3, 2, p, p)
    np.testing.assert_allclose(
        cthw, np.broadcast_to(np.float32(mean)[:, None, None, None], cthw.shape)
    )
    flat = dataclasses.replace(VISION, patch_layout="hwc", frames=1)
    np.testing.assert_allclose(per_value(mean, flat).reshape(p, p, 3)[1, 2], np.float32(mean))


def test_images_of_any_size_have_no_fixed_count():
    with pytest.raises(ConfigError, match="depends on its size"):
        num_visual_tokens(dataclasses.replace(TINY, vision=VISION, connector=CONNECTOR))
