"""The step: microbatches, freezing, skipped updates, learning rates."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import (
    MESHES,
    ROWS,
    TINY,
    assert_gradients_close,
    devices_of,
    random_batch,
    train_config,
)

from jaxvlm.config import ConfigError
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.train.grad_accum import GradAccumulation, PlainRunner, check_microbatches, scales
from jaxvlm.train.step import init_state, make_step
from jaxvlm.trainer.training import build_training

MESH = MESHES["one"]


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MESH, devices_of(MESH))


@pytest.fixture(scope="module")
def model(mesh):
    return build_model(TINY, mesh)


@pytest.fixture(scope="module")
def params(model):
    return jax.device_get(model.init(0))


def made(model, config):
    return build_training(config, model, config.steps, lambda line: None)


def backward_names(program):
    """Names of the compiled operations that automatic differentiation transposed."""
    return re.findall(r'op_name="([^"]*transpose\(jvp[^"]*)"', program.as_text())


def on_device():
    return jax.tree.map(jnp.asarray, random_batch())


def run(training, model, params, batches):
    state = training.init({k: jnp.array(v) for k, v in params.items()})
    for batch in batches:
        batch = to_global(model.mesh, batch, ROWS)
        state, metrics = training.step.get(state, batch)(state, batch)
    return state, metrics


def loss_grad(runner):
    """``params -> (sums, gradients)`` of one batch."""
    batch, loss = on_device(), NextToken()
    return lambda params: runner.loss_grad(params, {}, batch, loss, scales(loss, batch))


@pytest.fixture(scope="module")
def whole(model, params):
    return jax.jit(loss_grad(PlainRunner(model.apply)))(params)


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.long), 4])
def test_microbatches_give_the_whole_batchs_gradient(model, params, whole, parts):
    runner = GradAccumulation(PlainRunner(model.apply), parts)
    sums, grads = jax.jit(loss_grad(runner))(params)
    np.testing.assert_allclose(sums.terms["loss"], whole[0].terms["loss"], rtol=1e-6)
    assert_gradients_close(grads, whole[1])


def test_a_loss_that_is_no_sum_refuses_microbatches(model, params):
    loss = dataclasses.replace(NextToken(), additive=False)
    batch = on_device()
    with pytest.raises(ConfigError, match="not a sum over examples"):
        GradAccumulation(PlainRunner(model.apply), 2).loss_grad(params, {}, batch, loss, {})


def test_a_loss_that_is_no_sum_runs_undivided():
    check_microbatches(1, dataclasses.replace(NextToken(), additive=False), 8)


@dataclasses.dataclass(frozen=True)
class _TwoTerms(NextToken):
    """Cross-entropy, and a second term with another coefficient and denominator."""

    def coefficients(self):
        return {"loss": 1.0, "size": 0.1}

    def weights(self, batch):
        return super().weights(batch) | {"size": jnp.float32(2.0)}

    def __call__(self, out, batch):
        sums = super().__call__(out, batch)
        size = jnp.sum(jnp.square(out.hidden.astype(jnp.float32)))
        return sums._replace(terms=sums.terms | {"size": size})


def test_terms_are_reported_as_they_add_up(model, params):
    tx = optax.sgd(0.0)
    step = make_step(PlainRunner(model.apply), _TwoTerms(), tx)
    state = init_state(params, {}, tx)
    _, metrics = jax.jit(step)(state, on_device())
    assert metrics["loss/size"] > 0
    np.testing.assert_allclose(metrics["loss/loss"] + metrics["loss/size"], metrics["loss"], 1e-6)


def test_microbatches_that_do_not_divide_are_refused(model, params):
    with pytest.raises(ConfigError, match=r"microbatches=3 does not divide data\.batch_size=8"):
        runner = GradAccumulation(PlainRunner(model.apply), 3)
        runner.loss_grad(params, {}, on_device(), NextToken(), {})


def test_a_frozen_vision_encoder_keeps_its_bits_and_costs_nothing(model, params):
    config = train_config(frozen=("vision/*",), weight_decay=0.1)
    training = made(model, config)
    state, _ = run(training, model, params, [random_batch(seed) for seed in range(20)])
    for path, before in params.items():
        if path.startswith("vision/"):
            np.testing.assert_array_equal(np.asarray(state.frozen[path]), before, err_msg=path)
        else:
            assert np.any(np.asarray(state.params[path]) != before), path
    paths = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)
    ]
    assert any("decoder/" in path for path in paths)
    assert not any("vision/" in path for path in paths)
    # The compiled program differentiates the connector and the decoder, never the tower.
    (program,) = training.step.compiled.values()
    back = backward_names(program)
    assert any("decoder" in name for name in back)
    assert not [name for name in back if "vision" in name]


@pytest.fixture(scope="module")
def training(model):
    return made(model, train_config())


def test_the_frozen_check_can_fail(model, training):
    batch = to_global(model.mesh, random_batch(), ROWS)
    back = backward_names(training.step.get(training.abstract, batch))
    assert any("vision" in name for name in back)


def test_a_skipped_update_changes_nothing_but_the_counts(model, params, training):
    good = random_batch()
    state, _ = run(training, model, params, [good])
    before = jax.device_get(state)
    poison = dict(before.params)
    poison["decoder/norm/scale"] = np.full_like(poison["decoder/norm/scale"], np.inf)
    broken = jax.device_put(before._replace(params=poison))
    batch = to_global(model.mesh, good, ROWS)
    after, metrics = training.step.get(broken, batch)(broken, batch)
    assert int(after.guard.skipped) == int(after.guard.in_a_row) == 1
    assert int(after.step) == 2
    assert int(metrics["bad_leaf"]) >= 0 or not np.isfinite(float(metrics["loss"]))
    for path, value in poison.items():
        np.testing.assert_array_equal(np.asarray(after.params[path]), value)
    for a, b in zip(jax.tree.leaves(after.opt_state), jax.tree.leaves(before.opt_state)):
        np.testing.assert_array_equal(np.asarray(a), b)


@pytest.mark.long
def test_learning_rate_scale_is_exact(model, params):
    half = train_config(lr_multipliers=(("vision/*", 0.5),), weight_decay=0.1)
    full = train_config(weight_decay=0.1)
    a, _ = run(made(model, half), model, params, [random_batch()])
    b, _ = run(made(model, full), model, params, [random_batch()])
    for path, before in params.items():
        factor = 0.5 if path.startswith("vision/") else 1.0
        moved, whole = np.asarray(a.params[path]) - before, np.asarray(b.params[path]) - before
        np.testing.assert_allclose(moved, factor * whole, rtol=1e-3, atol=1e-6, err_msg=path)


def test_layers_that_are_not_run_are_not_decayed(mesh):
    vision = dataclasses.replace(TINY.vision, feature_layer=-2, pool="attention")
    model = build_model(dataclasses.replace(TINY, vision=vision), mesh)
    config = train_config(weight_decay=0.1)
    config = dataclasses.replace(config, model=model.config)
    before = jax.device_get(model.init(0))
    state, _ = run(made(model, config), model, before, [random_batch()])
    path = "vision/stack/blocks/mlp/w_in"
    after = np.asarray(state.params[path])
    np.testing.assert_array_equal(after[1], before[path][1])
    assert np.any(after[0] != before[path][0])
    path = "vision/head/mlp/w_in"  # it makes no visual tokens
    np.testing.assert_array_equal(state.params[path], before[path])


@pytest.mark.parametrize("field", ["frozen", "decay", "no_decay"])
def test_a_pattern_that_matches_nothing_is_refused(model, field):
    with pytest.raises(ConfigError, match=rf"optim\.{field}: no parameter matches 'visoin/\*'"):
        made(model, train_config(**{field: ("visoin/*",)}))


def test_freezing_everything_is_refused(model):
    with pytest.raises(ConfigError, match="freezes every parameter"):
        made(model, train_config(frozen=("*",)))


@pytest.mark.parametrize("remat", ["dots", "full", "offload"])
def test_remat_changes_no_gradient_and_applies_to_both_towers(params, whole, remat, mesh):
    vision = dataclasses.replace(TINY.vision, remat=remat)
    decoder = dataclasses.replace(TINY.decoder, remat=remat)
    other = build_model(dataclasses.replace(TINY, vision=vision, decoder=decoder), mesh)
    again = jax.jit(loss_grad(PlainRunner(other.apply)))
    assert_gradients_close(again(params)[1], whole[1])
    text = str(again.trace(params).jaxpr)
    assert text.count("remat") >= 2, "one in each tower's scan"
    towers = {x: dataclasses.replace(getattr(TINY, x), remat="none") for x in ("vision", "decoder")}
    none = build_model(dataclasses.replace(TINY, **towers), mesh)
    assert "remat" not in str(jax.make_jaxpr(loss_grad(PlainRunner(none.apply)))(params))
    if remat == "offload":
        assert "<host>" in text or "pinned_host" in text
