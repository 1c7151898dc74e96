"""Every strategy gives one device's loss, gradients and steps, and splits what its name says."""

from __future__ import annotations

import functools
import itertools
import os

import jax
import numpy as np
import optax
import pytest
from builders import assert_gradients_close
from zoo import KINDS, ROWS

from jaxvlm.build.model import build_model
from jaxvlm.build.training import assemble
from jaxvlm.config import MeshConfig, StrategyConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.parallel.strategies import resolve

STRATEGIES = {
    "ddp": ("ddp", MeshConfig()),
    "zero1": ("zero1", MeshConfig()),
    "zero2": ("zero2", MeshConfig()),
    "zero3": ("zero3", MeshConfig()),
    "fsdp_no_reshard": ("fsdp_no_reshard", MeshConfig()),
    "hybrid_shard": ("hybrid_shard", MeshConfig(data=2, fsdp=4)),
    "hpz": ("hpz", MeshConfig(data=2, fsdp=4)),
    "tensor": ("ddp", MeshConfig(data=-1, tensor=4)),
    "zero1 x tensor": ("zero1", MeshConfig(data=2, fsdp=2, tensor=2)),
    "fsdp x tensor": ("fsdp", MeshConfig(data=2, fsdp=2, tensor=2)),
    "context, gathered": ("ddp", MeshConfig(data=2, context=4)),
    "context, ring": ("ddp", MeshConfig(data=2, context=4), "ring"),
    "context, ulysses": ("ddp", MeshConfig(data=2, context=4), "ulysses"),
    "fsdp x context x tensor": ("fsdp", MeshConfig(1, fsdp=2, context=2, tensor=2), "ring"),
}


def recorded():
    """Keeps the last gradients in the optimizer's state, where moments lie."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jax.numpy.zeros_like, params),
        lambda grads, state, params=None: (grads, grads),
    )


@functools.cache
def first_params(kind):
    here = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    return jax.device_get(build_model(KINDS[kind].config, here).init(0))


@functools.cache
def trained(kind, strategy, frozen=False, packed=True, parts=1):
    """First loss and gradients, and the parameters after three steps."""
    config, loss, batch = KINDS[kind]
    preset, wanted, *context = STRATEGIES.get(strategy, ("single", MeshConfig()))
    asked = StrategyConfig(preset, context=context[0] if context else "gather")
    mesh, split = resolve(asked, wanted, jax.devices())
    here = make_mesh(mesh, jax.devices()[:1] if preset == "single" else jax.devices())
    model = build_model(config, here, split)
    # A large epsilon: Adam makes rounding of gradients near zero as large as a step.
    tx = optax.chain(recorded(), optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-2))
    still = ("vision/*",) if frozen else ()
    step, _, init = assemble(model, loss, tx, parts, still)
    params = {p: jax.device_put(x, model.shardings[p]) for p, x in first_params(kind).items()}
    state, losses, first = init(params), [], None
    for seed in range(3):
        state, metrics = step(state, to_global(here, batch(seed, packed), ROWS))
        losses.append(float(metrics["loss"]))
        first = first or jax.device_get(state.opt_state[0])
    return losses, first, jax.device_get(state.params), state


def assert_equal_to_one_device(kind, strategy, frozen, packed, parts):
    losses, grads, params, state = trained(kind, strategy, frozen, packed, parts)
    expected, their_grads, their_params, _ = trained(kind, "one", frozen, packed)
    assert abs(losses[0] - expected[0]) <= 1e-5 * abs(expected[0])
    assert_gradients_close(grads, their_grads)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for path, x in their_params.items():
        assert np.linalg.norm(params[path] - x) <= 1e-4 * np.linalg.norm(x) + 1e-5, path
    assert (set(state.frozen) == {p for p in state.frozen if p.startswith("vision/")}) and (
        bool(state.frozen) == frozen
    )


# Every strategy with every model, and with each of the other choices.
CHOICES = list(itertools.product((False, True), (True, False), (1, 2)))
COVER = [
    (kind, strategy, *CHOICES[(5 * i + 3 * j) % len(CHOICES)])
    for i, strategy in enumerate(STRATEGIES)
    for j, kind in enumerate(KINDS)
]
FAST = [COVER[6 * i] for i in range(len(COVER) // 6)]  # another strategy and model each
WHOLE = [(k, s, *c) for s in STRATEGIES for k in KINDS for c in CHOICES]
MATRIX = WHOLE if os.environ.get("JAXVLM_WHOLE_MATRIX") else COVER


@pytest.mark.parametrize(
    ("kind", "strategy", "frozen", "packed", "parts"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.long) for case in MATRIX],
)
def test_it_equals_one_device(kind, strategy, frozen, packed, parts):
    """``JAXVLM_WHOLE_MATRIX=1`` runs the whole product."""
    if kind == "dual":
        parts = 1  # its loss is no sum over examples
    assert_equal_to_one_device(kind, strategy, frozen, packed, parts)
