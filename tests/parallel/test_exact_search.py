"""Exact search on a mesh: against a whole matrix in NumPy, and one device against eight."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.parallel.exact_search import Late, Search, nearest
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import batch_sharding

SMALL = Search(query_tile=8, document_tile=16)


@pytest.fixture(scope="module")
def meshes():
    one = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    return one, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), make_mesh(MeshConfig(data=8))


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def by_hand(score, k, exclude=None):
    """A whole matrix, sorted by score and then by index."""
    score = score.astype(np.float64).copy()
    for row, out in zip(score, exclude or []):
        row[list(out)] = -np.inf
    index = np.argsort(-score, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(score, index, axis=1), index


def numbers(seed, *shape):
    """Small whole numbers: every product is exact, and there are many ties."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


@pytest.mark.parametrize("count", [3, 200])
def test_products_with_many_ties_are_numpys(meshes, count):
    queries, documents = numbers(0, 13, 6), numbers(1, count, 6)
    k = min(count, 20)
    exclude = [range(i % 3) for i in range(13)]
    how = Search(cosine=False, query_tile=8, document_tile=16)
    score, index = by_hand(queries @ documents.T, k, exclude)
    assert np.sum(score[:, :-1] == score[:, 1:]) > 3  # ties there are
    for mesh in meshes:
        found = nearest(queries, documents, k, mesh, how, exclude)
        np.testing.assert_array_equal(found.score, score)
        np.testing.assert_array_equal(found.document, np.where(np.isneginf(score), -1, index))


def test_eight_devices_find_the_bits_of_one(meshes):
    """Cosines, a prefix, doubled documents; from the host in parts, and from the devices."""
    rng = np.random.default_rng(2)
    queries, documents = rng.normal(size=(11, 24)), rng.normal(size=(160, 24))
    queries, documents = queries.astype(np.float32), documents.astype(np.float32)
    documents[80:90] = documents[:10]
    expected = unit(queries[:, :8].astype(np.float64)) @ unit(documents[:, :8].astype(float)).T
    score, index = by_hand(np.round(expected, 6), 12)
    how = Search(dims=8, query_tile=8, document_tile=16)
    one = nearest(queries, documents, 12, meshes[0], how)
    np.testing.assert_allclose(one.score, score, atol=2e-6)
    np.testing.assert_array_equal(one.document, index)
    for mesh in meshes[1:]:
        there = jax.device_put(documents, batch_sharding(mesh))
        for given in (documents, there):
            again = nearest(queries, given, 12, mesh, how)
            np.testing.assert_array_equal(again.score, one.score)
            np.testing.assert_array_equal(again.document, one.document)
    parts = Search(dims=8, query_tile=8, document_tile=16, resident=16)
    again = nearest(queries, documents, 12, meshes[0], parts)  # ten of them
    np.testing.assert_array_equal(again.score, one.score)
    np.testing.assert_array_equal(again.document, one.document)


def test_late_interaction_is_a_sum_of_maxima(meshes):
    rng = np.random.default_rng(3)
    queries, documents = rng.normal(size=(5, 4, 6)), rng.normal(size=(40, 7, 6))
    asked, seen = rng.random((5, 4)) < 0.7, rng.random((40, 7)) < 0.6
    asked[:, 0] = seen[:, 0] = True
    score = np.zeros((5, 40))
    for i, q in enumerate(queries):
        for j, d in enumerate(documents):
            score[i, j] = (unit(q[asked[i]]) @ unit(d[seen[j]]).T).max(axis=1).sum()
    expected, index = by_hand(score, 9)
    sides = (Late(x.astype(np.float32), m) for x, m in ((queries, asked), (documents, seen)))
    sides = tuple(sides)
    how = Search(query_tile=8, document_tile=8)
    one = nearest(*sides, 9, meshes[0], how)
    np.testing.assert_allclose(one.score, expected, atol=1e-5)
    np.testing.assert_array_equal(one.document, index)
    torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    util = pytest.importorskip("sentence_transformers.util", reason="the oracle")
    theirs = [torch.from_numpy(x) for x in (unit(queries), unit(documents), asked, seen)]
    rows = np.arange(5)[:, None]
    np.testing.assert_allclose(one.score, util.maxsim(*theirs)[rows, one.document], atol=1e-5)
    eight = nearest(*sides, 9, meshes[2], how)
    np.testing.assert_array_equal(eight.score, one.score)
    np.testing.assert_array_equal(eight.document, one.document)


def test_the_whole_matrix_is_in_no_program(meshes):
    """Nor is a corpus gathered: what a device holds is its documents and a few tiles."""
    from jaxvlm.parallel import exact_search

    q, E, k, tile, rows = 8, 32, 4, 16, 4096
    f32, i32 = np.float32, np.int32
    shapes = [(q, k), (q, k), (q, E), (q, 1), (rows, E), (2,)]
    best0, best1, asked, out, documents, two = (
        jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, (f32, i32, f32, i32, f32, i32))
    )
    documents = jax.ShapeDtypeStruct((rows, E), f32, sharding=batch_sharding(meshes[2]))
    args = (best0, best1), Late(asked, None), out, Late(documents, None), two
    lowered = exact_search._step.lower(meshes[2], k, tile, True, 0, *args)
    used = lowered.compile().memory_analysis()
    assert used.temp_size_in_bytes < 4 * rows // 8 * E  # below its own documents


@pytest.mark.parametrize(
    ("shapes", "k", "how", "said"),
    [
        (((2, 4), (3, 4)), 4, SMALL, "k=4 of 3 documents"),
        (((2, 4), (3, 4)), 0, SMALL, "k=0 of 3 documents"),
        (((2, 4), (3, 5)), 1, SMALL, r"queries \[2, 4\] and documents \[3, 5\]"),
        (((0, 4), (3, 4)), 1, SMALL, "for 0 queries"),
        (((2, 4), (3, 4)), 1, Search(dims=5), "dims=5 is more than the embeddings' 4 dims"),
    ],
)
def test_what_cannot_be_searched_is_said(meshes, shapes, k, how, said):
    queries, documents = (np.ones(shape, np.float32) for shape in shapes)
    with pytest.raises(ConfigError, match=said):
        nearest(queries, documents, k, meshes[0], how)


def test_nan_is_no_rank(meshes):
    queries, documents = numbers(4, 3, 4), numbers(5, 20, 4)
    documents[7] = np.nan
    with pytest.raises(ConfigError, match="contain NaN"):
        nearest(queries, documents, 2, meshes[0], SMALL)
    with pytest.raises(ConfigError, match="resident at least 1"):
        Search(resident=0)
