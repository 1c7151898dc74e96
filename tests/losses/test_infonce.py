"""InfoNCE against sentence-transformers, CLIP in torch, and a brute force over who is whose."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from builders import worst_gradient
from numerics import close
from pair_cases import (
    B,
    K,
    embeddings_of,
    exact,
    gradients,
    in_torch,
    is_additive,
    pairs_of,
    relation,
    tangled,
)
from token_cases import in_float64

from jaxvlm.config import ConfigError
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.softmax import DIRECTIONS
from jaxvlm.types import Loss

QD, DQ, QQ, DD = DIRECTIONS
TOLERANCE = 1e-5
GTE = {
    QD: "query_to_doc",
    DQ: "doc_to_query",
    QQ: "query_to_query",
    DD: "doc_to_doc",
}
torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
st_losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")


def equal(ours, expected):
    (value, grads, _), (wanted, wanted_grads) = ours, expected
    np.testing.assert_allclose(value, wanted, rtol=TOLERANCE)
    worst_gradient(grads, wanted_grads, TOLERANCE)


@pytest.mark.parametrize(
    ("directions", "partition", "similarity", "k"),
    [
        ((QD,), "joint", "dot", 1),
        pytest.param((QD,), "joint", "cosine", K, marks=pytest.mark.long),
        ((QD, QQ, DD), "joint", "cosine", K),  # Qwen3-Embedding
        ((DD, QQ, DQ, QD), "joint", "cosine", 2),  # GTE
        ((QD, DQ), "each", "cosine", K),  # CLIP
    ],
)
def test_equals_sentence_transformers(directions, partition, similarity, k):
    from sentence_transformers.util import cos_sim, dot_score

    embeddings, temperature = embeddings_of(k=k), 0.5
    theirs = st_losses.MultipleNegativesRankingLoss(
        None,
        scale=1 / temperature,
        similarity_fct={"cosine": cos_sim, "dot": dot_score}[similarity],
        directions=tuple(GTE[d] for d in directions),
        partition_mode={"joint": "joint", "each": "per_direction"}[partition],
    )
    loss = InfoNCE(
        temperature, directions=directions, softmax_scope=partition, similarity=similarity
    )
    expected = in_torch(
        torch, lambda q, d: theirs.compute_loss_from_embeddings([q, *d], None), embeddings
    )
    equal(gradients(loss, embeddings, pairs_of(k=k)), expected)


def test_a_learned_scale_is_clips():
    embeddings = embeddings_of(k=1, learned=True)
    query, document, scale = (exact(torch, x) for x in (embeddings.query, embeddings.document, 1.7))
    normal = torch.nn.functional.normalize
    logits = scale.exp() * normal(query, dim=-1) @ normal(document[:, 0], dim=-1).T
    labels = torch.arange(B)
    entropy = torch.nn.functional.cross_entropy
    wanted = (entropy(logits, labels) + entropy(logits.T, labels)) / 2
    wanted.backward()
    loss = InfoNCE(temperature=0.0, directions=(QD, DQ), softmax_scope="each")
    value, grads, sums = gradients(loss, embeddings, pairs_of(k=1))
    np.testing.assert_allclose(value, wanted.item(), rtol=TOLERANCE)
    expected = {"query": query.grad, "document": document.grad, "scale": scale.grad}
    worst_gradient(grads, {n: g.numpy() for n, g in expected.items()} | {"bias": 0 * grads["bias"]})
    hits = (logits.argmax(1) == labels).sum().item()
    assert sums.metrics["accuracy"] == (hits, B)
    np.testing.assert_allclose(sums.metrics["scale"][0], np.exp(1.7), rtol=1e-6)
    own, count = sums.metrics["positive_similarity"]
    np.testing.assert_allclose(own / count, logits.diag().mean().item() / np.exp(1.7), rtol=1e-5)


def test_a_learned_scale_has_a_bound_that_it_can_leave():
    """Above the bound, at it and one rounding below it: the value and the gradient of the bound.

    In float64, where they are equal to 1e-15: the slope is a small difference of large terms.
    """
    embeddings, loss = embeddings_of(learned=True), InfoNCE(temperature=0.0, max_scale=4.0)
    bound = np.log(4.0)
    free = InfoNCE(temperature=0.0, max_scale=0.0)
    with in_float64():
        expected, slope, _ = gradients(free, embeddings._replace(scale=bound), pairs_of())
        assert expected.dtype == np.float64 and slope["scale"] != 0
        for scale in (1.7, bound, np.nextafter(bound, 0)):
            value, grads, sums = gradients(loss, embeddings._replace(scale=scale), pairs_of())
            close(sums.metrics["scale"][0], 4.0, 1e-12)
            close(value, expected, 1e-12)
            close(grads["scale"], slope["scale"], 1e-12)
    assert loss.bounds == {"head/scale": (-np.inf, np.log(4.0))}
    assert not free.bounds and not InfoNCE(temperature=0.25).bounds


def documents_of(i, pairs, numbers, keys):
    """Documents that example i may be told apart from, as (example, place)."""
    real = np.argwhere(pairs.valid & pairs.valid[:, :1])
    return [
        (j, k)
        for j, k in real.tolist()
        if not (k == 0 and j in numbers[i]) and int(pairs.document_key[j, k]) not in keys[i]
    ]


def brute_force(embeddings, pairs, loss):
    """The mean over examples, one pair after the other."""
    inputs = [torch.tensor(x, dtype=torch.float64) for x in (embeddings.query, embeddings.document)]
    for x in inputs:
        x.requires_grad_()
    q, d = (torch.nn.functional.normalize(x, dim=-1) for x in inputs)
    numbers, keys = relation(pairs)
    losses, hits, real = [], 0, np.flatnonzero(pairs.valid[:, 0]).tolist()
    for i in real:
        own = (q[i] @ d[i, 0]).item()
        by = {"none": np.inf, "absolute": loss.margin, "relative": loss.margin * abs(own)}
        mates, others = numbers[i], documents_of(i, pairs, numbers, keys)
        far = [j for j in real if j not in mates]
        positives = {QD: [q[i] @ d[j, 0] for j in mates], DQ: [q[j] @ d[i, 0] for j in mates]}
        mine, query = int(pairs.document_key[i, 0]), pairs.query_key
        negatives = {
            QD: [q[i] @ d[j, k] for j, k in others],
            DQ: [q[j] @ d[i, 0] for j in far if mine not in keys[j]],
            QQ: [q[i] @ q[j] for j in far if query[i] != query[j]],
            DD: [d[i, 0] @ d[j, k] for j, k in others if j != i],
        }
        limit = own + by[loss.false_negative_filter]
        terms = {way: [s for s in negatives[way] if s.item() <= limit] for way in loss.directions}
        rival = max((s.item() for s in terms[QD]), default=-np.inf)
        hits += max(s.item() for s in positives[QD]) > rival
        for way in {QD, DQ} & set(terms):
            terms[way] += positives[way]
        if loss.softmax_scope == "joint":
            terms = {QD: [s for way in terms for s in terms[way]]}
        each = [
            torch.logsumexp(torch.stack(of) / loss.temperature, 0)
            - torch.stack(positives[way]).mean() / loss.temperature
            for way, of in terms.items()
        ]
        losses.append(sum(each) / len(each))
    value = sum(losses) / len(losses)
    value.backward()
    grads = {n: x.grad.numpy() for n, x in zip(("query", "document"), inputs)}
    return value.item(), grads, (hits, len(real))


CASES = {
    "groups and keys": InfoNCE(0.3, directions=DIRECTIONS),
    "each": InfoNCE(0.3, directions=(QD, DQ), softmax_scope="each", tile_size=4),
    "above by": InfoNCE(
        0.3, directions=(QD, QQ, DD), false_negative_filter="absolute", margin=0.1, tile_size=5
    ),
    "share of": InfoNCE(0.3, directions=DIRECTIONS, false_negative_filter="relative", margin=-0.05),
}


@pytest.mark.parametrize(
    ("case", "seed"),
    [("groups and keys", 0), ("each", 0), ("above by", 0), ("share of", 0)]
    + [pytest.param(case, seed, marks=pytest.mark.long) for case in CASES for seed in (1, 2, 3)],
)
def test_positives_and_false_negatives_are_those_of_a_brute_force(case, seed):
    embeddings, pairs = embeddings_of(seed=seed), tangled(seed=seed)
    value, grads, sums = gradients(CASES[case], embeddings, pairs)
    wanted, wanted_grads, hits = brute_force(embeddings, pairs, CASES[case])
    np.testing.assert_allclose(value, wanted, rtol=TOLERANCE)
    worst_gradient(grads, wanted_grads, TOLERANCE)
    assert sums.metrics["accuracy"] == hits
    assert not np.any(grads["document"][~pairs.valid]) and not np.any(grads["query"][4])


@pytest.mark.parametrize(
    ("kind", "margin"),
    [
        ("relative", 0.1),
        pytest.param("absolute", 0.1, marks=pytest.mark.long),
        pytest.param("absolute", 0.0, marks=pytest.mark.long),
    ],
)
def test_masks_are_gists(kind, margin):
    """With the model as its own guide; both sides, of pairs."""
    theirs = st_losses.GISTEmbedLoss.__new__(st_losses.GISTEmbedLoss)
    torch.nn.Module.__init__(theirs)

    class Given(torch.nn.Module):
        def forward(self, features):
            return {"sentence_embedding": features["x"]}

    theirs.__dict__.update(
        temperature=0.5, margin_strategy=kind, margin=margin, contrast_anchors=True,
        contrast_positives=True, gather_across_devices=False, must_retokenize=False,
        similarity_fct=torch.nn.CosineSimilarity(dim=-1),
        cross_entropy_loss=torch.nn.CrossEntropyLoss(), model=Given(), guide=Given(),
    )  # fmt: skip
    embeddings = embeddings_of(k=1)
    expected = in_torch(torch, lambda q, d: theirs([{"x": x} for x in (q, *d)], None), embeddings)
    loss = InfoNCE(0.5, directions=(QD, QQ, DD), false_negative_filter=kind, margin=-margin)
    equal(gradients(loss, embeddings, pairs_of(k=1)), expected)
    assert (
        gradients(InfoNCE(0.5, directions=(QD, QQ, DD)), embeddings, pairs_of(k=1))[0] > expected[0]
    )


@pytest.mark.parametrize(
    "tile_size", [5, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 12, 100))]
)
def test_tiles_change_neither_loss_nor_gradient(tile_size):
    embeddings, pairs = embeddings_of(learned=True), tangled()

    def run(size):
        loss = InfoNCE(
            0.0, directions=DIRECTIONS, false_negative_filter="absolute", margin=0.2, tile_size=size
        )
        return gradients(loss, embeddings, pairs)

    (whole, expected, sums), (value, grads, parts) = run(B), run(tile_size)
    np.testing.assert_allclose(value, whole, rtol=1e-6)
    worst_gradient(grads, expected, TOLERANCE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sums, parts)


def test_own_negatives_are_a_cross_entropy_and_a_sum_over_examples():
    embeddings, pairs = embeddings_of(), tangled()._replace(group=None)
    pairs.document_key[0, 1] = pairs.document_key[0, 0]
    pairs.valid[0, 1] = True
    loss = InfoNCE(0.5, negatives_from="own")

    def theirs(query, documents):
        logits = torch.cosine_similarity(query[:, None], torch.stack(documents, 1), dim=-1) / 0.5
        kept = torch.tensor(pairs.valid & (pairs.document_key != pairs.document_key[:, :1]))
        kept[:, 0] = torch.tensor(pairs.valid[:, 0])
        logits = logits.masked_fill(~kept, -torch.inf)[kept[:, 0]]
        return torch.nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=int))

    equal(gradients(loss, embeddings, pairs), in_torch(torch, theirs, embeddings))
    assert loss.additive and not InfoNCE().additive and isinstance(loss, Loss)
    is_additive(loss, embeddings, pairs)


def test_what_is_not_there_is_never_read():
    pairs, embeddings = tangled(), embeddings_of(learned=True)
    spoiled = embeddings._replace(
        document=np.where(pairs.valid[..., None], embeddings.document, np.nan)
    )
    spoiled.query[4] = np.nan
    clean = embeddings._replace(query=np.nan_to_num(spoiled.query))
    loss = InfoNCE(
        0.0, directions=DIRECTIONS, false_negative_filter="relative", margin=-0.05, tile_size=4
    )
    ours, expected = (gradients(loss, x, pairs)[:2] for x in (spoiled, clean))
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    pairs = pairs._replace(group=None)
    own = gradients(InfoNCE(negatives_from="own"), spoiled, pairs)[1]
    assert all(np.all(np.isfinite(g)) for g in own.values())


def test_a_model_that_says_one_thing_has_no_hits():
    same = embeddings_of()._replace(query=np.ones((B, 8), "f4"), document=np.ones((B, K, 8), "f4"))
    assert gradients(InfoNCE(), same, pairs_of())[2].metrics["accuracy"][0] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"similarity": "l2"}, "similarity='l2'; known: cosine, dot"),
        ({"directions": ("up",)}, "directions='up'; known: query_to_document"),
        ({"directions": (QQ,)}, "'query_to_document' has the positives; add it"),
        ({"directions": (QD, QQ), "softmax_scope": "each"}, "has no positives; set softmax_scope"),
        ({"directions": (QD, DQ), "negatives_from": "own"}, "compares with other examples"),
        ({"negatives_from": "none"}, "negatives_from='none'; known: batch, shard, own"),
        ({"false_negative_filter": "top"}, "false_negative_filter='top'; known"),
        ({"margin": 0.1}, "margin=0.1 is not read with false_negative_filter='none'"),
        ({"temperature": -1.0}, "temperature=-1.0 must be 0 or more"),
        ({"tile_size": -1}, "tile_size=-1 must be 0 or more"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ConfigError, match=message):
        InfoNCE(**settings)


@pytest.mark.parametrize(
    ("loss", "embeddings", "message"),
    [
        (InfoNCE(temperature=0.0), embeddings_of(), "this model has none; set a temperature"),
        (InfoNCE(negatives_from="own"), embeddings_of(k=1), "have only a positive"),
        (InfoNCE(), embeddings_of(tokens=(3, 4))._replace(query=embeddings_of().query), "takes"),
        (
            InfoNCE(directions=(QD, QQ)),
            embeddings_of(tokens=(3, 4)),
            "compares queries with documents only",
        ),
    ],
)
def test_embeddings_that_do_not_fit(loss, embeddings, message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(loss, embeddings, pairs_of(k=embeddings.document.shape[1]))
