"""Triplets, gold similarities and teachers: sentence-transformers' values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
from builders import worst_gradient
from pair_cases import B, K, embeddings_of, gradients, in_torch, is_additive, pairs_of

from jaxvlm.config import ConfigError
from jaxvlm.losses.ranking import CoSENT, CosineRegression, Distill, MarginMSE, Triplet
from jaxvlm.types import Loss

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
st_losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
TOLERANCE = 1e-5
TEACHER = np.random.default_rng(3).uniform(-1, 1, (B, K)).astype(np.float32).round(1)  # ties too


def holes(**fields):
    """Examples of fewer documents than others, and one of none."""
    there = np.ones((B, K), bool)
    there[2, 2] = there[5, 1:] = there[7] = False
    return pairs_of(valid=there, **fields)


def spoiled(embeddings, pairs):
    """With nonsense where nothing is."""
    return embeddings._replace(
        document=np.where(pairs.valid[..., None], embeddings.document, np.inf)
    )


def check(loss, pairs, theirs, k=K, tolerance=TOLERANCE):
    embeddings = embeddings_of(k=k)
    wanted, expected = in_torch(torch, theirs, embeddings)
    value, grads, sums = gradients(loss, spoiled(embeddings, pairs), pairs)
    np.testing.assert_allclose(value, wanted, rtol=tolerance)
    worst_gradient(grads, expected, tolerance)
    assert isinstance(loss, Loss) and all(np.any(g) for g in grads.values())
    return sums


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_triplets(distance):
    metric = getattr(st_losses.TripletDistanceMetric, distance.upper())
    loss = st_losses.TripletLoss(None, metric, 0.4)
    pairs = holes()
    rows, places = np.nonzero(pairs.valid[:, 1:] & pairs.valid[:, :1])

    def theirs(query, documents):
        negative = torch.stack(documents, 1)[rows, places + 1]
        return loss.compute_loss_from_embeddings([query[rows], documents[0][rows], negative], None)

    sums = check(Triplet(0.4, distance), pairs, theirs)
    assert 0 < sums.metrics["accuracy"][0] < sums.metrics["accuracy"][1] == len(rows)


def test_cosines_are_pulled_to_gold():
    loss, pairs = st_losses.CosineSimilarityLoss(None), holes(teacher=TEACHER)
    rows, places = np.nonzero(pairs.valid)
    gold = torch.tensor(TEACHER[rows, places])

    def theirs(query, documents):
        document = torch.stack(documents, 1)[rows, places]
        return loss.compute_loss_from_embeddings([query[rows], document], gold)

    check(CosineRegression(), pairs, theirs)


@pytest.mark.parametrize("k", [K, 1])
def test_cosent(k):
    loss = st_losses.CoSENTLoss(None, scale=5.0)
    pairs = holes(teacher=TEACHER)
    pairs = pairs._replace(valid=pairs.valid[:, :k], teacher=TEACHER[:, :k])
    rows, places = np.nonzero(pairs.valid)
    gold = torch.tensor(TEACHER[rows, places])

    def theirs(query, documents):
        document = torch.stack(documents, 1)[rows, places]
        return loss.compute_loss_from_embeddings([query[rows], document], gold)

    check(CoSENT(5.0), pairs, theirs, k)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_margins_of_a_teacher(similarity):
    from sentence_transformers import util

    like = {"dot": util.pairwise_dot_score, "cosine": util.pairwise_cos_sim}[similarity]
    loss, pairs = st_losses.MarginMSELoss(None, like), holes(teacher=TEACHER)
    rows, places = np.nonzero(pairs.valid[:, 1:] & pairs.valid[:, :1])
    margin = torch.tensor(TEACHER[rows, 0] - TEACHER[rows, places + 1])

    def theirs(query, documents):
        negative = torch.stack(documents, 1)[rows, places + 1]
        return loss.compute_loss_from_embeddings(
            [query[rows], documents[0][rows], negative], margin
        )

    check(MarginMSE(similarity), pairs, theirs)


@pytest.mark.parametrize(
    ("similarity", "temperature", "teachers"), [("dot", 1.0, 1.0), ("cosine", 0.3, 0.5)]
)
def test_a_teachers_distribution(similarity, temperature, teachers):
    from sentence_transformers import util

    like = {"dot": util.pairwise_dot_score, "cosine": util.pairwise_cos_sim}[similarity]
    loss = st_losses.DistillKLDivLoss(
        None, like, student_temperature=temperature, teacher_temperature=teachers
    )

    def theirs(query, documents):
        return loss.compute_loss_from_embeddings([query, *documents], torch.tensor(TEACHER))

    check(Distill(similarity, temperature, teachers), pairs_of(teacher=TEACHER), theirs)


def test_a_teachers_distribution_over_fewer_documents():
    pairs = holes(teacher=TEACHER)

    def theirs(query, documents):
        total = 0.0
        for i in np.flatnonzero(pairs.valid[:, 0]):
            n = int(pairs.valid[i].sum())
            mine = torch.log_softmax(torch.stack([d[i] @ query[i] for d in documents[:n]]), 0)
            gold = torch.softmax(torch.tensor(TEACHER[i, :n]), 0)
            total += torch.nn.functional.kl_div(mine, gold, reduction="sum")
        return total / int(pairs.valid[:, 0].sum())

    sums = check(Distill(), pairs, theirs)
    assert sums.metrics["agreement"][1] == B - 1


@pytest.mark.parametrize("loss", [Triplet(0.4), CosineRegression(), MarginMSE(), Distill()])
def test_sums_over_examples(loss):
    assert loss.additive
    is_additive(loss, embeddings_of(), holes(teacher=TEACHER))


def test_a_rank_among_all_is_no_sum():
    assert not CoSENT().additive


def test_equal_embeddings_have_a_finite_gradient():
    same = embeddings_of()._replace(query=np.ones((B, 8), "f4"), document=np.ones((B, K, 8), "f4"))
    grads = gradients(Triplet(), same, pairs_of())[1]
    assert all(np.all(np.isfinite(g)) for g in grads.values())


@pytest.mark.parametrize("loss", [CosineRegression(), CoSENT(), MarginMSE(), Distill()])
def test_a_teacher_is_asked_for(loss):
    with pytest.raises(ConfigError, match=r"\(Pairs.teacher\); add them to the data"):
        loss(embeddings_of(), pairs_of())
    with pytest.raises(ConfigError, match="must have one score for each"):
        loss(embeddings_of(), pairs_of(teacher=TEACHER[:, :2]))


@pytest.mark.parametrize("loss", [Triplet(), MarginMSE(), Distill()])
def test_negatives_are_asked_for(loss):
    with pytest.raises(ConfigError, match=r"these examples have none \(K=1\)"):
        loss(embeddings_of(k=1), pairs_of(k=1, teacher=TEACHER[:, :1]))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Triplet, {"distance": "manhattan"}, "distance='manhattan'; known: cosine, euclidean"),
        (Triplet, {"margin": -1.0}, "margin=-1.0 must be 0 or more"),
        (CoSENT, {"scale": 0.0}, "scale=0.0 must be above 0"),
        (MarginMSE, {"similarity": "l1"}, "similarity='l1'; known"),
        (Distill, {"temperature": 0.0}, "temperature=0.0 must be above 0"),
        (Distill, {"teacher_temperature": -2.0}, "teacher_temperature=-2.0 must be above 0"),
    ],
)
def test_settings_that_make_no_sense(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


def test_no_distance_of_tokens():
    with pytest.raises(ConfigError, match="set distance='cosine'"):
        Triplet()(embeddings_of(tokens=(3, 4)), pairs_of())
