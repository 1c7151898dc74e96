"""Retrieval metrics compared with sentence-transformers, scikit-learn and plain loops."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.evals.retrieval import Relevance, Retrieval, evaluate, scores, shuffled
from jaxvlm.parallel.exact_search import Search, nearest
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import batch_sharding

Q, N, E, KS = 17, 60, 12, (1, 3, 5, 10)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=4, fsdp=2))


@pytest.fixture(scope="module")
def embeddings():
    rng = np.random.default_rng(0)
    return rng.normal(size=(Q, E)).astype(np.float32), rng.normal(size=(N, E)).astype(np.float32)


@pytest.fixture(scope="module")
def grades():
    """Document -> grade, for each query; up to seven relevant documents, two queries with none."""
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 8, Q)
    counts[[3, 9]] = 0
    return [
        dict(zip(rng.choice(N, n, replace=False).tolist(), rng.integers(1, 4, n).tolist()))
        for n in counts
    ]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def plainly(ranked, grades, k):
    """The definitions as loops over queries and ranks."""
    sums = dict.fromkeys(("hit", "recall", "ndcg", "mrr", "map"), 0.0)
    asked = [i for i, right in enumerate(grades) if right]
    for i in asked:
        right, seen, dcg, precision, first = grades[i], 0, 0.0, 0.0, 0
        for rank, document in enumerate(ranked[i][:k], 1):
            if document in right:
                seen, first = seen + 1, first or rank
                dcg += right[document] / np.log2(rank + 1)
                precision += seen / rank
        best = sorted(right.values(), reverse=True)[:k]
        sums["hit"] += seen > 0
        sums["recall"] += seen / len(right)
        sums["ndcg"] += dcg / sum(g / np.log2(r + 1) for r, g in enumerate(best, 1))
        sums["mrr"] += 1 / first if first else 0
        sums["map"] += precision / len(right)
    return {f"{name}@{k}": value / len(asked) for name, value in sums.items()}


def close(ours, expected):
    assert expected.keys() <= ours.keys()
    for name, value in expected.items():
        assert ours[name] == pytest.approx(value, abs=1e-12), name


def test_both_directions_and_every_number_of_dims_are_plain_loops(mesh, embeddings, grades):
    queries, documents = embeddings
    what = Retrieval(ks=KS, dims=(4, 8))
    report = evaluate(*embeddings, Relevance.of(grades, N), mesh, what)
    turned = [{i: grades[i][n] for i in range(Q) if n in grades[i]} for n in range(N)]
    for prefix, one, other, right in (
        ("", queries, documents, grades),
        ("reverse/", documents, queries, turned),
    ):
        for dims in (0, *what.dims):
            cut = slice(None, dims or None)
            ranked = np.argsort(-unit(one[:, cut]) @ unit(other[:, cut]).T, axis=1)
            for k in KS:
                expected = plainly(ranked, right, k)
                name = f"{prefix}dims{dims}/" if dims else prefix
                close(report, {name + n: value for n, value in expected.items()})
    assert report["queries"] == Q - 2
    there = [jax.device_put(x, batch_sharding(mesh)) for x in (queries[:16], documents[:56])]
    of_both = [{n: g for n, g in right.items() if n < 56} for right in grades[:16]]
    relevance = Relevance.of(of_both, 56)
    on_devices = evaluate(*there, relevance, mesh, what)
    assert on_devices == evaluate(queries[:16], documents[:56], relevance, mesh, what)


def test_scikit_learns_ndcg(mesh, embeddings, grades):
    metrics = pytest.importorskip("sklearn.metrics", reason="the oracle")
    queries, documents = embeddings
    found = nearest(queries, documents, 10, mesh, Search()).document
    asked = [i for i in range(Q) if grades[i]]
    truth = np.zeros((Q, N))
    for i, right in enumerate(grades):
        truth[i, list(right)] = list(right.values())
    score = unit(queries) @ unit(documents).T
    ours = scores(found, Relevance.of(grades, N), KS)
    for k in KS:
        assert ours[f"ndcg@{k}"] == pytest.approx(
            metrics.ndcg_score(truth[asked], score[asked], k=k), abs=1e-9
        )


def test_sentence_transformers_evaluator(mesh, embeddings, grades):
    pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    theirs = pytest.importorskip("sentence_transformers.evaluation", reason="the oracle")
    right = {str(i): {f"{n:03d}" for n in found} for i, found in enumerate(grades) if found}
    names = [f"{n:03d}" for n in range(N)]
    evaluator = theirs.InformationRetrievalEvaluator(
        {str(i): "" for i in range(Q)},
        dict.fromkeys(names, ""),
        right,
        accuracy_at_k=KS,
        precision_recall_at_k=KS,
        ndcg_at_k=KS,
        mrr_at_k=KS,
        map_at_k=KS,
    )
    found = nearest(*embeddings, 10, mesh, Search())
    hits = [
        [
            {"corpus_id": names[n], "score": float(s)}
            for n, s in zip(found.document[int(i)], found.score[int(i)])
        ]
        for i in evaluator.queries_ids
    ]
    expected = evaluator.compute_metrics(hits)
    ours = scores(found.document, Relevance.of([set(x) for x in grades], N), KS)
    for name, called in (("hit", "accuracy"), ("recall", "recall"), ("ndcg", "ndcg"), ("mrr",) * 2):
        close(ours, {f"{name}@{k}": expected[f"{called}@k"][k] for k in KS})
    # Theirs divides by min(k, relevant documents): the same from k = 7 on, more below.
    close(ours, {"map@10": expected["map@k"][10]})
    assert all(ours[f"map@{k}"] < expected["map@k"][k] for k in (1, 3))


def test_the_control_is_chance(mesh):
    """In a random ranking, a query's one relevant document is among the first k of N with k / N."""
    queries, documents = 4000, 50
    right = Relevance.of([[i % documents] for i in range(queries)], documents)
    drawn = shuffled(queries, documents, 10, seed=3)
    assert all(len(set(row)) == 10 for row in drawn.tolist())
    report = scores(drawn, right, (1, 10))
    for k in (1, 10):
        assert report[f"recall@{k}"] == pytest.approx(k / documents, abs=0.02)
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(2, 40, 6)).astype(np.float32)
    known = evaluate(a, a, Relevance.pairs(40), mesh)
    assert known["hit@1"] == known["reverse/ndcg@10"] == 1
    assert known["random/hit@1"] < 0.2 > known["reverse/random/hit@1"]
    assert known == evaluate(a, a, Relevance.pairs(40), mesh)
    assert evaluate(a, b, Relevance.pairs(40), mesh)["hit@1"] < 0.3
    # A query that is a document of the corpus does not retrieve itself.
    itself = evaluate(a, a, Relevance.pairs(40), mesh, exclude=[[i] for i in range(40)])
    assert itself["hit@10"] == itself["reverse/hit@10"] == 0


def test_a_cut_off_beyond_the_documents_includes_all(mesh):
    x = np.eye(3, dtype=np.float32)
    report = evaluate(x, x[:1], Relevance.of([[0], [0], []], 1), mesh, Retrieval(ks=(5,)))
    assert report["recall@5"] == 1 and report["reverse/recall@5"] == 1
    assert report["queries"] == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda x, mesh: evaluate(x, x, Relevance.pairs(3), mesh),
            "3 documents, but .* of 4",
        ),
        (
            lambda x, mesh: evaluate(x, x, Relevance.of([[]] * 4, 4), mesh),
            "no query has a relevant",
        ),
        (lambda x, mesh: Relevance.of([[4]], 4), "document 4 is relevant .* there are 4"),
        (lambda x, mesh: Relevance.of([[-1]], 4), "document -1 is relevant"),
        (lambda x, mesh: Retrieval(ks=(0,)), r"ks=\(0,\)"),
        (lambda x, mesh: Retrieval(dims=(0,)), r"dims=\(0,\)"),
        (
            lambda x, mesh: evaluate(x, x, Relevance.pairs(4), mesh, Retrieval(dims=(9,))),
            "dims=9 is more than the embeddings",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(mesh, make, said):
    with pytest.raises(ConfigError, match=said):
        make(np.eye(4, dtype=np.float32), mesh)


def orders(similarity, rng, count):
    """Random orders of documents that respect their similarity."""
    for _ in range(count):
        yield np.lexsort((rng.random(len(similarity)), -similarity))


@pytest.mark.parametrize("levels", [1, 2, 5, 40])
def test_ties_are_in_no_order(mesh, levels, grades):
    """Metrics are means over the orders of tied documents, wherever positives stand."""
    rng = np.random.default_rng(levels)
    kinds = rng.normal(size=(levels, E)).astype(np.float32)
    documents = kinds[rng.integers(0, levels, N)]
    # Positives first, as in a corpus that is read from its examples.
    documents = documents[np.argsort([not any(n in right for right in grades) for n in range(N)])]
    queries = rng.normal(size=(Q, E)).astype(np.float32)
    what = Retrieval(ks=KS, both_ways=False, random=False)
    report = evaluate(queries, documents, Relevance.of(grades, N), mesh, what)
    similarity = np.round((unit(queries) @ unit(documents).T).astype(np.float64), 5)
    count, means = 4000, {}
    drawn = zip(*(orders(row, rng, count) for row in similarity))
    for ranked in drawn:
        for k in KS:
            for name, value in plainly(ranked, grades, k).items():
                means.setdefault(name, []).append(value)
    for name, values in means.items():
        error = 5 * np.std(values) / count**0.5 + 1e-9  # five standard errors
        assert report[name] == pytest.approx(np.mean(values), abs=error), name


def test_scikit_learns_ndcg_of_ties(mesh, grades):
    metrics = pytest.importorskip("sklearn.metrics", reason="the oracle")
    rng = np.random.default_rng(3)
    documents = np.eye(4, dtype=np.float32)[rng.integers(0, 4, N)]
    queries = rng.normal(size=(Q, 4)).astype(np.float32)
    what = Retrieval(ks=KS, both_ways=False, random=False)
    ours = evaluate(queries, documents, Relevance.of(grades, N), mesh, what)
    asked = [i for i in range(Q) if grades[i]]
    truth = np.zeros((Q, N))
    for i, right in enumerate(grades):
        truth[i, list(right)] = list(right.values())
    for k in KS:
        expected = metrics.ndcg_score(truth[asked], (queries @ documents.T)[asked], k=k)
        assert ours[f"ndcg@{k}"] == pytest.approx(expected, abs=1e-9)


def test_a_model_that_says_one_thing_is_chance(mesh):
    """Of more documents than are retrieved to find where a tie ends."""
    queries, documents = np.ones((3, 4), np.float32), np.ones((10_000, 4), np.float32)
    what = Retrieval(ks=(1, 10), both_ways=False, random=False)
    report = evaluate(queries, documents, Relevance.of([[0], [0, 1], [5]], 10_000), mesh, what)
    assert report["hit@1"] == pytest.approx((1 + 2 + 1) / 3 / 10_000, rel=1e-6)
    assert report["recall@10"] == pytest.approx(10 / 10_000, rel=1e-6)


def test_the_control_leaves_out_what_a_search_leaves_out():
    drawn = shuffled(50, 6, 6, 0, [[i % 6] for i in range(50)])
    assert all(i % 6 not in row for i, row in enumerate(drawn.tolist()))
    assert np.all(np.sort(drawn)[:, 0] == -1) and np.all(np.sort(drawn)[:, 1] >= 0)


def test_a_tie_without_an_end_holds_all_that_was_not_retrieved():
    """Ten documents are tied and three were retrieved, none of the two relevant ones."""
    relevance = Relevance.of([[5, 7]], 10)
    found = scores(np.asarray([[0, 1, 2]]), relevance, (1, 2), np.ones((1, 3)))
    assert found["hit@1"] == pytest.approx(2 / 10) and found["recall@2"] == pytest.approx(2 / 10)
    assert found["hit@2"] == pytest.approx(1 - (8 / 10) * (7 / 9))


def test_truncated_embeddings_are_of_unit_length(mesh, embeddings, grades):
    """As they are trained and written, also where whole ones are compared by dot product."""
    rng = np.random.default_rng(2)
    queries, documents = (x * rng.uniform(0.2, 5, (len(x), 1)).astype("f") for x in embeddings)
    relevance = Relevance.of(grades, N)
    how = {"ks": (3,), "dims": (4,), "random": False}
    found = evaluate(queries, documents, relevance, mesh, Retrieval(cosine=False, **how))
    for prefix, q, d in (
        ("", queries, documents),
        ("dims4/", *map(unit, (queries[:, :4], documents[:, :4]))),
    ):
        ranked = np.argsort(-(q @ d.T), axis=1)
        for name, value in plainly(ranked.tolist(), grades, 3).items():
            assert found[prefix + name] == pytest.approx(value, abs=1e-6)
    by_cosine = evaluate(queries, documents, relevance, mesh, Retrieval(cosine=True, **how))
    assert found["ndcg@3"] != by_cosine["ndcg@3"]
