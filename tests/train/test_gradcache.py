"""GradCache gives the whole batch's gradient, for any mini-batch size and mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import VOCAB, assert_gradients_close, devices_of
from zoo import DUAL, QWEN3, ROWS, text_and_images

from jaxvlm.config import EmbeddingConfig, MeshConfig, OptimConfig, StrategyConfig
from jaxvlm.losses.quantized_embeddings import QuantizedEmbeddings
from jaxvlm.losses.sigmoid import Sigmoid
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.types import Batch, Embeddings, Pairs, Sums

K = 2
MESHES = {
    "one": MeshConfig(1),
    "data2": MeshConfig(2),
    "data4": MeshConfig(4),
    "data8": MeshConfig(8),
    "fsdp8": MeshConfig(1, 8),
    "data2_fsdp2_tensor2": MeshConfig(2, 2, 2),
    "data2_context2_tensor2": MeshConfig(data=2, context=2, tensor=2),
}
FSDP = StrategyConfig()
ZERO2 = StrategyConfig(params=(), all_gathered=(), gradients=("data",), optimizer=("data",))
DDP = StrategyConfig(params=(), all_gathered=(), gradients=(), optimizer=())
EMBEDDINGS = EmbeddingConfig(dim=24, learn_scale=True, learn_bias=True, bias=-1.0)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Each query against all documents; its positive is its first.

    The bias moves all but positives, each by its place. So the terms of the bias's gradient,
    probability times place, have one sign and its rounding is that of a term. Were positives moved
    too, terms of up to 30 would cancel to 0.15, and rounding alone would be 1e-5 of that.
    """

    additive: bool = False

    def coefficients(self):
        return {"loss": 1.0}

    def weights(self, batch: Pairs):
        return {"loss": jnp.float32(batch.valid.shape[0])}

    def __call__(self, out: Embeddings, batch: Pairs) -> Sums:
        documents = out.document.reshape(-1, out.document.shape[-1])
        place = jnp.arange(len(documents))
        place = jnp.where(place % batch.valid.shape[1] == 0, 0, place)
        logits = jnp.exp(out.scale) * out.query @ documents.T + out.bias * place
        logits = jnp.where(batch.valid.reshape(-1), logits, -1e9)
        own = jnp.arange(len(logits)) * batch.valid.shape[1]
        return Sums({"loss": -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(len(own)), own])}, {})


def texts(rng, rows, length=12):
    real = np.arange(length) < rng.integers(3, length + 1, (rows, 1))
    return Batch(
        tokens=rng.integers(0, VOCAB, real.shape).astype(np.int32),
        loss_weight=np.zeros(real.shape, np.float32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), (rows, 1, length)).copy(),
        segment=real.astype(np.int32),
    )


def images(rng, rows):
    empty = texts(rng, rows, 4)
    empty = Batch(*(x if x is None else x[..., :0] for x in empty))
    pixels = rng.integers(0, 256, (rows, 1, 16, 16, 3)).astype(np.uint8)
    return empty._replace(pixels=pixels, image_start=np.zeros((rows, 1), np.int32))


def both(rng, rows):
    """Text, an image, or both, by turns; and a row of nothing."""
    which = np.arange(rows) % 4
    made = texts(rng, rows)
    start = np.where(which == 0, -1, 0).astype(np.int32)[:, None]
    segment = np.where((which == 1)[:, None], 0, made.segment).astype(np.int32)
    start[rows - 1], segment[rows - 1] = -1, 0
    pixels = images(rng, rows).pixels
    return made._replace(segment=segment, pixels=pixels, image_start=start)


def documents(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x.reshape(ROWS, K, *x.shape[1:]), batch)


def pairs_of(query, document) -> Pairs:
    there = np.ones((ROWS, K), bool)
    there[1, 1] = there[5, 1] = False
    key = np.arange(ROWS * K, dtype=np.int32).reshape(ROWS, K)
    return Pairs(query, documents(document), there, key[:, 0], key)


def dual_pairs() -> Pairs:
    rng = np.random.default_rng(0)
    return pairs_of(images(rng, ROWS), texts(rng, ROWS * K))


def mixed_pairs() -> Pairs:
    rng = np.random.default_rng(1)
    return pairs_of(texts(rng, ROWS, 8), both(rng, ROWS * K))


def vlm_pairs() -> Pairs:
    one, two = (text_and_images(QWEN3, seed, packed=False) for seed in (2, 3))
    document = jax.tree.map(lambda a, b: np.stack([a, b], axis=1), one, two)
    query = text_and_images(QWEN3, 4, packed=False)
    return pairs_of(query, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), document))


KINDS: dict[str, Any] = {
    "dual": (DUAL, dual_pairs, ()),
    "mixed": (DUAL, mixed_pairs, ()),
    "locked": (DUAL, dual_pairs, ("vision/*",)),
    "locked whole": (
        dataclasses.replace(DUAL, project=("text",), embed_dim=32),
        dual_pairs,
        ("vision/*",),
    ),
    "vlm": (QWEN3, vlm_pairs, ()),
    "vlm, tower frozen": (QWEN3, vlm_pairs, ("vision/*",)),
}


def step_of(
    kind, mesh="one", mini_batches=(0, 0), strategy=FSDP, tokens=0, loss_on=lambda mesh: Softmax()
):
    """(loss, tenths of gradients) of a step."""
    config, make, frozen = KINDS[kind]
    where = MESHES[mesh]
    embeddings = None if config is not QWEN3 else EMBEDDINGS
    model = build_model(
        config, make_mesh(where, devices_of(where)), strategy, embeddings=embeddings
    )
    tx = make_optimizer(
        OptimConfig(max_grad_norm=0.0),
        lambda step: 1e-2,
        {p: model.logical[p] for p in model.shapes},
    )
    cut = tuple(MiniBatch(rows, tokens) for rows in mini_batches)
    step, _, init = assemble(model, loss_on(model.mesh), tx, frozen=frozen, mini_batches=cut)
    state, metrics = step(init(model.init(0)), to_global(model.mesh, make(), ROWS))
    return float(metrics["loss"]), jax.device_get(optax.tree.get(state.opt_state, "mu"))


@pytest.fixture(scope="module")
def whole():
    seen = {}

    def of(kind):
        if kind not in seen:
            seen[kind] = step_of(kind)
        return seen[kind]

    return of


def same(found, expected):
    assert abs(found[0] - expected[0]) <= 1e-5 * abs(expected[0])
    assert_gradients_close(found[1], expected[1])
    assert abs(found[1]["head/scale"]) > 1e-4 < abs(found[1]["head/bias"])


QUICK = ("dual", "locked whole")


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.long) for k in KINDS]
)
def test_a_mini_batch_at_a_time_gives_the_whole_batchs_gradient(kind, whole):
    same(step_of(kind, mini_batches=(3, 5)), whole(kind))


@pytest.mark.long
@pytest.mark.parametrize("mini_batches", [(1, 1), (0, 7), (16, 32)])
def test_any_mini_batch_does(mini_batches, whole):
    same(step_of("dual", mini_batches=mini_batches), whole("dual"))


@pytest.mark.long
def test_a_mini_batch_may_be_so_many_tokens(whole):
    same(step_of("mixed", tokens=30), whole("mixed"))


def test_mini_batches_are_of_one_size():
    assert MiniBatch(5).parts(12, 16) == 4 and MiniBatch(5).parts(12, 16, group=3) == 6
    assert MiniBatch().parts(12, 16) == MiniBatch(99).parts(12, 16) == 1
    assert MiniBatch(tokens=30).parts(12, 99) == 50 and MiniBatch(tokens=3).parts(12, 99) == 99
    assert MiniBatch(4, 30).parts(12, 99) == 50 and MiniBatch(1, 30).parts(12, 99) == 99


@pytest.mark.parametrize(
    "kind, mesh, strategy",
    [
        pytest.param("dual", "data8", DDP, marks=pytest.mark.long),
        pytest.param("dual", "data4", DDP, marks=pytest.mark.long),
        pytest.param("dual", "data2", ZERO2, marks=pytest.mark.long),
        pytest.param("mixed", "fsdp8", FSDP, marks=pytest.mark.long),
        pytest.param("locked", "data2_fsdp2_tensor2", FSDP, marks=pytest.mark.long),
        pytest.param("vlm", "fsdp8", FSDP, marks=pytest.mark.long),
        pytest.param("vlm", "data2_context2_tensor2", FSDP, marks=pytest.mark.long),
        pytest.param("vlm, tower frozen", "data4", ZERO2, marks=pytest.mark.long),
    ],
)
def test_any_mesh_gives_one_devices_gradient(kind, mesh, strategy, whole):
    same(step_of(kind, mesh, (1, 3), strategy), whole(kind))


@pytest.mark.long
def test_so_do_embeddings_in_fewer_bits():
    """Ranges are of the whole batch's documents, wherever they lie."""

    def loss_on(mesh):
        return QuantizedEmbeddings(Sigmoid(tile_size=2, mesh=mesh), ("int8", "binary"))

    same(step_of("dual", "fsdp8", (1, 3), loss_on=loss_on), step_of("dual", loss_on=loss_on))
