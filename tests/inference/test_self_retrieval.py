"""Evaluations of corpora that hold their queries."""

import numpy as np
import pytest

from jaxvlm.config import MeshConfig
from jaxvlm.data.pairs.examples import Example, Item, never_retrieved
from jaxvlm.evals.retrieval import Relevance, Retrieval
from jaxvlm.inference.examples import gather
from jaxvlm.inference.retrieval import measure, tables
from jaxvlm.parallel.mesh import make_mesh


def example(query, positive, *negatives):
    return Example(query, Item(query), Item(positive), tuple(map(Item, negatives)))


def both_ways(i):
    return example(f"a{i}", f"b{i}"), example(f"b{i}", f"a{i}")


CORPORA = {
    "pairs in both directions": [one for i in range(6) for one in both_ways(i)],
    "a hard negative": [example(f"a{i}", f"b{i}", f"a{i}", f"c{i}") for i in range(6)],
    "another's negative": [example(f"a{i}", f"b{i}", f"a{(i + 1) % 6}") for i in range(6)],
}


@pytest.mark.parametrize("name", CORPORA)
def test_a_query_does_not_find_itself(name):
    """A model for which a text is nearest to itself, and next to its positive."""
    gathered = gather(CORPORA[name])

    def embedding(item):
        angle = 2 * np.pi * int(item.text[1:]) / 6 + 0.1 * "abc".index(item.text[0])
        return [np.cos(angle), np.sin(angle)]

    queries, documents = (
        np.asarray([embedding(item) for item in items], np.float32)
        for items in (gathered.queries, gathered.documents)
    )
    relevance = Relevance.of(gathered.positives, len(documents))
    args = (queries, documents, relevance, make_mesh(MeshConfig(data=8)), Retrieval(ks=(1,)))
    exclude = never_retrieved(gathered.same, gathered.positives)
    metrics = measure(*args, ("binary",), exclude)
    assert metrics["excluded"] == len(queries) and metrics["recall@1"] == 1
    assert f"{len(queries)} queries are documents too" in tables(metrics, (), ("binary",))[1]
    assert measure(*args)["recall@1"] == 0


def test_a_query_that_is_relevant_to_itself_is_found():
    gathered = gather([example("a", "a"), example("b", "a")])
    assert gathered.same == [[0], []]
    assert never_retrieved(gathered.same, gathered.positives) == [[], []]


def test_the_control_does_not_find_the_query_itself():
    """Of two documents one is the query, so a random ranking can only find the other."""
    gathered = gather(both_ways(0))
    relevance, one = Relevance.of(gathered.positives, 2), np.eye(2, dtype=np.float32)
    args = (one, one, relevance, make_mesh(MeshConfig(data=8)), Retrieval(ks=(1,)))
    exclude = never_retrieved(gathered.same, gathered.positives)
    assert measure(*args, (), exclude)["random/recall@1"] == 1
