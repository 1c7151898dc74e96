"""Chunked cross-entropy and next-token cross-entropy against torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxvlm.config import Config, MeshConfig
from jaxvlm.losses import next_token
from jaxvlm.losses.chunked_cross_entropy import VocabularyChunks, chunked_scores
from jaxvlm.losses.next_token import NextToken, targets, token_scores
from jaxvlm.losses.registry import make_loss
from jaxvlm.planner.compiled import collectives
from jaxvlm.planner.request import abstract_devices
from jaxvlm.types import Batch, Out

B, T, D, V = 2, 24, 8, 40


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    segment = np.zeros((B, T), np.int32)
    segment[:, :9], segment[:, 9:20] = 1, 2
    batch = Batch(
        tokens=rng.integers(0, V, (B, T)).astype(np.int32),
        loss_weight=rng.integers(0, 2, (B, T)).astype(np.float32),
        positions=np.zeros((B, 1, T), np.int32),
        segment=segment,
    )
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
    return batch, hidden, head


def test_equals_torch(case):
    torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    batch, hidden, head = case
    total, weight = 0.0, 0.0
    for row in range(B):
        for t in range(T - 1):
            if batch.segment[row, t] and batch.segment[row, t] == batch.segment[row, t + 1]:
                logits = torch.tensor(np.asarray(hidden[row, t]) @ np.asarray(head))
                label = torch.tensor(int(batch.tokens[row, t + 1]))
                w = float(batch.loss_weight[row, t + 1])
                total += w * float(torch.nn.functional.cross_entropy(logits, label))
                weight += w
    sums = NextToken()(Out(hidden, head), batch)
    np.testing.assert_allclose(sums.terms["loss"], total, rtol=1e-5)
    np.testing.assert_allclose(NextToken().weights(batch)["loss"], weight)


def test_capped_logits_equal_torch(case):
    torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    _, hidden, head = case
    labels = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T)), jnp.int32)
    logits = torch.tensor(np.asarray(hidden)) @ torch.tensor(np.asarray(head))
    capped = (3.0 * torch.tanh(logits / 3.0)).flatten(0, 1)
    flat = torch.tensor(np.asarray(labels)).flatten().long()
    expected = torch.nn.functional.cross_entropy(capped, flat, reduction="none").reshape(B, T)
    nll, _ = token_scores(Out(hidden, head, logit_cap=3.0), labels, 5)
    np.testing.assert_allclose(nll, expected.numpy(), rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 5, 8, 24, 100])
def test_chunks_change_neither_loss_nor_gradient(case, chunk):
    batch, hidden, head = case

    def value(h, w, size):
        return NextToken(size)(Out(h, w, logit_cap=4.0), batch).terms["loss"]

    whole = jax.value_and_grad(value, (0, 1))(hidden, head, T)
    parts = jax.jit(jax.value_and_grad(value, (0, 1)), static_argnums=2)(hidden, head, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, parts)


@pytest.mark.parametrize(("vocabulary", "columns"), [(37, 4), (50, 16), (152, 8), (8, 1), (7, 3)])
def test_any_vocabulary_can_be_cut(vocabulary, columns):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(2, 9, D)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(D, vocabulary)), jnp.float32)
    head = head.at[:, 1].set(head[:, 0])  # of equal logits the first counts
    labels = jnp.asarray(rng.integers(0, vocabulary, (2, 9)), jnp.int32).at[0].set(0)

    def scores(h, w, size):
        nll, hit = token_scores(Out(h, w), labels, size)
        return jnp.sum(nll * nll), (nll, hit)

    run = jax.value_and_grad(scores, (0, 1), has_aux=True)
    whole, parts = run(hidden, head, vocabulary), run(hidden, head, columns)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, parts)


def test_logits_never_exist_at_once():
    big_v, big_t = 1000, 512
    hidden, head = jnp.zeros((4, big_t, D)), jnp.zeros((D, big_v))
    labels = jnp.zeros((4, big_t), jnp.int32)

    def value(h, w):
        return jnp.sum(token_scores(Out(h, w), labels, 64)[0])

    temp = jax.jit(jax.grad(value, (0, 1))).lower(hidden, head).compile().memory_analysis()
    assert temp.temp_size_in_bytes < 4 * big_t * big_v * 4 / 2


def test_targets_never_cross_a_segment_or_the_rows_end(case):
    batch, _, _ = case
    full = batch._replace(loss_weight=np.ones((B, T), np.float32))
    _, weight = targets(full)
    expected = np.zeros((B, T))
    expected[:, :8], expected[:, 9:19] = 1, 1
    np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize(
    ("vocabulary", "columns", "tile", "shards"),
    [
        (152, 24, 8, 1),
        (152, 24, 8, 4),
        (50, 16, 4, 2),
        (37, 8, 4, 1),
        (24, 5, 8, 3),
        (16, 64, 8, 2),
    ],
)
def test_chunks_of_whole_tiles_are_the_whole(vocabulary, columns, tile, shards):
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(2, 9, D)), rng.normal(size=(D, vocabulary))
    labels = jnp.asarray(rng.integers(0, vocabulary, (2, 9)), jnp.int32)
    weight = jnp.asarray(rng.normal(size=(2, 9)))
    cut = VocabularyChunks.of(vocabulary, columns, tile, shards)
    assert cut.columns % tile == 0 and cut.shards == shards
    assert cut.shards * cut.columns <= max(columns, tile * shards)
    assert cut.parts * cut.columns >= vocabulary // shards > (cut.parts - 1) * cut.columns

    def value(h, w, cut):
        if cut:
            nll, hit = chunked_scores(cut, h, w, labels, jnp.float32(4.0))
        else:
            nll, hit = token_scores(Out(h, w, logit_cap=4.0), labels, vocabulary)
        return jnp.sum(nll * weight), hit

    with jax.enable_x64():
        inputs = jnp.asarray(hidden), jnp.asarray(head)
        expected = jax.value_and_grad(value, (0, 1), has_aux=True)(*inputs, None)
        found = jax.value_and_grad(value, (0, 1), has_aux=True)(*inputs, cut)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


@pytest.mark.parametrize("vocabulary", [151936, 257216, 262208, 32064, 49280, 128256])
def test_published_vocabularies_are_padded_by_little(vocabulary):
    for shards, most in ((1, 0.015), (2, 0.02), (8, 0.04)):
        cut = VocabularyChunks.of(vocabulary, 2048, 256, shards)
        assert cut.columns % 256 == 0 and cut.shards == shards
        assert cut.parts * cut.columns * shards < (1 + most) * vocabulary


@pytest.mark.parametrize("mesh", ["tensor2", "pipeline2"])
def test_chunks_on_accelerators_are_whole_tiles_of_each_device(mesh):
    sizes = MeshConfig(data=1, **{mesh[:-1]: 2})
    for platform, tile in (("cpu", 1), ("gpu", 256), ("tpu", 256)):
        loss = make_loss(Config(loss_chunk=5), abstract_devices.mesh(sizes, platform))
        assert loss == NextToken(5, tile=tile, shards=2)


def test_a_sharded_output_matrix_is_gathered_no_more_often_than_by_jax(monkeypatch):
    mesh = jax.make_mesh((4,), ("fsdp",), (AxisType.Auto,), devices=jax.devices()[:4])

    def sent():
        shapes = {"hidden": ((16, 64, 1024), ("fsdp",)), "head": ((1024, 32000), ("fsdp",))}
        hidden, head = (
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
            for shape, spec in shapes.values()
        )
        labels = jax.ShapeDtypeStruct((16, 64), jnp.int32, sharding=hidden.sharding)

        def loss(hidden, head, labels):
            return jnp.sum(token_scores(Out(hidden, head), labels)[0])

        program = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head, labels).compile()
        return collectives.total(collectives.read(program.as_text(), dict(mesh.shape)))

    ours = sent()
    monkeypatch.setattr(next_token, "_product", jnp.matmul)
    assert 0 < ours <= sent()
