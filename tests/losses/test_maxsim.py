"""MaxSim in InfoNCE and in losses over own documents, against sentence-transformers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from builders import worst_gradient
from pair_cases import B, K, embeddings_of, exact, gradients, is_additive, pairs_of, tangled

from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.ranking import Distill, MarginMSE, Triplet
from jaxvlm.losses.sigmoid import Sigmoid
from jaxvlm.losses.softmax import DIRECTIONS

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
late = pytest.importorskip("sentence_transformers.multi_vector_encoder.losses")
TOLERANCE, TOKENS = 1e-5, (5, 7)
TEACHER = np.random.default_rng(3).uniform(-1, 1, (B, K)).astype(np.float32)


class Given(torch.nn.Module):
    """A model that is told what it makes."""

    def forward(self, features, **_):
        return {"token_embeddings": features["x"], "attention_mask": features["seen"]}


def theirs(loss, embeddings, labels=None):
    """sentence-transformers' loss of unit embeddings, and gradients of what was normalised."""
    inputs = {n: exact(torch, getattr(embeddings, n)) for n in ("query", "document")}
    query, document = (torch.nn.functional.normalize(x, dim=-1) for x in inputs.values())
    features = [{"x": query, "seen": torch.tensor(embeddings.query_mask)}]
    for k in range(K):
        seen = torch.tensor(embeddings.document_mask[:, k])
        features.append({"x": document[:, k], "seen": seen})
    value = loss(features, labels)
    value.backward()
    return value.item(), {n: x.grad.numpy() for n, x in inputs.items()}


def check(ours, wanted, embeddings, pairs):
    value, grads, sums = gradients(ours, embeddings, pairs)
    np.testing.assert_allclose(value, wanted[0], rtol=TOLERANCE)
    worst_gradient(grads, wanted[1], TOLERANCE)
    return grads, sums


@pytest.mark.parametrize(
    "tile_size", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 1))]
)
def test_maxsim_in_infonce(tile_size):
    embeddings = embeddings_of(tokens=TOKENS)
    loss = late.MultiVectorMultipleNegativesRankingLoss(Given(), scale=2.0)
    grads, _ = check(
        InfoNCE(0.5, tile_size=tile_size), theirs(loss, embeddings), embeddings, pairs_of()
    )
    for name, seen in (("query", embeddings.query_mask), ("document", embeddings.document_mask)):
        assert not np.any(grads[name][~seen]) and np.any(grads[name][seen])


def test_maxsim_of_a_teachers_distribution():
    embeddings = embeddings_of(tokens=TOKENS)
    loss = late.MultiVectorDistillKLDivLoss(Given(), temperature=0.7)
    wanted = theirs(loss, embeddings, torch.tensor(TEACHER))
    check(Distill("cosine", 0.7, 0.7), wanted, embeddings, pairs_of(teacher=TEACHER))


def test_maxsim_of_a_teachers_margins():
    embeddings = embeddings_of(tokens=TOKENS)
    wanted = theirs(late.MultiVectorMarginMSELoss(Given()), embeddings, torch.tensor(TEACHER))
    check(MarginMSE("cosine"), wanted, embeddings, pairs_of(teacher=TEACHER))


def test_both_ways_and_masks_are_those_of_all_scores_at_once():
    """Against InfoNCE's formula over the whole matrix of scores, in torch."""
    embeddings = embeddings_of(tokens=TOKENS)
    inputs = {n: exact(torch, getattr(embeddings, n)) for n in ("query", "document")}
    q, d = (torch.nn.functional.normalize(x, dim=-1) for x in inputs.values())
    products = torch.einsum("ite,jkse->ijkts", q, d)
    products = products.masked_fill(
        ~torch.tensor(embeddings.document_mask)[None, :, :, None], -torch.inf
    )
    best = products.amax(-1) * torch.tensor(embeddings.query_mask)[:, None, None]
    score = best.sum(-1)
    own = score[:, :, 0].diagonal()
    masked = (score > own[:, None, None] + 0.3).detach()
    masked[torch.arange(B), torch.arange(B), 0] = False
    back = score[:, :, 0].T.masked_fill(
        (own[:, None] + 0.3 < score[:, :, 0].T).detach(), -torch.inf
    )
    z = torch.logsumexp(score.masked_fill(masked, -torch.inf).flatten(1) / 0.5, 1)
    wanted = ((z + torch.logsumexp(back / 0.5, 1)) / 2 - own / 0.5).mean()
    wanted.backward()
    loss = InfoNCE(
        0.5,
        directions=DIRECTIONS[:2],
        softmax_scope="each",
        false_negative_filter="absolute",
        margin=0.3,
        tile_size=4,
    )
    expected = wanted.item(), {n: x.grad.numpy() for n, x in inputs.items()}
    check(loss, expected, embeddings, pairs_of())
    assert masked.any()


@pytest.mark.parametrize(
    "loss",
    [
        InfoNCE(tile_size=4),
        pytest.param(Sigmoid(tile_size=4), marks=pytest.mark.long),
        pytest.param(InfoNCE(negatives_from="own"), marks=pytest.mark.long),
    ],
)
def test_what_is_not_there_is_never_read(loss):
    pairs, embeddings = tangled(), embeddings_of(tokens=TOKENS, learned=True)
    spoiled = embeddings._replace(
        document=np.where(
            (embeddings.document_mask & pairs.valid[..., None])[..., None],
            embeddings.document,
            np.nan,
        ),
        query=np.where(embeddings.query_mask[..., None], embeddings.query, np.inf),
    )
    ours, expected = (gradients(loss, x, pairs)[:2] for x in (spoiled, embeddings))
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


@pytest.mark.parametrize("loss", [InfoNCE(negatives_from="own"), Triplet(0.1, "cosine")])
def test_sums_over_examples(loss):
    assert loss.additive
    is_additive(loss, embeddings_of(tokens=TOKENS), tangled()._replace(group=None))
