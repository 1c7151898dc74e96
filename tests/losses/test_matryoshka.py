"""Matryoshka around other losses, against sentence-transformers' MatryoshkaLoss."""

from __future__ import annotations

import numpy as np
import pytest
from builders import worst_gradient
from pair_cases import B, K, embeddings_of, gradients, in_torch, is_additive, pairs_of, tangled

from jaxvlm.config import ConfigError
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.matryoshka import Matryoshka
from jaxvlm.losses.ranking import CoSENT, MarginMSE
from jaxvlm.types import Loss

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
st_losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
TEACHER = np.random.default_rng(3).uniform(-1, 1, (B, K)).astype(np.float32)
DIMS, WEIGHTS = (8, 5, 2), (1.0, 0.5, 2.0)


class Given(torch.nn.Module):
    """A model that is told what it makes."""

    def forward(self, features):
        return {"sentence_embedding": features["x"]}

    def get_embedding_dimension(self):
        return 8


def equal(ours, theirs, labels, pairs):
    embeddings, model = embeddings_of(), theirs.model
    theirs = st_losses.MatryoshkaLoss(model, theirs, list(DIMS), list(WEIGHTS))

    def run(query, documents):
        return theirs([{"x": x} for x in (query, *documents)], labels)

    wanted, expected = in_torch(torch, run, embeddings)
    value, grads, sums = gradients(Matryoshka(ours, DIMS, WEIGHTS), embeddings, pairs)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    worst_gradient(grads, expected, 1e-5)
    assert set(sums.terms) == {"loss_8", "loss_5", "loss_2"}
    return sums


@pytest.mark.long
def test_around_infonce():
    theirs = st_losses.MultipleNegativesRankingLoss(Given(), scale=2.0)
    sums = equal(InfoNCE(0.5), theirs, None, pairs_of())
    assert set(sums.metrics) >= {"accuracy_8", "accuracy_2"}
    whole = gradients(InfoNCE(0.5), embeddings_of(), pairs_of())[2]
    np.testing.assert_allclose(sums.terms["loss_8"], whole.terms["loss"], rtol=1e-6)


def test_around_margins_of_dots():
    """Prefixes have unit length, the whole embedding too, so that a dot is a cosine."""
    theirs = st_losses.MarginMSELoss(Given())
    margins = torch.tensor(TEACHER[:, :1] - TEACHER[:, 1:])
    equal(MarginMSE(), theirs, margins, pairs_of(teacher=TEACHER))


def test_it_is_additive_where_its_loss_is():
    loss = Matryoshka(MarginMSE(), (8, 4))
    assert loss.additive and isinstance(loss, Loss) and not Matryoshka(CoSENT(), (8,)).additive
    is_additive(loss, embeddings_of(), pairs_of(teacher=TEACHER))


def test_what_is_not_there_is_never_read():
    pairs, embeddings = tangled(), embeddings_of()
    spoiled = embeddings._replace(
        document=np.where(pairs.valid[..., None], embeddings.document, np.nan)
    )
    ours, wanted = (gradients(Matryoshka(InfoNCE(), (5,)), v, pairs) for v in (spoiled, embeddings))
    np.testing.assert_array_equal(ours[0], wanted[0])
    worst_gradient(ours[1], wanted[1], 1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dims": ()}, "give one or more different ones, each above 0"),
        ({"dims": (4, 0)}, "give one or more different ones, each above 0"),
        ({"dims": (4, 4)}, "give one or more different ones, each above 0"),
        ({"dims": (8, 4), "weights_of_dims": (1.0,)}, r"matryoshka_weights=\(1.0,\): 1 for 2 dims"),
        ({"dims": (8, 4), "weights_of_dims": (1.0, -5.0)}, "each must be 0 or more"),
        ({"dims": (8,), "loss": "infonce"}, "wraps a loss, not 'infonce'"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ConfigError, match=message):
        Matryoshka(**{"loss": InfoNCE(), **settings})


def test_a_dim_wider_than_the_embeddings():
    with pytest.raises(ConfigError, match="16 is more than the embeddings' width of 8"):
        Matryoshka(InfoNCE(), (16, 4))(embeddings_of(), pairs_of())
