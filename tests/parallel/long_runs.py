"""Runs of 300 steps that show the effect of quantized gradient reduction."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
from zoo import KINDS, ROWS

from jaxvlm.config import MeshConfig, StrategyConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.parallel.strategies import resolve
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble

BATCHES = 20


@functools.cache
def losses_of_300_steps(name, **fields):
    """f64[300] losses of the LLaVA-like model under a strategy on data=2 x fsdp=4."""
    config, loss, batch = KINDS["llava"]
    mesh, split = resolve(StrategyConfig(name, **fields), MeshConfig(2, 4), jax.devices())
    here = make_mesh(mesh)
    model = build_model(config, here, split)
    tx = optax.adamw(optax.cosine_decay_schedule(3e-3, 300))
    step, _, init = assemble(model, loss, tx)
    state, found = init(model.init(0)), []
    batches = [to_global(here, batch(seed, True), ROWS) for seed in range(BATCHES)]
    for i in range(300):
        state, metrics = step(state, batches[i % BATCHES])
        found.append(float(metrics["loss"]))  # waits: eight devices share the cores
    return np.asarray(found)


def assert_ends_alike(exact, rounded, within=0.01):
    """Not the same run, and its last losses are within 1 % of the other's, or a larger part."""
    assert not np.array_equal(exact[:4], rounded[:4])
    last, other = exact[-BATCHES:].mean(), rounded[-BATCHES:].mean()
    assert last < 0.9 * exact[:4].mean()
    assert abs(other - last) < within * last
