"""Memory of loops, compared with XLA's buffers; what only GPUs do, compared with a count."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from builders import TINY

from jaxvlm.config import MeshConfig, StrategyConfig
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.memory import liveness, step_memory
from jaxvlm.planner.memory.compilers import PLAIN
from jaxvlm.planner.memory.jaxpr_ops import Jaxpr
from jaxvlm.planner.memory.jaxpr_sharding import ShardedValues
from jaxvlm.planner.request import abstract_devices
from jaxvlm.train import program_memory

F32 = jnp.float32
SIDE = 512


def _both(fn, *shapes):
    """Bytes by the trace, and by XLA on CPU."""
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    body = Jaxpr(jax.make_jaxpr(fn)(*given).jaxpr)
    memory = program_memory.memory(jax.jit(fn).lower(*given).compile())
    return liveness.peak(ShardedValues(body, (), ())).bytes, memory["temporary"] + memory["outputs"]


def test_stacked_outputs_exist_once():
    def fn(x, w):
        def turn(x, w):
            made = [x]
            for _ in range(8):
                made.append(jnp.sin(made[-1] @ w))
            return made[-1], tuple(made[1:])

        return jax.lax.scan(turn, x, w)

    found, theirs = _both(fn, (4 * SIDE, SIDE), (2, SIDE, SIDE))
    stacked = 16 * 4 * SIDE * SIDE * 4
    assert found == pytest.approx(theirs, rel=0.1)
    assert found < stacked * 1.25  # without an iteration's eight results in addition


def test_an_unchanged_carry_has_no_buffer():
    """As in a loop over one tower's mini-batches, which carries the other tower's gradients too."""

    def fn(x, *params):
        def turn(sums, x):
            made = jax.grad(lambda p: jnp.sum((x @ p[0]) ** 2))(params)
            return jax.tree.map(jnp.add, sums, made), None

        return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), x)[0]

    shapes = (4, SIDE, SIDE), (SIDE, SIDE), (32 * SIDE, SIDE), (32 * SIDE, SIDE)
    found, theirs = _both(fn, *shapes)
    assert found == pytest.approx(theirs, rel=0.1)
    assert found < 1.2 * 64 * SIDE * SIDE * 4  # zeros: two results, and no additional sums


def _held(fn, *shapes):
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    return ShardedValues(Jaxpr(jax.make_jaxpr(fn)(*given).jaxpr), (), ())


def test_a_softmax_gradient_is_not_in_place_on_gpus():
    def fn(q, k, g):
        pull = jax.vjp(lambda q: jax.nn.softmax(q @ k), q)[1]
        return pull(g @ k)

    held = _held(fn, (4 * SIDE, SIDE), (SIDE, SIDE), (4 * SIDE, SIDE))
    separate = liveness.peak(held, PLAIN._replace(separate_softmax_gradient=True)).bytes
    assert separate - liveness.peak(held).bytes == 4 * SIDE * SIDE * 4


def test_a_scalar_is_broadcast_within_a_backward_loop():
    def layers(q, k):
        def turn(x, k):
            seen = jnp.arange(4 * SIDE)[:, None] >= jnp.arange(SIDE)
            return jax.nn.softmax(jnp.where(seen, x @ k, -1e30)) @ k, None

        return jnp.sum(jax.lax.scan(turn, q, k)[0])

    scores = 4 * SIDE * SIDE * 4
    held = _held(jax.grad(layers), (4 * SIDE, SIDE), (2, SIDE, SIDE))
    hidden = (
        liveness.peak(held).bytes - liveness.peak(held, PLAIN._replace(sinks_scalars=True)).bytes
    )
    assert hidden == scores


def test_zero_1_holds_unsharded_new_parameters_on_gpus_unless_gathered_in_place():
    decoder = dataclasses.replace(TINY.decoder, depth=24, mlp_dim=4096, remat="full")
    config = dataclasses.replace(TINY, decoder=decoder)
    devices = abstract_devices.devices("gpu", 8)
    mesh, strategy = resolve(StrategyConfig("zero1"), MeshConfig(data=1, fsdp=8), devices)
    setup = step_memory.StepSetup(config, mesh, strategy, "gpu", 8, 32, 1)
    work, model = step_memory.estimate(setup).work, step_memory.model_of(setup)
    sizes = {path: 4 * math.prod(x.shape) for path, x in model.shapes.items()}
    split = {path for path in sizes if "embed" in model.logical[path]}  # over fsdp, its moments
    held_twice = [sizes[path] for path in split if model.logical[path][0] != "embed"]
    assert 0 < len(held_twice) < len(split)
    assert work.keys() == {"gradients", "new parameters"}
    assert work["new parameters"] == sum(held_twice)
    share = sum(n / (8 if path in split else 1) for path, n in sizes.items())
    assert 0 < work["gradients"] < share
