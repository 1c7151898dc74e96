"""GradCache gives the whole batch's gradient, for any mini-batch size and mesh."""

from __future__ import annotations

import jax
import optax
import pytest
from builders import assert_gradients_close, devices_of
from gradcache_cases import DDP, EMBEDDINGS, FSDP, KINDS, MESHES, ZERO2, Softmax
from numerics import close
from zoo import QWEN3, ROWS

from jaxvlm.config import OptimConfig
from jaxvlm.losses.quantized_embeddings import QuantizedEmbeddings
from jaxvlm.losses.sigmoid import Sigmoid
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.gradcache import MiniBatch


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
    close(found[0], expected[0], 1e-5)
    assert_gradients_close(found[1], expected[1])
    assert abs(found[1]["head/scale"]) > 1e-4 < abs(found[1]["head/bias"])


QUICK = ("dual",)


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
        pytest.param("dual", "data8", DDP, marks=pytest.mark.exhaustive),
        pytest.param("dual", "data4", DDP, marks=pytest.mark.exhaustive),
        pytest.param("dual", "data2", ZERO2, marks=pytest.mark.long),
        pytest.param("mixed", "fsdp8", FSDP, marks=pytest.mark.long),
        pytest.param("locked", "data2_fsdp2_tensor2", FSDP, marks=pytest.mark.long),
        pytest.param("vlm", "fsdp8", FSDP, marks=pytest.mark.exhaustive),
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
