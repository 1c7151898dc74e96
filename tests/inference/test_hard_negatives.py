"""Hard negatives compared with plain rules per query, on one device and on eight."""

from __future__ import annotations

import json
import os

import jax
import numpy as np
import pytest

from jaxvlm.config import ConfigError, DataConfig, Extension, MeshConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.inference import examples
from jaxvlm.inference.hard_negatives import (
    Mined,
    MiningConfig,
    excluded,
    mine,
    similarities,
    with_negatives,
)
from jaxvlm.parallel.mesh import make_mesh

Q, N, E = 21, 90, 8


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=8))


@pytest.fixture(scope="module")
def embeddings():
    rng = np.random.default_rng(0)
    return rng.normal(size=(Q, E)).astype(np.float32), rng.normal(size=(N, E)).astype(np.float32)


@pytest.fixture(scope="module")
def right(embeddings):
    """Each query's best but a few; some queries have three."""
    score = unit(embeddings[0]) @ unit(embeddings[1]).T
    order = np.argsort(-score, axis=1)
    return [[int(order[i, 2]), *order[i, 10:12].tolist()][: 1 + 2 * (i % 4 == 0)] for i in range(Q)]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def by_rules(score, right, how, exclude):
    """The candidates of one query by the definitions of the options."""
    order = [n for n in np.argsort(-score, kind="stable") if n not in right and n not in exclude]
    least = min(score[n] for n in right)
    span = how.range_max or how.range_min + how.num_negatives * (10 if how.bounded else 1)
    left = []
    for n in order[:span]:
        if how.absolute_margin is not None and score[n] > least - how.absolute_margin:
            continue
        if how.relative_margin is not None and score[n] > least - abs(least) * how.relative_margin:
            continue
        if how.max_score is not None and score[n] > how.max_score:
            continue
        if how.min_score is not None and score[n] < how.min_score:
            continue
        left.append(int(n))
    return left[how.range_min :]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_negatives": 5, "range_min": 4, "range_max": 40},
        {"relative_margin": 0.05},
        {"absolute_margin": 0.1, "num_negatives": 7},
        {"max_score": 0.5, "min_score": 0.3, "range_max": 30},
        {"relative_margin": 0.2, "max_score": 0.45, "range_min": 2, "range_max": 50},
        {"num_negatives": 90},
    ],
    ids=str,
)
def test_negatives_are_those_the_settings_leave(mesh, embeddings, right, options):
    how, exclude = MiningConfig(**options), [[0, 1] if i % 3 else [] for i in range(Q)]
    found = mine(*embeddings, right, mesh, how, exclude)
    score = unit(embeddings[0].astype(np.float64)) @ unit(embeddings[1].astype(np.float64)).T
    for i in range(Q):
        expected = by_rules(score[i], right[i], how, exclude[i])[: how.num_negatives]
        rest = [-1] * (how.num_negatives - len(expected))
        assert found.document[i].tolist() == expected + rest
        there = found.score[i][: len(expected)]
        np.testing.assert_allclose(there, score[i, expected], atol=1e-6)
        assert np.isneginf(found.score[i][len(expected) :]).all()
        assert found.positive[i] == pytest.approx(min(score[i, n] for n in right[i]), abs=1e-6)
    assert found.excluded.keys() == options.keys() - {"num_negatives", "range_min", "range_max"}
    assert all(found.excluded.values())
    one = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    again = mine(*embeddings, right, one, how, exclude)
    np.testing.assert_array_equal(again.document, found.document)
    np.testing.assert_array_equal(again.score, found.score)


def test_random_negatives_are_a_function_of_the_seed(mesh, embeddings, right):
    how = MiningConfig(sampling="random", range_min=3, range_max=13, num_negatives=4, seed=5)
    found = mine(*embeddings, right, mesh, how)
    score = unit(embeddings[0].astype(np.float64)) @ unit(embeddings[1].astype(np.float64)).T
    used = set()
    for i in range(Q):
        allowed = by_rules(score[i], right[i], how, [])
        chosen = [allowed.index(n) for n in found.document[i].tolist()]  # in the order of scores
        assert len(allowed) == 10 and chosen == sorted(set(chosen)) and len(chosen) == 4
        used.update(chosen)
    assert used == set(range(10))
    again = mine(*embeddings, right, mesh, how)
    np.testing.assert_array_equal(again.document, found.document)
    other = mine(*embeddings, right, mesh, MiningConfig(**vars(how) | {"seed": 6}))
    assert np.any(other.document != found.document)
    few = MiningConfig(sampling="random", range_max=20, num_negatives=10, min_score=0.6)
    found = mine(*embeddings, right, mesh, few)
    for i in range(Q):
        there, allowed = found.document[i].tolist(), by_rules(score[i], right[i], few, [])
        count = min(10, len(allowed))
        assert set(there[:count]) <= set(allowed) and there[count:] == [-1] * (10 - count)


def test_examples_are_gathered_and_written_again(tmp_path):
    (tmp_path / "d.png").write_bytes(b"")
    rows = [
        {"id": "a", "query": "cat", "positive": "a cat", "negatives": ["a dog"]},
        {"query": "cat", "positive": "one cat", "label": None},
        {"query": "dog", "positive": "a dog", "label": "pets"},
        {"query": "bird", "positive": "a bird", "label": "pets"},
        {"query_image": "d.png", "positive": "bird", "negative_images": ["d.png"]},
        {"query": "bird", "positive_image": "d.png", "positive": "see <image>", "negatives": []},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    given = examples.read(str(path))
    assert [e.id for e in given] == ["a", *(f"in.jsonl:{i}" for i in range(2, 7))]
    found = examples.gather(given, [Item("more"), Item("a cat")])
    image = str(tmp_path / "d.png")
    assert found.queries == [Item("cat"), Item("dog"), Item("bird"), Item("<image>", image)]
    texts = [item.text for item in found.documents]
    assert texts == [
        "a cat",
        "a dog",
        "one cat",
        "a bird",
        "bird",
        "<image>",
        "see <image>",
        "more",
    ]
    assert found.positives == [[0, 2], [1, 3], [1, 3, 6], [4]]
    assert found.same == [[], [], [4], [5]]
    assert found.indices[0] == (0, 0, (1,)) and found.indices[4] == (3, 4, (5,))
    assert excluded(found) == [{1}, set(), {4}, {5}]
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    mined = mine(x[:4], x[4:], found.positives, mesh, MiningConfig(2), excluded(found))
    made, of = with_negatives(given, found, mined)
    query = np.repeat([q for q, _, _ in found.indices], [len(x) for x in of])
    scores = similarities(x[:4], x[4:], query, np.concatenate(of))
    assert [len(e.negatives) for e in made] == [3, 2, 2, 2, 3, 2]
    assert len(scores) == sum(map(len, of)) and scores[0] == pytest.approx(
        unit(x[:1]) @ unit(x[4:5]).T, abs=1e-6
    )
    out = tmp_path / "deep" / "out.jsonl"
    ends = np.cumsum([len(x) for x in of])[:-1]
    rows = list(zip(made, [np.round(some, 6).tolist() for some in np.split(scores, ends)]))
    examples.write(out, (examples.record(e, out.parent.absolute(), some) for e, some in rows))
    expected = [
        e._replace(
            query=at(e.query, out),
            positive=at(e.positive, out),
            negatives=tuple(at(n, out) for n in e.negatives),
            scores=pytest.approx(some, abs=1e-6),
        )
        for e, some in rows
    ]
    assert examples.read(str(out)) == expected  # what a run is trained on
    first = json.loads(out.read_text().split("\n")[0])
    assert first["query"] == "cat" and first["negatives"][0] == "a dog"


def test_pairs_that_do_not_match_become_no_positives():
    """Their scores would be lost, and with them that they do not match."""
    scores = {"a": 0.9, "b": 0.0, "c": -1.0, "d": 0.2}
    rows = [Example(n, Item(f"q{n}"), Item(f"d{n}"), scores=(x,)) for n, x in scores.items()]
    given, others = examples.split_matching(rows)
    assert [e.id for e in given] == ["a", "d"] and others == [Item("db"), Item("dc")]
    teacher = [e._replace(negatives=(Item("n"),), scores=(*e.scores, 1.0)) for e in rows]
    assert examples.split_matching(teacher) == (teacher, [])
    with pytest.raises(DataError, match="every pair has a score of 0 or less"):
        examples.split_matching(rows[1:3])
    found = examples.gather(given, others)
    for document, kept in (([[2, -1], [-1, -1]], False), ([[-1, -1], [-1, -1]], True)):
        mined = Mined(np.asarray(document), np.zeros((2, 2), "f"), np.zeros(2, "f"), {})
        made, _ = with_negatives(given, found, mined)
        assert [e.scores for e in made] == ([(0.9,), (0.2,)] if kept else [(), ()])


@pytest.mark.parametrize(
    "instructions",
    [("", "", ""), ("a: ", "a: ", "a: "), ("", "b: ", ""), ("a: ", "", "b: ")],
)
def test_written_examples_are_read_back(tmp_path, monkeypatch, instructions):
    """With and without ``image_root``, from tars, whatever instruction each document has."""
    monkeypatch.chdir(tmp_path)
    first, *others = instructions
    members = ("s.tar::512+3::x/c.png", "")
    negatives = [
        {"text": text, "image": image, "instruction": own}
        for text, image, own in zip(("", "no"), members, others)
    ]
    row = {"id": "1", "query": "q", "query_image": "a.png", "query_instruction": "ask "}
    row |= {"positive": {"text": "yes", "image": "b.png", "instruction": first}}
    for root, folder in (("", "data"), ("images", "images")):
        path = tmp_path / "data" / "in.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(row | {"negatives": negatives}))
        config = DataConfig(image_root=root)
        given = examples.read("data/in.jsonl", config)
        assert given[0].query.image == f"{folder}/a.png"
        out = tmp_path / "out" / "out.jsonl"
        there = examples.root_of(out, config)
        examples.write(out, [examples.record(example, there) for example in given])
        for again in (config, *([DataConfig()] if root else [])):
            (found,) = examples.read("out/out.jsonl", again)
            items = zip(
                (given[0].query, given[0].positive, *given[0].negatives), found[1:3] + found[3]
            )
            for was, now in items:
                assert was._replace(image="") == now._replace(image="")
                assert os.path.realpath(was.image) == os.path.realpath(now.image)


def test_settings_that_would_read_the_examples_otherwise_are_named():
    mapping = (("positive", "query"), ("query", "positive"))
    config = DataConfig(column_mapping=mapping, ignored_fields=("note", "negatives"))
    names = ["config.data.column_mapping", "config.data.ignored_fields"]
    assert examples.settings_to_leave_out(config) == names
    config = DataConfig(format=Extension(target="m:f"), ignored_fields=("note",))
    assert examples.settings_to_leave_out(config) == ["config.data.format"]


def at(item, out):
    """The item as read from ``out``, with its image path relative to the file's folder."""
    return item._replace(image=str(out.parent / "../d.png")) if item.image else item


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_negatives": 0}, "num_negatives=0 must be at least 1"),
        ({"range_min": 3, "range_max": 5}, "range_min=3 to range_max=5 holds fewer"),
        ({"sampling": "best"}, "sampling='best': use top or random"),
        ({"max_score": 1.5}, "max_score=1.5: scores are cosines"),
        ({"relative_margin": -0.1}, "relative_margin=-0.1: use a number from 0 to 2"),
        ({"num_negatives": 91}, "num_negatives=91, but the corpus has 90 documents"),
        ({"range_max": 91}, "range_max=91, but the corpus has 90 documents"),
    ],
)
def test_bad_options_are_named(mesh, embeddings, right, options, said):
    with pytest.raises(ConfigError, match=said):
        mine(*embeddings, right, mesh, MiningConfig(**options))


def test_a_corpus_of_one_has_no_negatives(mesh, embeddings):
    with pytest.raises(ConfigError, match="the corpus has 1 documents"):
        mine(embeddings[0][:1], embeddings[1][:1], [[0]], mesh, MiningConfig())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"query": "a"}, "no positive"),
        ({"query": 3, "positive": "b"}, "'query' is not text"),
        ({"query": "<image>a", "positive": "b"}, "placeholders and images differ in number"),
    ],
)
def test_bad_examples_are_named(tmp_path, row, said):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"query": "q", "positive": "p"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"x\.jsonl: x\.jsonl:2: {said}"):
        examples.read(str(path))
