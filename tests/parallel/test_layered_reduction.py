"""Gradients reduced in few bits where parameters are all-gathered layer by layer."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from builders import recorded
from test_strategies import first_params
from zoo import KINDS, ROWS, on_stages

from jaxvlm.config import ConfigError, MeshConfig, StrategyConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.compiled import collectives
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble, layered_reduction

NAMES = {"bfloat16": 2**-8, "int8": 1 / 254, "int4": 1 / 14}
"""dtype -> half a step of rounding, of a block's largest."""


@functools.cache
def gradients(kind, mesh, dtype, parts=1, preset="zero3", compute="float32", **fields):
    """A step's loss and gradients, and its program."""
    config, loss, batch = KINDS[kind]
    config = on_stages(config) if mesh.pipeline > 1 else config
    config = dataclasses.replace(config, dtype=compute)
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
        ("qwen3", MeshConfig(1), "int8", 1),
        pytest.param("llava", MeshConfig(1), "int8", 1, marks=pytest.mark.long),
        pytest.param("qwen3", MeshConfig(1), "bfloat16", 2, marks=pytest.mark.long),
        pytest.param("qwen3", MeshConfig(1, fsdp=4, tensor=2), "int8", 1, marks=pytest.mark.long),
        pytest.param("qwen3", MeshConfig(1, fsdp=4, context=2), "int8", 1, marks=pytest.mark.long),
        pytest.param("moe", MeshConfig(1, fsdp=4, expert=2), "int8", 1, marks=pytest.mark.long),
        pytest.param("gemma3", MeshConfig(1), "int4", 1, marks=pytest.mark.long),
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
    assert rounded >= 3


@pytest.mark.long
def test_gradients_in_bfloat16_are_off_by_as_much():
    loss, exact, *_ = gradients("qwen3", MeshConfig(1), "float32")
    same, found, *_ = gradients("qwen3", MeshConfig(1), "int8", compute="bfloat16")
    assert same == pytest.approx(loss, rel=2**-6)
    names = sorted(exact)
    of, other = (np.concatenate([x[name].ravel() for name in names]) for x in (exact, found))
    assert np.linalg.norm(other - of) <= (2**-4 + NAMES["int8"] * 8) * np.linalg.norm(of)


def test_the_wire_carries_bytes():
    """All but one-dimensional arrays and those without a block, which are sent as float32."""
    sent = {}
    for dtype in ("float32", "int8"):
        *_, program, here = gradients("qwen3", MeshConfig(1), dtype)
        found = collectives.read(program.as_text(), dict(here.shape))
        reducing = [c for c in found if c.kind in ("all-reduce", "reduce-scatter", "all-to-all")]
        sent[dtype] = {c.dtype: 0 for c in reducing}
        for c in reducing:
            sent[dtype][c.dtype] += c.wire_bytes
    assert sent["int8"]["s8"] > 0 and "s8" not in sent["float32"]
    assert sum(sent["int8"].values()) < sum(sent["float32"].values()) / 2


def test_what_cannot_be_reduced_layer_by_layer_is_refused():
    with pytest.raises(ConfigError, match=r"error_feedback=True needs gradients that are reduced"):
        gradients("qwen3", MeshConfig(1), "int8", error_feedback=True)
    with pytest.raises(ConfigError, match=r"layer by layer cannot be combined .*pipeline=2"):
        gradients("qwen3", MeshConfig(1, pipeline=2), "int8", parts=2)
    strategy = StrategyConfig("zero3", grad_reduce_dtype="int8")
    sizes, split = resolve(strategy, MeshConfig(1), jax.devices())
    model = build_model(KINDS["qwen3"][0], make_mesh(sizes), split)
    with pytest.raises(ConfigError, match="layer by layer cannot be combined with pairs"):
        layered_reduction(model, of_pairs=True)
