"""Gradients reduced in few bits where parameters are all-gathered layer by layer."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from builders import recorded
from test_strategies import first_params
from zoo import KINDS, ROWS

from jaxvlm.config import ConfigError, MeshConfig, StrategyConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.parallel.strategies import resolve
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble

NAMES = {"bfloat16": 2**-8, "int8": 1 / 254, "int4": 1 / 14}
"""dtype -> half a step of rounding, of a block's largest."""


def gradients(kind, mesh, dtype, parts=1, preset="zero3", **fields):
    """A step's loss and gradients, and its program."""
    config, loss, batch = KINDS[kind]
    sizes, split = resolve(
        StrategyConfig(preset, grad_reduce_dtype=dtype, **fields), mesh, jax.devices()
    )
    here = make_mesh(sizes)
    model = build_model(config, here, split)
    step, _, init = assemble(model, loss, optax.chain(recorded(), optax.sgd(0.0)), parts)
    params = {p: jax.device_put(x, model.shardings[p]) for p, x in first_params(kind).items()}
    state, rows = init(params), to_global(here, batch(0, True), ROWS)
    program = step.lower(state, rows).compile()
    state, metrics = program(state, rows)
    return float(metrics["loss"]), jax.device_get(state.opt_state[0]), program, here


@pytest.mark.parametrize(
    ("kind", "mesh", "dtype", "parts"),
    [
        ("llava", MeshConfig(1), "int8", 1),
        ("qwen3", MeshConfig(1), "bfloat16", 2),
        ("qwen3", MeshConfig(2, fsdp=2, tensor=2), "int8", 1),
        ("moe", MeshConfig(1, fsdp=4, expert=2), "int8", 1),
        ("gemma3", MeshConfig(1), "int4", 1),
    ],
)
def test_gradients_are_off_by_half_a_step_of_each_part(kind, mesh, dtype, parts):
    loss, exact, *_ = gradients(kind, mesh, "float32", parts)
    same, found, *_ = gradients(kind, mesh, dtype, parts)
    assert same == pytest.approx(loss, rel=1e-5)
    rounded = 0
    for path, g in exact.items():
        off = np.abs(found[path] - g)
        if off.max() > 1e-5 * max(np.abs(g).max(), 1e-3):
            rounded += 1
        assert np.linalg.norm(off) <= NAMES[dtype] * 8 * np.linalg.norm(g) + 1e-5, path
    assert rounded > len(exact) / 4
