"""The load-balancing term against transformers', and as part of the loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import ROWS, TINY, assert_gradients_close, devices_of, random_batch, recorded
from zoo import on_stages

from jaxvlm.config import Config, ConfigError, MeshConfig
from jaxvlm.losses.next_token import NextToken, targets
from jaxvlm.losses.registry import make_loss
from jaxvlm.losses.router import busiest, load_balance
from jaxvlm.optim.optimizer import split_frozen
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.grad_accum import check_local_gradients, check_microbatches, scales, total
from jaxvlm.types import Batch, Out

L, B, T, E, TOP = 3, 2, 5, 6, 2


def aux_of(logits, real):
    """What a router of softmax and top-k counts: f32[L, E] each."""
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-probability, axis=-1)[..., :TOP]
    votes = (chosen[..., None] == np.arange(E)).sum(-2)
    return {
        "router_load": (votes * real[..., None]).sum((1, 2)).astype(np.float32),
        "router_probability": (probability * real[..., None]).sum((1, 2)).astype(np.float32),
    }


def test_the_balance_is_transformers():
    torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    logits = np.random.default_rng(0).normal(size=(L, B, T, E))
    real = np.asarray([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    expected = modeling.load_balancing_loss_func(
        tuple(torch.tensor(layer.reshape(-1, E)) for layer in logits), E, TOP, torch.tensor(real)
    )
    np.testing.assert_allclose(load_balance(aux_of(logits, real)), expected.item(), rtol=1e-5)


def test_even_loads_are_the_least():
    even = {k: jnp.full((L, E), v) for k, v in (("router_load", 4), ("router_probability", 2))}
    np.testing.assert_allclose([load_balance(even), busiest(even)], [TOP, 1], rtol=1e-6)
    one = {k: x.at[:, 0].mul(3).at[:, 1:3].set(0) for k, x in even.items()}
    assert load_balance(one) > TOP
    np.testing.assert_allclose(busiest(one), 3, rtol=1e-6)


def test_it_is_a_term_with_a_factor_of_its_own():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 9, (B, T)).astype(np.int32)
    ones = np.ones((B, T), np.int32)
    batch = Batch(tokens, ones.astype(np.float32), np.zeros((B, 1, T), np.int32), ones)
    hidden, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((B, T, 4), (4, 9)))
    out = Out(hidden, head, aux=aux_of(rng.normal(size=(L, B, T, E)), ones))
    plain, held = NextToken(), NextToken(moe_aux_weight=0.25)
    values = [total(loss(out, batch), scales(loss, batch)) for loss in (plain, held)]
    np.testing.assert_allclose(values[1] - values[0], 0.25 * load_balance(out.aux), rtol=1e-4)
    assert "busiest_expert" in plain(out, batch).metrics


EXPERTS = dataclasses.replace(
    TINY, decoder=dataclasses.replace(TINY.decoder, num_experts=4, experts_per_token=2)
)
WEIGHT, STILL = 5.0, ("vision/*", "connector/*")


def texts():
    """Rows of texts alone; every other row is short, so that microbatches differ in tokens."""
    batch = random_batch()._replace(pixels=None, image_start=None)
    short = (np.arange(ROWS) % 2 > 0)[:, None] & (batch.segment > 2)
    return batch._replace(segment=np.where(short, 0, batch.segment))


@functools.cache
def one_by_one():
    """Loss, balance and gradient of two microbatches, each run by itself on one device."""
    model = build_model(EXPERTS, make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1]))
    params, frozen = split_frozen(model.init(0), STILL)
    batch = texts()

    def objective(params, rows, of_loss, of_balance):
        out = model.apply({**params, **frozen}, rows)
        balance = load_balance(out.aux)
        return of_loss * NextToken()(out, rows).terms["loss"] + of_balance * balance, balance

    run = jax.jit(jax.value_and_grad(objective, has_aux=True))
    parts = [jax.tree.map(lambda x, first=first: x[first::2], batch) for first in range(2)]
    tokens = np.asarray([np.sum(part.segment > 0) for part in parts])
    shares = tokens / np.sum(tokens)
    assert shares.max() > 0.6
    of_loss = 1 / targets(batch)[1].sum()
    values, grads = zip(
        *(run(params, part, of_loss, WEIGHT * share) for part, share in zip(parts, shares))
    )
    balance = shares @ [float(balance) for _, balance in values]
    return sum(value for value, _ in values), balance, jax.tree.map(jnp.add, *grads)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(4), id="accumulated", marks=pytest.mark.long),
        pytest.param(MeshConfig(4, pipeline=2), id="pipeline"),
    ],
)
def test_each_microbatch_is_balanced_by_itself(mesh):
    """With four data shards of two rows, the first rows are a microbatch, the second the other."""
    value, balance, expected = one_by_one()
    place = make_mesh(mesh, devices_of(mesh))
    model = build_model(on_stages(EXPERTS), place)
    step, _, init = assemble(model, NextToken(moe_aux_weight=WEIGHT), recorded(), 2, STILL)
    state, metrics = step(init(model.init(0)), to_global(place, texts(), ROWS))
    np.testing.assert_allclose(metrics["loss/router"], WEIGHT * balance, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert_gradients_close(jax.device_get(state.opt_state), jax.device_get(expected))


def test_a_device_is_not_balanced_by_itself():
    with pytest.raises(ConfigError, match=r"grad_reduce_dtype='int8': NextToken is not a sum"):
        check_local_gradients("int8", NextToken(moe_aux_weight=0.1))
    check_microbatches(2, NextToken(moe_aux_weight=0.1), B)
    with pytest.raises(ConfigError, match="not a sum over examples"):
        check_microbatches(2, dataclasses.replace(NextToken(), additive=False), B)


def test_a_model_without_a_router_has_no_such_loss():
    with pytest.raises(ConfigError, match="there is no router where"):
        make_loss(Config(moe_aux_loss_weight=0.1))
