"""A backward pass in two halves gives what it gives in one, each half doing its own part."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.parallel.halves import halves

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

    cut = halves(back, (params, x), dy)
    d_x, left = jax.jit(cut.first)((params, x), dy)
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
    cut = halves(lambda kept, now: tree.unflatten(kept)(now), leaves, dy)
    _, left = cut.first(leaves, dy)
    assert matmuls(cut.first, leaves, dy) == 2, "the gradients of two matmuls' inputs"
    assert matmuls(cut.second, leaves, left) == 2, "those of their weights"
    assert not any(a is b for a in left for b in leaves), "what is kept is not left once more"


def test_the_smaller_is_left():
    """A weight behind attention wants what attention gave, not its probabilities."""
    T = 32

    @jax.checkpoint
    def attend(w, x):
        return jax.nn.softmax(x @ x.T) @ x @ w

    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(n, D)), jnp.float32) for n in (T, D))
    cut = halves(lambda kept, now: jax.vjp(attend, *kept)[1](now), (w, x), x)
    _, left = cut.first((w, x), x)
    assert left and all(a.size <= T * D for a in left)


def test_results_that_need_nothing_of_the_first_half():
    _, _, x, dy = case(True)
    cut = halves(lambda kept, now: ({"twice": kept * 2, "was": kept}, now + 1), x, dy)
    soon, left = cut.first(x, dy)
    assert left == [] and np.array_equal(soon, dy + 1)
    assert np.array_equal(cut.second(x, left)["twice"], 2 * x)
