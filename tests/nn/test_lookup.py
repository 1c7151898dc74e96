"""Gradients of an embedding table are summed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.nn.embed import lookup


@pytest.mark.parametrize("repeats", [1, 512, 4096])
def test_a_token_that_stands_there_often_loses_nothing_in_bfloat16(repeats):
    """Against a float64 sum of the same bfloat16 gradients."""
    rng = np.random.default_rng(0)
    parts = jnp.asarray(rng.normal(0.3, 1.0, (repeats, 16)), jnp.bfloat16)
    tokens = jnp.full(repeats, 5)
    made, back = jax.vjp(lambda x: lookup(x, tokens, jnp.bfloat16), jnp.ones((8, 16)))
    assert made.dtype == jnp.bfloat16
    expected = np.zeros((8, 16))
    expected[5] = np.asarray(parts, np.float64).sum(0)
    np.testing.assert_allclose(back(parts)[0], expected, rtol=1e-5, atol=1e-5 * repeats**0.5)


def test_in_float32_it_is_plain_indexing():
    rng = np.random.default_rng(1)
    table, parts = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 4), (2, 9, 4)))
    tokens = jnp.asarray(rng.integers(0, 8, (2, 9)))
    ours, back = jax.vjp(lambda x: lookup(x, tokens, jnp.float32), table)
    theirs, expected = jax.vjp(lambda x: x[tokens], table)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(back(parts)[0], expected(parts)[0])
