"""Ring attention and Ulysses give plain attention's values and gradients, whatever the mask."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.config import MeshConfig
from jaxvlm.nn.attention_backends import Scores, attend
from jaxvlm.nn.mask import Mask
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes

B, T, N, K, H = 2, 24, 4, 2, 8
ROW = np.arange(T, dtype=np.int32)[None]
SEGMENT = np.stack([np.repeat([1, 2, 3, 0], [7, 9, 5, 3]), np.repeat([1, 2], [20, 4])]).astype("i4")
PARENT = np.where(SEGMENT == 3, 1, 0).astype(np.int32)
GROUP = np.where((ROW >= 2) & (ROW < 6), 1, 0).repeat(2, 0).astype(np.int32)
CAUSAL = {"q_index": ROW, "k_index": ROW}
PACKED = CAUSAL | {"q_segment": SEGMENT, "k_segment": SEGMENT, "q_parent": PARENT}
GROUPED = PACKED | {"q_group": GROUP, "k_group": GROUP}
PLACE = {"q_position": ROW.repeat(2, 0), "k_position": ROW.repeat(2, 0)}
PLAIN = Scores()
MASKS = {
    "none": {},
    "causal": CAUSAL,
    "packed with parents": PACKED,
    "images both ways": GROUPED,
    "window": GROUPED | PLACE | {"window": np.int32(5), "far_groups": np.int32(1)},
}


def run(axes, mask, scores=PLAIN):
    rng = np.random.default_rng(0)
    q, k, v, out = (rng.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K, N))

    def objective(q, k, v, mask):
        found = attend(q, k, v, mask, axes, "xla", scores)
        return jnp.sum(found * out), found

    step = jax.jit(jax.value_and_grad(objective, (0, 1, 2), has_aux=True))
    (_, found), grads = step(q, k, v, mask)
    return found, *grads


def axes_of(how, **mesh):
    return Axes(make_mesh(MeshConfig(**mesh)), context=how)


ONE = Axes(make_mesh(MeshConfig(data=1), jax.devices()[:1]))


@pytest.mark.parametrize("kind", MASKS)
def test_a_ring_gives_what_one_device_gives(kind):
    mask, ring = Mask(**MASKS[kind]), axes_of("ring", data=2, context=4)
    for ours, expected in zip(run(ring, mask), run(ONE, mask), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_a_soft_cap_goes_round_too():
    mask, scores = Mask(**PACKED), Scores(scale=0.7, cap=2.0)
    ring = axes_of("ring", data=1, context=4, tensor=2)
    for ours, expected in zip(run(ring, mask, scores), run(ONE, mask, scores), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_few_key_heads_are_repeated_for_ulysses():
    mask, axes = Mask(**GROUPED), axes_of("ulysses", data=2, context=4)
    assert K % 4
    for ours, expected in zip(run(axes, mask), run(ONE, mask), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize("how", ["gather", "ring", "ulysses"])
def test_scores_on_a_device_shrink_with_the_axis(how):
    """Temporary bytes of attention alone, forward and backward, against one device."""
    length, heads = 512, 8
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, length, heads, 16)).astype(np.float32)

    def temporary(axes):
        def objective(q, k, v):
            return jnp.sum(jnp.sin(attend(q, k, v, Mask(), axes, "xla")))

        where = axes.activation(("batch", "seq", "heads", "head_dim"), q.shape)
        given = [jax.ShapeDtypeStruct(q.shape, q.dtype, sharding=where)] * 3
        program = jax.jit(jax.grad(objective, (0, 1, 2)), out_shardings=where).lower(*given)
        return program.compile().memory_analysis().temp_size_in_bytes

    whole = temporary(ONE)
    for parts in (2, 4):
        axes = dataclasses.replace(
            ONE, mesh=make_mesh(MeshConfig(1, context=parts), jax.devices()[:parts]), context=how
        )
        assert temporary(axes) <= 1.25 * whole / parts
