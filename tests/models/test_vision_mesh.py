"""A packed tower gives the same tokens and gradients on any mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from builders import MESHES, assert_gradients_close, devices_of
from flax import nnx

from jaxvlm.config import ConnectorConfig, VisionConfig
from jaxvlm.models.connector import Connector
from jaxvlm.models.grid import places, windows
from jaxvlm.models.vit import ViT
from jaxvlm.nn.param import Init, logical_axes, merge, split
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes

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
    block=2,
    rope_theta=1e4,
    window=8,
    full_layers=(1,),
)
CONNECTOR = ConnectorConfig(hidden=64, merge=2, norm="rms", levels=1)
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


def test_tokens_and_gradients_are_those_of_one_device():
    out, grads = on("one")
    other_out, other_grads = on("data2_fsdp2_tensor2")
    assert np.linalg.norm(other_out - out) < 1e-5 * np.linalg.norm(out)
    assert_gradients_close(other_grads, grads)


def test_every_patch_knows_its_place():
    grid = jnp.asarray([[(1, 2, 4), (2, 4, 2), (0, 0, 0)]])
    at = places(grid, 28, block=2)
    np.testing.assert_array_equal(at.row[0, :8], [0, 0, 1, 1, 0, 0, 1, 1])
    np.testing.assert_array_equal(at.column[0, :8], [0, 1, 0, 1, 2, 3, 2, 3])
    np.testing.assert_array_equal(at.row[0, 8:16], [0, 0, 1, 1, 2, 2, 3, 3])
    segments = [1] * 8 + [9] * 8 + [17] * 8 + [0] * 4
    np.testing.assert_array_equal(at.segment[0], segments)
    np.testing.assert_array_equal(at.picture[0], [1] * 8 + [2] * 16 + [0] * 4)
    near = [1] * 4 + [2] * 4 + [9] * 4 + [10] * 4 + [17] * 4 + [18] * 4 + [0] * 4
    np.testing.assert_array_equal(windows(at, 2)[0], near)
