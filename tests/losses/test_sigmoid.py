"""The sigmoid loss against the whole matrix in torch."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from builders import worst_gradient
from pair_cases import embeddings_of, exact, gradients, pairs_of, relation, tangled

from jaxvlm.config import ConfigError
from jaxvlm.losses.sigmoid import Sigmoid
from jaxvlm.types import Loss

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
TOLERANCE = 1e-5


def whole_matrix(embeddings, signs):
    """-log sigmoid(z logits), summed over pairs with a sign; over queries with a positive."""
    names = ("query", "document", "scale", "bias")
    inputs = {n: exact(torch, getattr(embeddings, n)) for n in names}
    q, d = (torch.nn.functional.normalize(inputs[n], dim=-1) for n in names[:2])
    logits = inputs["scale"].exp() * torch.einsum("ie,jke->ijk", q, d) + inputs["bias"]
    each = -torch.nn.functional.logsigmoid(torch.tensor(signs) * logits)
    value = each[torch.tensor(signs) != 0].sum() / int((signs > 0).any((1, 2)).sum())
    value.backward()
    return value.item(), {n: x.grad.numpy() for n, x in inputs.items()}


def signs_of(pairs):
    """1 for positives, -1 for negatives, 0 for what is left out: f32[b, b, K]."""
    numbers, keys = relation(pairs)
    b, k = pairs.valid.shape
    signs = np.zeros((b, b, k), np.float32)
    for i, j, n in np.ndindex(b, b, k):
        if pairs.valid[i, 0] and pairs.valid[j, 0] and pairs.valid[j, n]:
            known = int(pairs.document_key[j, n]) in keys[i]
            signs[i, j, n] = 1 if n == 0 and j in numbers[i] else 0 if known else -1
    return signs


@pytest.mark.parametrize("tile_size", [0, 5, pytest.param(1, marks=pytest.mark.long)])
def test_equals_the_whole_matrix(tile_size):
    embeddings, pairs = embeddings_of(learned=True), tangled()
    value, grads, sums = gradients(Sigmoid(tile_size=tile_size), embeddings, pairs)
    wanted, expected = whole_matrix(embeddings, signs_of(pairs))
    np.testing.assert_allclose(value, wanted, rtol=TOLERANCE)
    worst_gradient(grads, expected, TOLERANCE)
    assert not np.any(grads["document"][~pairs.valid]) and not np.any(grads["query"][4])
    np.testing.assert_allclose(sums.metrics["bias"][0], -2.5)


def test_pairs_alone_are_the_papers():
    embeddings = embeddings_of(k=1, learned=True)
    signs = 2 * np.eye(13, dtype=np.float32)[..., None] - 1
    value, grads, sums = gradients(Sigmoid(), embeddings, pairs_of(k=1))
    wanted, expected = whole_matrix(embeddings, signs)
    np.testing.assert_allclose(value, wanted, rtol=TOLERANCE)
    worst_gradient(grads, expected, TOLERANCE)
    cosines = [
        q @ d[0] / np.linalg.norm(q) / np.linalg.norm(d)
        for q, d in zip(*embeddings[:2], strict=True)
    ]
    own, count = sums.metrics["positive_similarity"]
    np.testing.assert_allclose(own / count, np.mean(cosines), rtol=1e-5)


def test_what_it_needs():
    with pytest.raises(ConfigError, match="this model has no scale; add one, or use InfoNCE"):
        Sigmoid()(embeddings_of(), pairs_of())
    with pytest.raises(ConfigError, match="this model has no bias"):
        Sigmoid()(embeddings_of(learned=True)._replace(bias=None), pairs_of())
    with pytest.raises(ConfigError, match="similarity='l2'; known"):
        Sigmoid(similarity="l2")
    with pytest.raises(ConfigError, match="tile_size=-2"):
        Sigmoid(tile_size=-2)
    assert not Sigmoid().additive and isinstance(Sigmoid(), Loss)
    assert jax.tree.leaves(Sigmoid().coefficients()) == [1.0]
