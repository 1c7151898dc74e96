"""What of loops lies in memory: against XLA's buffers, and what is only GPUs' against a count."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from builders import TINY

from jaxvlm.config import MeshConfig, StrategyConfig
from jaxvlm.parallel.strategies import resolve
from jaxvlm.plan import absent, live, memory
from jaxvlm.plan.compilers import PLAIN
from jaxvlm.plan.program import Body
from jaxvlm.plan.traced import Held
from jaxvlm.train import programs

F32 = jnp.float32
SIDE = 512


def _both(fn, *shapes):
    """Bytes by the trace, and by XLA on CPU."""
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    body = Body(jax.make_jaxpr(fn)(*given).jaxpr)
    memory = programs.memory(jax.jit(fn).lower(*given).compile())
    return live.peak(Held(body, (), ())).bytes, memory["temporary"] + memory["outputs"]


def test_what_a_loop_stacks_is_not_there_twice():
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
    assert found < stacked * 1.25  # and not a turn's eight results beside it


def test_a_gradient_that_a_loop_passes_on_is_no_buffer():
    """As in a loop over one tower's chunks, which has the other's gradients too."""

    def fn(x, *params):
        def turn(sums, x):
            made = jax.grad(lambda p: jnp.sum((x @ p[0]) ** 2))(params)
            return jax.tree.map(jnp.add, sums, made), None

        return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), x)[0]

    shapes = (4, SIDE, SIDE), (SIDE, SIDE), (32 * SIDE, SIDE), (32 * SIDE, SIDE)
    found, theirs = _both(fn, *shapes)
    assert found == pytest.approx(theirs, rel=0.1)
    assert found < 1.2 * 64 * SIDE * SIDE * 4  # zeros: two results, and no sums beside them


def _held(fn, *shapes):
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    return Held(Body(jax.make_jaxpr(fn)(*given).jaxpr), (), ())


def test_a_softmax_s_gradient_is_beside_what_it_is_made_of():
    def fn(q, k, g):
        pull = jax.vjp(lambda q: jax.nn.softmax(q @ k), q)[1]
        return pull(g @ k)

    held = _held(fn, (4 * SIDE, SIDE), (SIDE, SIDE), (4 * SIDE, SIDE))
    beside = live.peak(held, PLAIN._replace(apart=True)).bytes
    assert beside - live.peak(held).bytes == 4 * SIDE * SIDE * 4


def test_one_number_is_broadcast_within_a_backward_loop():
    def layers(q, k):
        def turn(x, k):
            seen = jnp.arange(4 * SIDE)[:, None] >= jnp.arange(SIDE)
            return jax.nn.softmax(jnp.where(seen, x @ k, -1e30)) @ k, None

        return jnp.sum(jax.lax.scan(turn, q, k)[0])

    scores = 4 * SIDE * SIDE * 4
    held = _held(jax.grad(layers), (4 * SIDE, SIDE), (2, SIDE, SIDE))
    hidden = live.peak(held).bytes - live.peak(held, PLAIN._replace(sinks=True)).bytes
    assert hidden == scores


def test_new_parameters_of_zero_1_are_whole_on_gpus_but_for_those_gathered_in_place():
    decoder = dataclasses.replace(TINY.decoder, depth=24, mlp_dim=4096, remat="full")
    config = dataclasses.replace(TINY, decoder=decoder)
    devices = absent.devices("gpu", 8)
    mesh, strategy = resolve(StrategyConfig("zero1"), MeshConfig(data=1, fsdp=8), devices)
    setup = memory.Setup(config, mesh, strategy, "gpu", 8, 32, 1)
    work, model = memory.estimate(setup).work, memory.model_of(setup)
    sizes = {path: 4 * math.prod(x.shape) for path, x in model.shapes.items()}
    split = {path for path in sizes if "embed" in model.logical[path]}  # over fsdp, its moments
    behind = [sizes[path] for path in split if model.logical[path][0] != "embed"]
    assert 0 < len(behind) < len(split)
    assert work.keys() == {"gradients", "new parameters"}
    assert work["new parameters"] == sum(behind)
    share = sum(n / (8 if path in split else 1) for path, n in sizes.items())
    assert 0 < work["gradients"] < share
