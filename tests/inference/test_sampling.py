"""Top-k and top-p keep the tokens that the logits warpers of transformers keep."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.inference.generate import filter_logits


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
