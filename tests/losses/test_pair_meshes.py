"""Losses of pairs on eight devices: one device's values and gradients, and flat memory."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import assert_gradients_close
from pair_cases import embeddings_of, gradients, mesh_of, tangled

from jaxvlm.config import ConfigError
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.matryoshka import Matryoshka
from jaxvlm.losses.quantized_embeddings import QuantizedEmbeddings
from jaxvlm.losses.ranking import CoSENT, MarginMSE
from jaxvlm.losses.sigmoid import Sigmoid
from jaxvlm.losses.softmax import DIRECTIONS
from jaxvlm.parallel.sharding import batch_sharding

B = 24
MESHES = {
    "data8": {"data": 8},
    "data2_fsdp4": {"data": 2, "fsdp": 4},
    "data2_expert2_tensor2": {"data": 2, "expert": 2, "tensor": 2},
}
LOSSES = {
    "infonce": lambda mesh: InfoNCE(
        0.0,
        directions=DIRECTIONS,
        false_negative_filter="absolute",
        margin=0.1,
        tile_size=2,
        mesh=mesh,
    ),
    "sigmoid": lambda mesh: Sigmoid(tile_size=2, mesh=mesh),
    "symmetric": lambda mesh: InfoNCE(
        0.0, directions=DIRECTIONS[:2], softmax_scope="each", mesh=mesh
    ),
    "cosent": lambda mesh: CoSENT(),
    "margin": lambda mesh: MarginMSE(),
    "matryoshka": lambda mesh: Matryoshka(Sigmoid(mesh=mesh), (8, 3)),
    "own": lambda mesh: InfoNCE(0.0, negatives_from="own"),
    "quantized": lambda mesh: QuantizedEmbeddings(
        InfoNCE(0.0, tile_size=2, mesh=mesh), ("float32", "int8", "binary")
    ),
}
FAST = [("infonce", "data2_fsdp4"), ("sigmoid", "data8")]
CASES = [
    pytest.param(loss, mesh, marks=() if (loss, mesh) in FAST else pytest.mark.long)
    for loss in LOSSES
    for mesh in MESHES
]


def inputs(tokens=()):
    teacher = np.random.default_rng(5).uniform(size=(B, 3)).astype(np.float32)
    pairs = tangled(B)._replace(teacher=teacher)
    return embeddings_of(B, tokens=tokens, learned=True), pairs


def agree(loss, kind, embeddings, pairs):
    mesh = mesh_of(**MESHES[kind])
    wanted, expected, wanted_sums = gradients(loss(None), embeddings, pairs)
    value, grads, sums = gradients(loss(mesh), embeddings, pairs, mesh)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert_gradients_close(grads, expected)
    for a, b in zip(jax.tree.leaves(sums), jax.tree.leaves(wanted_sums), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("loss", "kind"), CASES)
def test_eight_devices_give_what_one_gives(loss, kind):
    agree(LOSSES[loss], kind, *inputs())


@pytest.mark.long
@pytest.mark.parametrize("loss", ["sigmoid", "late"])
def test_so_do_they_of_an_embedding_a_token(loss):
    made = {
        "sigmoid": LOSSES["sigmoid"],
        "late": lambda mesh: InfoNCE(0.5, directions=DIRECTIONS[:2], tile_size=2, mesh=mesh),
    }
    agree(made[loss], "data2_fsdp4", *inputs((3, 4)))


@pytest.mark.long
def test_negatives_of_a_devices_own_shard():
    """The mean of what each device would have alone, with the relation of all examples."""
    embeddings, pairs = embeddings_of(B), tangled(B)._replace(group=None)
    unique = np.arange(B * 3, dtype=np.int32).reshape(B, 3)
    pairs = pairs._replace(document_key=unique, query_key=unique[:, 0])
    mesh = mesh_of(data=8)
    made = gradients(InfoNCE(negatives_from="shard", mesh=mesh), embeddings, pairs, mesh)
    loss, parts = InfoNCE(), []

    def alone(query, document):
        def one(x):
            q, d, there, keys = x
            part = pairs._replace(valid=there, document_key=keys, query_key=keys[:, 0])
            return loss(embeddings._replace(query=q, document=d), part).terms["loss"]

        cut = [
            jnp.reshape(x, (8, B // 8, *x.shape[1:]))
            for x in (query, document, pairs.valid, unique)
        ]
        return sum(one([x[i] for x in cut]) for i in range(8)) / loss.weights(pairs)["loss"]

    wanted, parts = jax.jit(jax.value_and_grad(alone, (0, 1)))(*embeddings[:2])
    np.testing.assert_allclose(made[0], wanted, rtol=1e-5)
    assert_gradients_close(made[1], dict(zip(("query", "document"), parts)))


def test_a_batch_that_the_devices_do_not_divide():
    with pytest.raises(ConfigError, match="10 examples can't be split over the 8 shards"):
        gradients(InfoNCE(mesh=mesh_of(data=8)), embeddings_of(10), tangled(10))


def compiled(loss, b, mesh, e, tokens=()):
    """The loss and its gradients for ``b`` examples, which need not exist."""
    small, pairs = embeddings_of(8, e=e, tokens=tokens, learned=True), tangled(8)

    def value(query, document, embeddings, pairs):
        return loss(embeddings._replace(query=query, document=document), pairs).terms["loss"]

    def wide(x):
        split = mesh and batch_sharding(mesh)
        shape = (b, *x.shape[1:]) if x.ndim else ()
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=split if x.ndim else None)

    embeddings, pairs = jax.tree.map(wide, jax.tree.map(jnp.asarray, (small, pairs)))
    return (
        jax.jit(jax.value_and_grad(value, (0, 1)))
        .lower(*embeddings[:2], embeddings, pairs)
        .compile()
    )


WIDE = {
    "infonce": (
        lambda mesh: InfoNCE(
            directions=DIRECTIONS, false_negative_filter="absolute", tile_size=64, mesh=mesh
        ),
        (),
    ),
    "sigmoid": (lambda mesh: Sigmoid(tile_size=64, mesh=mesh), ()),
    "late": (lambda mesh: InfoNCE(directions=DIRECTIONS[:2], tile_size=8, mesh=mesh), (4, 6)),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("kind", WIDE)
def test_memory_grows_with_embeddings_and_never_with_pairs(kind, devices):
    (make, tokens), e, few, many = WIDE[kind], 64, 256, 4096
    mesh = mesh_of(data=2, fsdp=4) if devices == 8 else None
    used = [
        compiled(make(mesh), b, mesh, e, tokens).memory_analysis().temp_size_in_bytes
        for b in (few, many)
    ]
    of_embeddings = 4 * e * (1 + 3 if not tokens else tokens[0] + 3 * tokens[1])
    more = (used[1] - used[0]) / (many - few) * devices
    assert more < 9 * of_embeddings, (used, more / of_embeddings)
    pairs = many * many * 3 * 4 * (tokens[0] * tokens[1] if tokens else 1)
    assert used[1] < pairs / devices / 5, (used, pairs)


def test_no_device_is_sent_all_documents():
    mesh, e = mesh_of(data=2, fsdp=4), 64
    text = compiled(Sigmoid(tile_size=64, mesh=mesh), 512, mesh, e).as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    sent = [line for line in text.splitlines() if re.search(rf" ({kinds})(-start)?\(", line)]
    alone = "replica_groups={{0},{1}"  # groups of one device: nothing is sent
    rows = [x for x in sent if re.search(rf"f32\[[\d,]*\b{e}\]", x) and alone not in x]
    assert rows and all("collective-permute" in x for x in rows), rows
    assert any(" all-gather" in x and "s32[512]" in x for x in sent)  # keys alone are everywhere
