"""The load-balancing term against transformers', and as part of the loss."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.config import Config, ConfigError
from jaxvlm.losses.next_token import NextToken
from jaxvlm.losses.registry import make_loss
from jaxvlm.losses.router import busiest, load_balance
from jaxvlm.train.grad_accum import check_microbatches, scales, total
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


def test_it_is_a_term_with_a_factor_of_the_whole_batch():
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
    with pytest.raises(ConfigError, match="not a sum over examples"):
        check_microbatches(2, held, B)


def test_a_model_without_a_router_has_no_such_loss():
    with pytest.raises(ConfigError, match="there is no router where"):
        make_loss(Config(moe_aux_loss_weight=0.1))
