"""Losses of pairs through a pipeline's stages give one device's loss and gradients."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from builders import TINY, assert_gradients_close, devices_of, recorded, stepped_from
from gradcache_cases import EMBEDDINGS, pairs_of, texts
from numerics import close
from zoo import ROWS, on_stages, text_and_images

from jaxvlm.config import LoraConfig, MeshConfig, StrategyConfig
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.matryoshka import Matryoshka
from jaxvlm.losses.sigmoid import Sigmoid
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.runners import runner_of
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.types import Out

LORA = LoraConfig(rank=2, targets=("decoder/stack/*",))
DDP = {"params": (), "all_gathered": (), "gradients": (), "optimizer": ()}
LOSSES = {
    "info_nce": lambda mesh: InfoNCE(temperature=0.0, tile_size=8, mesh=mesh),
    "sigmoid": lambda mesh: Sigmoid(tile_size=8, mesh=mesh),
    "matryoshka": lambda mesh: Matryoshka(Sigmoid(tile_size=8, mesh=mesh), (8, 24), (0.5, 1.0)),
}
SMALL = dataclasses.replace(TINY, decoder=dataclasses.replace(TINY.decoder, depth=4))
WIDE = dataclasses.replace(SMALL.decoder, width=256, mlp_dim=1024, depth=8)
KINDS = {
    "wide": (dataclasses.replace(SMALL, decoder=WIDE), ()),
    "full": (SMALL, ()),
    "locked": (SMALL, ("vision/*",)),
    "lora": (dataclasses.replace(SMALL, lora=LORA), ()),
}
FIRST: dict[str, dict] = {}


def small_pairs():
    """A text finds an image with text."""
    one, two = (text_and_images(SMALL, seed, packed=False) for seed in (2, 3))
    document = jax.tree.map(lambda a, b: np.concatenate([a, b]), one, two)
    return pairs_of(texts(np.random.default_rng(4), ROWS), document)


def stepper(kind, loss, mesh, mini_batches, strategy=()):
    config, frozen = KINDS[kind]
    here = make_mesh(mesh, devices_of(mesh))
    model = build_model(
        on_stages(config), here, StrategyConfig(**dict(strategy)), embeddings=EMBEDDINGS
    )
    tx = optax.chain(recorded(), optax.sgd(1e-2))
    cut = tuple(MiniBatch(rows) for rows in mini_batches)
    step, abstract, init = assemble(model, LOSSES[loss](here), tx, frozen=frozen, mini_batches=cut)
    return step, abstract, init, model


def stepped(kind, loss, mesh, mini_batches=(0, 0), strategy=()):
    """(loss, gradients, trainable parameters before) of a step."""
    step, _, init, model = stepper(kind, loss, mesh, mini_batches, strategy)
    params = stepped_from(FIRST.setdefault(kind, {}), model)
    state = init({path: jax.device_put(x, model.shardings[path]) for path, x in params.items()})
    state, metrics = step(state, to_global(model.mesh, small_pairs(), ROWS))
    for path, x in jax.device_get(state.frozen).items():
        assert np.array_equal(x, params[path]), path
    return float(metrics["loss"]), jax.device_get(state.opt_state[0])


@pytest.fixture(scope="module")
def one():
    seen = {}

    def of(kind, loss):
        if (kind, loss) not in seen:
            seen[kind, loss] = stepped(kind, loss, MeshConfig(1))
        return seen[kind, loss]

    return of


STAGE2 = MeshConfig(1, pipeline=2)


def test_embeddings_and_gradients_go_through_stages():
    """Of one side, for any cotangents."""
    found, rng = {}, np.random.default_rng(5)
    document = jax.tree.map(lambda x: x[:, 0], small_pairs().document)
    d_out = Out(
        hidden=rng.normal(size=(ROWS, EMBEDDINGS.dim)).astype(np.float32),
        scale=np.float32(0.3),
        bias=np.float32(-0.7),
    )
    for mesh, parts in ((MeshConfig(1), 1), (STAGE2, 4)):
        here = make_mesh(mesh, devices_of(mesh))
        model = build_model(on_stages(SMALL), here, embeddings=EMBEDDINGS)
        runner = runner_of(model, parts, embeddings=True)

        def run(params, batch, d, runner=runner):
            return runner.fwd(params, {}, batch), runner.vjp(params, {}, batch, d)

        params = stepped_from(FIRST.setdefault("full", {}), model)
        params = {path: jax.device_put(x, model.shardings[path]) for path, x in params.items()}
        found[parts] = jax.device_get(jax.jit(run)(params, to_global(here, document, ROWS), d_out))
    np.testing.assert_allclose(found[4][0].hidden, found[1][0].hidden, atol=1e-5)
    assert found[4][0].scale == found[1][0].scale and found[4][0].bias == found[1][0].bias
    assert_gradients_close(found[4][1], found[1][1])
    assert found[4][1]["head/scale"] == pytest.approx(0.3)
    assert found[4][1]["head/bias"] == pytest.approx(-0.7)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, loss, mesh, mini_batches, strategy",
    [
        ("full", "info_nce", MeshConfig(2, pipeline=2), (3, 5), {**DDP, "schedule": "gpipe"}),
        (
            "locked",
            "matryoshka",
            MeshConfig(1, pipeline=2, tensor=2),
            (0, 6),
            {"schedule": "zero_bubble"},
        ),
        ("lora", "sigmoid", STAGE2, (1, 7), {"schedule": "interleaved", "virtual_stages": 2}),
    ],
)
def test_stages_give_one_devices_gradient(kind, loss, mesh, mini_batches, strategy, one):
    found, expected = stepped(kind, loss, mesh, mini_batches, strategy), one(kind, loss)
    close(found[0], expected[0], 1e-5)
    assert_gradients_close(found[1], expected[1])
    assert kind == "lora" or found[1]["head/scale"]
    assert loss == "info_nce" or kind == "lora" or found[1]["head/bias"]


@pytest.mark.long
def test_a_stage_holds_its_layers_alone():
    """Gradients, their sums and moments of a quarter of the layers; there alone, no activations."""
    used, rows = {}, small_pairs()
    for stages in (1, 4):
        step, abstract, _, model = stepper(
            "wide", "sigmoid", MeshConfig(1, pipeline=stages), (2, 2)
        )
        batch = to_global(model.mesh, rows, ROWS)
        used[stages] = step.lower(abstract, batch).compile().memory_analysis()
    assert used[4].argument_size_in_bytes < 0.3 * used[1].argument_size_in_bytes
    assert used[4].temp_size_in_bytes < 0.5 * used[1].temp_size_in_bytes

    def there(times):
        runner = runner_of(model, 8 * times, embeddings=True)
        query = jax.tree.map(lambda x: np.concatenate([x] * times), rows.query)
        made = jax.jit(lambda params, batch: runner.fwd(params, {}, batch).hidden)
        batch = to_global(model.mesh, query, ROWS * times)
        return made.lower(abstract.params, batch).compile().memory_analysis().temp_size_in_bytes

    assert there(3) <= 1.1 * there(1)
