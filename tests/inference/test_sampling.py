"""The token that is sampled, and those that top-k and top-p keep: transformers' warpers do too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.inference import generate
from jaxvlm.inference.generate import filter_logits
from jaxvlm.types import Out


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (12, 0.9), (1, 0.5)])
def test_top_k_and_top_p_are_transformers(top_k, top_p):
    torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    want = torch.from_numpy(logits)
    if top_k:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    got = np.asarray(filter_logits(jnp.asarray(logits), top_k, top_p))
    np.testing.assert_array_equal(got, want.numpy())
    assert (np.isfinite(got).sum(1) >= 1).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3, generate._FEW + 1])
def test_the_most_likely_token_follows_the_last_hidden_state(batch, dtype):
    """Few hidden states are multiplied twice."""
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(batch, 4, 32)), dtype)
    head = jnp.asarray(random.normal(size=(32, 50)), dtype)
    keys = jax.random.split(jax.random.key(0), batch)
    sampling = generate.Sampling()
    got = generate._sample(Out(hidden, head), sampling, keys, jnp.zeros((), jnp.int32))
    exact = np.asarray(hidden[:, -1], np.float64) @ np.asarray(head, np.float64)
    np.testing.assert_array_equal(got, exact.argmax(1))
