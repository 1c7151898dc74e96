"""Split backward: both halves together give the whole backward pass, without repeated work."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxvlm.config import MeshConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.pipeline.split_backward import split_backward

L, B, D = 3, 5, 4


def layer(x, w, gain, remat):
    def block(x, w, gain):
        hidden = jax.nn.silu(x * gain @ w["up"] + w["bias"])
        inner = jax.lax.scan(
            lambda c, h: (c + jnp.tanh(h @ w["down"]), None), 0.0 * x, hidden[None]
        )
        return x + inner[0]

    return (jax.checkpoint(block) if remat else block)(x, w, gain)


def model(params, x, *, remat):
    """Layers in a scan, with one gain that all of them share."""
    return jax.lax.scan(lambda x, w: (layer(x, w, params["gain"], remat), None), x, params["w"])[0]


def case(remat):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {
        "w": {"up": draw(L, D, D), "down": draw(L, D, D), "bias": draw(L, D)},
        "gain": draw(D),
    }
    return functools.partial(model, remat=remat), params, draw(B, D), draw(B, D)


@pytest.mark.parametrize("remat", [False, True])
def test_two_halves_are_the_whole(remat):
    f, params, x, dy = case(remat)

    def back(kept, now):
        return jax.vjp(f, *kept)[1](now)

    cut = split_backward(back, (params, x), dy)
    d_x, early, left = jax.jit(cut.first)((params, x), dy)
    assert jax.tree.leaves(early) == []
    d_params = jax.jit(cut.second)((params, x), left)
    whole = jax.jit(back)((params, x), dy)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), (d_params, d_x), whole)


def matmuls(f, *args):
    """How many an f holds, those in a scan's body once."""
    return str(jax.make_jaxpr(f)(*args)).count("dot_general[")


def test_no_half_does_the_others_work():
    f, params, x, dy = case(False)
    _, back = jax.vjp(f, params, x)
    leaves, tree = jax.tree.flatten(back)
    cut = split_backward(lambda kept, now: tree.unflatten(kept)(now), leaves, dy)
    left = cut.first(leaves, dy)[2]
    assert matmuls(cut.first, leaves, dy) == 2, "the gradients of two matmuls' inputs"
    assert matmuls(cut.second, leaves, left) == 2, "those of their weights"
    kept = {np.asarray(a).tobytes() for a in leaves if a.size > 1}
    assert not any(np.asarray(a).tobytes() in kept for a in jax.tree.leaves(left)), "kept already"


def test_the_smaller_is_left():
    """A weight after attention needs attention's output, not its probabilities."""
    T = 32

    @jax.checkpoint
    def attend(w, x):
        return jax.nn.softmax(x @ x.T) @ x @ w

    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(n, D)), jnp.float32) for n in (T, D))
    cut = split_backward(lambda kept, now: jax.vjp(attend, *kept)[1](now), (w, x), x)
    left = jax.tree.leaves(cut.first((w, x), x)[2])
    assert left and all(a.size <= T * D for a in left)


def test_what_an_equation_gives_with_the_rest_is_not_left():
    """A ``shard_map``'s way back gives all gradients at once; weights' come with the first half."""
    mesh = make_mesh(MeshConfig(data=8))
    inside = jax.shard_map(
        lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )

    def f(params, x):
        return jax.lax.scan(lambda x, w: (inside(w["up"], x) @ w["down"], None), x, params["w"])[0]

    _, params, _, _ = case(False)
    x = jnp.ones((8, D))
    (d_params, d_x), cut = (
        jax.vjp(f, params, x)[1](x),
        split_backward(lambda kept, now: jax.vjp(f, *kept)[1](now), (params, x), x),
    )
    soon, early, left = cut.first((params, x), x)
    later = cut.second((params, x), left)
    assert [p for p, a in early["w"].items() if a is not None] == ["up"] and later["w"][
        "up"
    ] is None
    assert (L, D, D) not in [a.shape for a in jax.tree.leaves(left)]
    np.testing.assert_allclose(soon, d_x, rtol=1e-5)
    np.testing.assert_allclose(early["w"]["up"], d_params["w"]["up"], rtol=1e-5)
    np.testing.assert_allclose(later["w"]["down"], d_params["w"]["down"], rtol=1e-5)


def test_odd_results():
    x, y = jnp.arange(4.0), jnp.ones(4)

    def f(kept, now):
        last = jax.lax.scan(lambda c, x: (x * now, None), jnp.zeros(4), jnp.stack([kept, now]))[0]
        count = jax.lax.fori_loop(0, 3, lambda i, c: c + kept, now)
        later = {"twice": kept * 2, "was": kept, "now": now, "both": last, "one": 1.0}
        return later, (last, count, now)

    cut = split_backward(f, x, y)
    soon, early, left = jax.jit(cut.first)(x, y)
    later = jax.jit(cut.second)(x, left)
    found = {name: later[name] if a is None else a for name, a in early.items()}
    jax.tree.map(np.testing.assert_array_equal, (found, soon), f(x, y))
    assert early["both"] is not None and later["both"] is None


def test_effects_are_not_lost():
    def f(kept, now):
        jax.debug.print("{}", kept)
        return kept, now

    with pytest.raises(NotImplementedError, match="with effects cannot be split"):
        split_backward(f, 1.0, 2.0)
