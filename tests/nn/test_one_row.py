"""What one row is multiplied by, and one token's embedding, on GPUs: the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.nn import param
from jaxvlm.nn.embed import lookup


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [48, 50, 7])
def test_one_row_times_a_matrix(size, dtype):
    """The error of a sum of n products is at most n roundings of float32; and the result's own."""
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.normal(size=s), dtype) for s in ((1, 1, size), (size, 24)))
    y = param._one_row(x, w)
    assert y.shape == (1, 1, 24) and y.dtype == x.dtype
    exact = [np.asarray(a, np.float64) for a in (x, w)]
    bound = size * 2.0**-24 * (np.abs(exact[0]) @ np.abs(exact[1]))
    own = 0 if dtype == "float32" else 2.0**-8 * np.abs(exact[0] @ exact[1])
    assert (np.abs(np.asarray(y, np.float64) - exact[0] @ exact[1]) <= bound + own).all()
    grads = jax.grad(lambda *a: param._one_row(*a).astype(jnp.float32).sum(), (0, 1))(x, w)
    np.testing.assert_array_equal(grads[1], np.repeat(x.reshape(-1, 1), 24, 1))
    want = exact[1].sum(1)
    np.testing.assert_allclose(np.asarray(grads[0], np.float64)[0, 0], want, 2.0**-7, 2.0**-7)


def test_a_gpu_multiplies_one_row_so_and_no_other():
    def kinds(rows):
        traced = jax.make_jaxpr(lambda x, w: param.contract(x, w))
        text = str(traced(jnp.zeros((rows, 1, 8)), jnp.zeros((8, 4))))
        return "cuda" in text, "dot_general" in text

    assert kinds(1) == (True, True) and kinds(2) == (False, True)


def test_one_token_is_looked_up_like_several():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(10, 6)), jnp.bfloat16)
    token = jnp.asarray([[7]])

    def found(table):
        return lookup(table, token, jnp.float32)

    np.testing.assert_array_equal(
        found(table), lookup(table, jnp.asarray([[7, 3]]), jnp.float32)[:, :1]
    )
    grads = jax.grad(lambda x: found(x).sum())(table)
    assert grads.dtype == table.dtype
    np.testing.assert_array_equal(grads, np.eye(10)[7][:, None] * np.ones(6))
