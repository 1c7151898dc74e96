"""A mixture of experts against a loop over experts, on one device and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import MESHES, TINY, assert_gradients_close, devices_of
from flax import nnx

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.models.decoder import check
from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.grouped_matmul import grouped_matmul
from jaxvlm.nn.moe import MoE
from jaxvlm.nn.param import Init, logical_axes, merge, split
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes

B, T, D, F, E, TOP = 4, 8, 16, 8, 6, 3


def moe(mesh="one", normalize=True):
    """(module on ``mesh``, its parameters, their shardings)."""
    spec = BlockSpec(
        width=D,
        num_heads=1,
        num_kv_heads=1,
        head_dim=D,
        mlp_dim=F,
        norm="rms",
        norm_eps=1e-6,
        activation="silu",
        gated=True,
        attention="xla",
        num_experts=E,
        experts_per_token=TOP,
        normalize_experts=normalize,
    )
    axes = Axes(make_mesh(MESHES[mesh], devices_of(MESHES[mesh])))
    module = MoE(Init(nnx.Rngs(params=jax.random.key(0))), axes, spec)
    graph, params = split(module)
    words = logical_axes(module)
    return graph, params, {p: axes.parameter(p, words[p], x.shape) for p, x in params.items()}


def batch():
    x, weight = jax.random.normal(jax.random.key(1), (2, B, T, D))
    return x, weight, np.arange(T)[None] < np.asarray([[8], [5], [1], [0]])


def by_loop(params, x, normalize):
    """Every expert computes every token; those that it is not chosen for count zero."""
    probability = jax.nn.softmax(x @ params["router"], axis=-1)
    share, chosen = jax.lax.top_k(probability, TOP)
    if normalize:
        share = share / share.sum(-1, keepdims=True)
    y = jnp.zeros_like(x)
    for e in range(E):
        h = jax.nn.silu(x @ params["w_gate"][e]) * (x @ params["w_in"][e])
        y += (h @ params["w_out"][e]) * jnp.sum(jnp.where(chosen == e, share, 0), -1)[..., None]
    return y


def run(graph):
    def objective(params, x, weight, real):
        y, routed = merge(graph, params)(x, real)
        return jnp.sum(y * weight), (y, routed)

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


@pytest.mark.parametrize("normalize", [True, False])
def test_sorted_tokens_get_what_a_loop_over_experts_gives(normalize):
    graph, params, _ = moe(normalize=normalize)
    x, weight, real = batch()
    expected, grads = jax.value_and_grad(
        lambda p: jnp.sum(by_loop(p, x, normalize) * weight),
    )(params)
    (value, (y, _)), ours = run(graph)(params, x, weight, real)
    np.testing.assert_allclose(y, by_loop(params, x, normalize), atol=1e-5)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_gradients_close(ours, grads)


def test_a_mesh_gives_one_devices_result():
    x, weight, real = batch()
    graph, params, _ = moe()
    (_, (expected, expected_routed)), expected_grads = run(graph)(params, x, weight, real)
    graph, params, shardings = moe("data2_fsdp2_tensor2")
    params = jax.tree.map(jax.device_put, params, shardings)
    (_, (y, routed)), grads = run(graph)(params, x, weight, real)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), routed, expected_routed)
    assert_gradients_close(jax.device_get(grads), expected_grads)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_kernels_give_xlas_result_with_experts_on_devices(platform, monkeypatch):
    x, weight, real = batch()
    graph, params, _ = moe()
    (_, (expected, _)), expected_grads = run(graph)(params, x, weight, real)
    monkeypatch.setitem(MESHES, "expert2", MeshConfig(data=2, expert=2))
    monkeypatch.setattr(
        "jaxvlm.nn.moe.grouped_matmul",
        lambda rows, w, sizes, kernel, tail: grouped_matmul(rows, w, sizes, platform, tail, True),
    )
    graph, params, shardings = moe("expert2")
    params = jax.tree.map(jax.device_put, params, shardings)
    (_, (y, _)), grads = run(graph)(params, x, weight, real)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    assert_gradients_close(jax.device_get(grads), expected_grads)


def test_padding_is_not_counted_and_no_token_is_dropped():
    graph, params, _ = moe()
    x, weight, real = batch()
    # Experts 0 to 2 are everyone's choice: no capacity, so all are served.
    params["router"] = jnp.zeros((D, E)).at[0, :TOP].set(50.0)
    x = x.at[..., 0].set(1.0)
    (_, (y, routed)), _ = run(graph)(params, x, weight, real)
    np.testing.assert_array_equal(routed.load, [real.sum()] * TOP + [0] * (E - TOP))
    np.testing.assert_allclose(jnp.sum(routed.probability), real.sum(), rtol=1e-5)
    np.testing.assert_allclose(y, by_loop(params, x, True), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"experts_per_token": 5}, "experts_per_token=5: 1 to num_experts=4"),
        ({"experts_per_token": 2, "mlp_bias": True}, "mlp_bias=True has no meaning"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        check(dataclasses.replace(TINY.decoder, num_experts=4, **change))
