"""Losses of quantized embeddings: torch's straight-through gradient, and the codes' values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import worst_gradient
from pair_cases import B, K, embeddings_of, gradients, in_torch, pairs_of, tangled

from jaxvlm.config import ConfigError
from jaxvlm.inference.quantize import dequantized, ranges_of
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.matryoshka import Matryoshka
from jaxvlm.losses.quantized_embeddings import QuantizedEmbeddings, binary, int8
from jaxvlm.losses.ranking import CosineRegression, MarginMSE
from jaxvlm.types import Loss

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
TEACHER = np.random.default_rng(3).uniform(-1, 1, (B, K)).astype(np.float32)


def through(x, value):
    return x + (value - x).detach()


def in_int8(x, low, high):
    step = (high - low) / 255
    code = torch.clamp(torch.floor((x - low) / step), 0, 254)
    return through(torch.clamp(x, low, high), low + (code + 0.5) * step)


def in_binary(x):
    return through(x, torch.where(x > 0, 1.0, -1.0) / x.shape[-1] ** 0.5)


def margins(query, documents, there=None):
    """The loss, of dots."""
    scores = torch.stack([(query * x).sum(-1) for x in documents], dim=1)
    teacher = torch.tensor(TEACHER)
    off = (scores[:, :1] - scores[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
    return (off**2).mean()


def test_value_and_gradient_are_torchs():
    embeddings = embeddings_of()  # queries lie outside of the documents' ranges, some

    def wanted(query, documents):
        whole = torch.stack(documents, dim=1).detach().reshape(B * K, -1)
        low, high = whole.min(0).values, whole.max(0).values
        assert ((query < low) | (query > high)).any()
        eight = [in_int8(x, low, high) for x in (query, *documents)]
        one = [in_binary(x) for x in (query, *documents)]
        return sum(margins(q, d) for q, *d in ([query, *documents], eight, one))

    expected, grads = in_torch(torch, wanted, embeddings)
    loss = QuantizedEmbeddings(MarginMSE(similarity="dot"), ("float32", "int8", "binary"))
    value, found, sums = gradients(loss, embeddings, pairs_of(teacher=TEACHER))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    worst_gradient(found, grads, 1e-5)
    assert set(sums.terms) == {"loss_float32", "loss_int8", "loss_binary"}


def test_values_are_those_of_the_codes_that_are_written():
    x = np.random.default_rng(0).normal(size=(40, 21)).astype(np.float32)
    x[:, 4] = 0.25  # a dim without a range
    ranges = ranges_of([x[:30]])
    eight, one = jax.jit(lambda x: (int8(x, ranges), binary(x)))(x)
    np.testing.assert_allclose(eight, dequantized(x, "int8", ranges), atol=1e-6)
    np.testing.assert_allclose(one, dequantized(x, "binary"), atol=1e-7)
    np.testing.assert_array_equal(dequantized(x, "binary"), dequantized(x, "ubinary"))
    np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, rtol=1e-6)


def test_ranges_are_of_documents_that_are_there():
    pairs, embeddings = tangled()._replace(teacher=TEACHER), embeddings_of()
    spoiled = np.where(pairs.valid[..., None], embeddings.document, np.nan)
    loss = QuantizedEmbeddings(MarginMSE(), ("int8",))
    (value, grads, _), (wanted, expected, _) = (
        gradients(loss, embeddings._replace(document=x), pairs)
        for x in (spoiled, np.where(pairs.valid[..., None], embeddings.document, 99.0))
    )
    np.testing.assert_array_equal(value, wanted)
    worst_gradient(grads, expected, 1e-7)


def test_it_goes_into_matryoshka_and_says_whether_it_adds_up():
    one, eight = (QuantizedEmbeddings(CosineRegression(), (p,)) for p in ("binary", "int8"))
    assert isinstance(one, Loss) and one.additive and not eight.additive
    assert not QuantizedEmbeddings(InfoNCE(), ("binary",)).additive
    embeddings, pairs = embeddings_of(), pairs_of(teacher=TEACHER)
    whole = Matryoshka(QuantizedEmbeddings(MarginMSE(), ("binary",)), (8, 3))
    sums = jax.eval_shape(lambda: whole(jax.tree.map(jnp.asarray, embeddings), pairs))
    assert set(sums.terms) == {"loss_binary_8", "loss_binary_3"} == set(whole.coefficients())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precisions": ()}, "give one or more different ones"),
        ({"precisions": ("int8", "int8")}, "give one or more different ones"),
        ({"precisions": ("int4",)}, "'int4'; known: float32, int8, binary"),
        ({"precisions": ("int8",), "loss": "infonce"}, "wraps a loss, not 'infonce'"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ConfigError, match=message):
        QuantizedEmbeddings(**{"loss": InfoNCE(), **settings})


def test_embeddings_of_tokens_are_refused():
    with pytest.raises(ConfigError, match="not one for each token"):
        QuantizedEmbeddings(InfoNCE(), ("int8",))(embeddings_of(tokens=(2, 3)), pairs_of())
