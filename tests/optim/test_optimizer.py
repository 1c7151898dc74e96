"""AdamW against torch, schedules against closed forms, masks by name."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numerics import close, rounding

from jaxvlm.config import ConfigError, OptimConfig
from jaxvlm.optim.optimizer import decayed, make_optimizer, make_schedule, split_frozen

LOGICAL = {
    "decoder/w": ("embed", "mlp"),
    "decoder/bias": ("mlp",),
    "decoder/embed/table": ("vocab", "embed"),
    "vision/position": ("position", "embed"),
    "vision/bq": ("layers", "heads", "head_dim"),
    "vision/wq": ("layers", "embed", "heads", "head_dim"),
}


def test_adamw_with_clipping_equals_torch():
    torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    config = OptimConfig(
        learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=0, schedule="constant"
    )
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 3)).astype(np.float32)
    theirs = torch.nn.Parameter(torch.tensor(w, dtype=torch.float64))
    adam = torch.optim.AdamW(
        [theirs], lr=1e-2, betas=(config.b1, config.b2), eps=config.eps, weight_decay=0.1
    )
    tx = make_optimizer(config, make_schedule(config, 10), {"w": ("embed", "mlp")})
    params = {"w": jnp.asarray(w)}
    state = tx.init(params)
    for _ in range(10):
        g = rng.normal(size=w.shape).astype(np.float32)
        theirs.grad = torch.tensor(g, dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([theirs], 0.5, error_if_nonfinite=True)
        adam.step()
        updates, state = tx.update({"w": jnp.asarray(g)}, state, params)
        params = optax.apply_updates(params, updates)
        close(params["w"], theirs, rounding(8 * 10))  # additions and products of ten updates


def test_what_is_decayed():
    found = {path for path, yes in decayed(LOGICAL, (), ()).items() if yes}
    assert found == {"decoder/w", "vision/wq"}
    asked = {p for p, yes in decayed(LOGICAL, ("decoder/embed/*",), ("vision/*",)).items() if yes}
    assert asked == {"decoder/w", "decoder/embed/table"}


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedules(kind):
    least = {} if kind == "constant" else {"min_lr_ratio": 0.1}
    config = OptimConfig(learning_rate=2.0, schedule=kind, warmup_steps=10, **least)
    schedule = make_schedule(config, 110)
    share = {
        "constant": lambda t: 1.0,
        "linear": lambda t: 1 - 0.9 * t,
        "cosine": lambda t: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t)),
    }[kind]
    for step in range(10):
        assert float(schedule(jnp.asarray(step))) == pytest.approx(2.0 * (step + 1) / 10)
    for step in (10, 35, 60, 109):
        assert float(schedule(jnp.asarray(step))) == pytest.approx(
            2 * share((step - 10) / 100), rel=1e-5
        )


def test_a_warmup_below_one_is_a_share():
    share, steps = (OptimConfig(warmup_steps=n) for n in (0.1, 11))
    at = [float(make_schedule(share, 110)(jnp.asarray(i))) for i in range(110)]
    assert at == [float(make_schedule(steps, 110)(jnp.asarray(i))) for i in range(110)]
    assert float(make_schedule(share, 1)(jnp.asarray(0))) == pytest.approx(share.learning_rate)


def test_a_warmup_that_fills_the_run_is_refused():
    with pytest.raises(ConfigError, match="warmup_steps=50 leaves none of the 20 steps"):
        make_schedule(OptimConfig(warmup_steps=50), 20)
    with pytest.raises(ConfigError, match="known: constant, linear, cosine"):
        make_schedule(dataclasses.replace(OptimConfig(), schedule="step"), 100)


def test_split_frozen():
    params = dict.fromkeys(LOGICAL, 0)
    trainable, frozen = split_frozen(params, ("vision/*",))
    assert set(frozen) == {path for path in LOGICAL if path.startswith("vision/")}
    assert set(trainable) == set(LOGICAL) - set(frozen)


@pytest.mark.parametrize("pull", [-1.0, 1.0])
@pytest.mark.parametrize("start", [0.5, 0.999, 1.0, 1.5])
def test_a_bounded_parameter_stays_within_and_can_come_back(start, pull):
    """From inside, from the bound and from beyond it (of a checkpoint), in both directions."""
    config = OptimConfig(learning_rate=0.1, weight_decay=0.0, warmup_steps=0, schedule="constant")
    tx = make_optimizer(
        config, make_schedule(config, 100), {"s": (), "free": ()}, bounds={"s": (-1.0, 1.0)}
    )
    params = {"s": jnp.float32(start), "free": jnp.float32(start)}
    state = tx.init(params)
    for _ in range(40):
        updates, state = tx.update(
            {"s": jnp.float32(pull), "free": jnp.float32(pull)}, state, params
        )
        params = optax.apply_updates(params, updates)
        assert abs(params["s"]) <= 1 + 2**-23
    np.testing.assert_allclose(params["s"], -pull, rtol=1e-6)
    assert abs(params["free"]) > 1.5
