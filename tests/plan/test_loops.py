"""What of loops lies in memory: against XLA's buffers, and what is only GPUs' against a count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxvlm.plan import live
from jaxvlm.plan.compilers import COMPILERS, PLAIN
from jaxvlm.plan.program import Body
from jaxvlm.plan.traced import Held
from jaxvlm.train import programs

F32 = jnp.float32
SIDE = 512


def _both(fn, *shapes, compiler=PLAIN):
    """Bytes by the trace, and by XLA on CPU."""
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    body = Body(jax.make_jaxpr(fn)(*given).jaxpr)
    memory = programs.memory(jax.jit(fn).lower(*given).compile())
    return live.peak(Held(body, (), ()), compiler).bytes, memory["temporary"] + memory["outputs"]


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

    def fn(x, a, b):
        def turn(sums, x):
            made = jax.grad(lambda p: jnp.sum((x @ p[0]) ** 2))((a, b))
            return jax.tree.map(jnp.add, sums, made), None

        zeros = jnp.zeros_like(a), jnp.zeros_like(b)
        return jax.lax.scan(turn, zeros, x)[0]

    shapes = (4, SIDE, SIDE), (SIDE, SIDE), (64 * SIDE, SIDE)
    found, theirs = _both(fn, *shapes)
    assert found == pytest.approx(theirs, rel=0.1)
    assert found < 1.2 * 64 * SIDE * SIDE * 4  # zeros: a result, and no sum beside it


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
    assert hidden in (scores, 2 * scores)  # what is put in hidden places, and its gradient's zeros


def test_new_parameters_of_zero_1_are_whole_beside_some_gradients():
    from jax.sharding import PartitionSpec as P

    from jaxvlm.plan.memory import _behind

    class Layout:
        def __init__(self, *spec):
            self.spec = P(*spec)

    assert not _behind(Layout("fsdp")) and not _behind(Layout())
    assert _behind(Layout(None, "fsdp")) and _behind(Layout(None, ("data", "fsdp"), "tensor"))
    assert 0 < COMPILERS["gpu"].whole < 1 and not COMPILERS["tpu"].whole
