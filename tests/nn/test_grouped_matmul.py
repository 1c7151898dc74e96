"""Grouped matmuls against a loop over groups; which one a mesh's devices take."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import TINY
from flax import nnx

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.models.decoder import check
from jaxvlm.nn import grouped_matmul
from jaxvlm.nn.block_spec import BlockSpec
from jaxvlm.nn.kernels import grouped_tpu
from jaxvlm.nn.moe import MoE
from jaxvlm.nn.param import Init, merge, split
from jaxvlm.parallel.rules import Axes
from jaxvlm.planner.request import abstract_devices

GROUPS = {
    "uneven": (40, 24, 20, [7, 3, 20, 10]),
    "one has all": (40, 16, 16, [0, 40, 0]),
    "a tail, and none": (40, 16, 40, [5, 0, 12, 0]),
    "no rows": (33, 16, 16, [0, 0]),
    "beyond a tile": (300, 150, 130, [1, 129, 0, 128, 30]),
}


def made(name, dtype="float32"):
    """rows, matrices, what the result is multiplied by, sizes; float64."""
    M, K, N, sizes = GROUPS[name]
    rng = np.random.default_rng(0)
    drawn = [rng.normal(size=s) for s in ((M, K), (len(sizes), K, N), (M, N))]
    return *(np.asarray(jnp.asarray(x, dtype), np.float64) for x in drawn), np.asarray(sizes)


def by_loop(rows, w, weight, sizes):
    """The result, and the gradients of rows and matrices."""
    y, d_rows, d_w = np.zeros(weight.shape), np.zeros(rows.shape), np.zeros(w.shape)
    for g, end in enumerate(np.cumsum(sizes)):
        own = slice(end - sizes[g], end)
        y[own], d_rows[own] = rows[own] @ w[g], weight[own] @ w[g].T
        d_w[g] = rows[own].T @ weight[own]
    return y, d_rows, d_w


def by(kernel):
    return functools.partial(
        grouped_matmul.grouped_matmul, kernel=kernel, tail=True, interpret=True
    )


def run(matmul, dtype, rows, w, weight, sizes):
    given = [jnp.asarray(x, dtype) for x in (rows, w, weight)]
    y, back = jax.vjp(lambda x, w: matmul(x, w, jnp.asarray(sizes, jnp.int32)), *given[:2])
    return y, *back(given[2])


@pytest.mark.parametrize("kernel", ["gpu", "tpu", ""])
@pytest.mark.parametrize("name", GROUPS)
def test_result_and_gradients_are_a_loops(name, kernel):
    case = made(name)
    for ours, expected in zip(run(by(kernel), "float32", *case), by_loop(*case), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_bfloat16_is_rounded_once(kernel):
    """By half of the distance to the next number, 2⁻⁸ at most; 1e-3 is for the sums in float32."""
    case = made("beyond a tile", "bfloat16")
    found = zip(run(by(kernel), "bfloat16", *case), by_loop(*case), strict=True)
    for ours, expected in list(found)[2 * (kernel == "tpu") :]:
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(ours, np.float64), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("side", [8, 24])
def test_matrices_larger_than_a_tile_are_a_loops(side, monkeypatch):
    """The last tile of a side lies partly outside of the matrix."""
    monkeypatch.setattr(grouped_tpu, "_SIDE", side * 8)
    rows, _, weight, sizes = case = made("beyond a tile")
    expected = by_loop(*case)[2]
    given = (jnp.asarray(x, "float32") for x in (rows, weight))
    found = grouped_tpu.matrices(*given, jnp.asarray(sizes, jnp.int32), True)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_an_infinity_of_one_group_stays_in_its_matrix():
    rows, _, weight, sizes = made("beyond a tile")
    rows[0, 0] = np.inf
    given = (jnp.asarray(x, "float32") for x in (rows, weight))
    found = np.asarray(grouped_tpu.matrices(*given, jnp.asarray(sizes, jnp.int32), True))
    assert np.isinf(found[0, 0]).all() and np.isfinite(found[1:]).all()


@pytest.mark.parametrize(("rows", "groups"), [(16384, 8), (16384, 128), (300, 5), (1, 2)])
def test_no_more_rows_are_multiplied_than_twice(rows, groups):
    """Two tiles at most are not a group's own: half of an even group each, or the smallest."""
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(rows, np.full(groups, 1 / groups))
    depth = grouped_tpu._depth(rows, groups)
    visits = grouped_tpu._visits(rows, depth, jnp.asarray(sizes, jnp.int32))
    done = int(visits.num_active[0]) * depth
    assert done <= (rows + groups * depth if depth < rows // groups else 2 * groups * depth + rows)
    active = [np.asarray(x)[: int(visits.num_active[0])] for x in visits[:4]]
    seen = np.zeros(rows, int)
    for group, tile, start, end in zip(*active, strict=True):
        assert end - start == sizes[group]
        seen[max(start, tile * depth) : min(end, (tile + 1) * depth)] += 1
    assert (seen == 1).all() and set(active[0]) == set(range(groups))


def test_what_is_frozen_is_not_computed_and_keeps_nothing():
    rows, w, _, sizes = (jnp.asarray(x) for x in made("uneven"))
    rows, w, sizes = rows.astype("float32"), w.astype("float32"), sizes.astype("int32")

    def loss(rows, w):
        return jnp.sum(grouped_matmul.grouped_matmul(rows, w, sizes, "gpu", False))

    for argnum, taken, left_out in (
        (0, grouped_matmul.BACKWARD, grouped_matmul.OUTER),
        (1, grouped_matmul.OUTER, grouped_matmul.BACKWARD),
    ):
        text = str(jax.make_jaxpr(jax.grad(loss, argnum))(rows, w))
        assert f"name={taken}" in text and f"name={left_out}" not in text


ONE, SPLIT = MeshConfig(data=1), MeshConfig(data=1, fsdp=2, expert=2)


@pytest.mark.parametrize(
    ("platform", "choice", "mesh", "kernel"),
    [
        ("gpu", "auto", ONE, [True] * 3),
        ("gpu", "auto", SPLIT, [True] * 3),
        ("gpu", "xla", SPLIT, [False] * 3),
        ("tpu", "auto", SPLIT, [False, False, True]),
        ("tpu", "xla", ONE, [False] * 3),
        ("cpu", "auto", ONE, [False] * 3),
    ],
)
def test_each_platform_takes_its_kernels(platform, choice, mesh, kernel):
    spec = BlockSpec(
        width=16, num_heads=1, num_kv_heads=1, head_dim=16, mlp_dim=8, norm="rms", norm_eps=1e-6,
        activation="silu", gated=True, attention="xla", num_experts=4, experts_per_token=2,
        expert_matmul=choice,
    )  # fmt: skip
    axes = Axes(abstract_devices.mesh(mesh, platform))
    graph, params = split(MoE(Init(nnx.Rngs(params=jax.random.key(0))), axes, spec))

    def loss(params, x):
        return jnp.sum(merge(graph, params)(x, None)[0])

    text = str(jax.make_jaxpr(jax.grad(loss))(params, jnp.zeros((4, 8, 16))))
    names = (grouped_matmul.FORWARD, grouped_matmul.BACKWARD, grouped_matmul.OUTER)
    assert [f"name={name}" in text for name in names] == kernel
    assert ("ragged_dot_general" in text) is not kernel[0]


def test_a_name_that_is_none_is_refused():
    decoder = dataclasses.replace(TINY.decoder, num_experts=4, experts_per_token=2)
    check(dataclasses.replace(decoder, expert_matmul="xla"))
    with pytest.raises(ConfigError, match="expert_matmul='cutlass'; known: auto, xla"):
        check(dataclasses.replace(decoder, expert_matmul="cutlass"))
