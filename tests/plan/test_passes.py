"""What compilers do with values: against XLA for CPUs where it is quick to ask, else a count."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from builders import TINY

from jaxvlm.config import MeshConfig, StrategyConfig
from jaxvlm.parallel.strategies import resolve
from jaxvlm.plan import absent, live, memory, passes
from jaxvlm.plan.compilers import COMPILERS, PLAIN
from jaxvlm.plan.program import Body
from jaxvlm.plan.traced import Held, Share
from jaxvlm.train import programs

F32 = jnp.float32
SIDE = 512
SQUARE = SIDE * SIDE * 4


def _body(fn, *shapes):
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    return Body(jax.make_jaxpr(fn)(*given).jaxpr)


def _theirs(fn, *shapes):
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    memory = programs.memory(jax.jit(fn).lower(*given).compile())
    return memory["temporary"] + memory["outputs"]


def test_what_nobody_reads_is_not_made():
    """As a table's gradient, by a rule of its own, where the table is frozen."""

    def fn(x, w):
        def turn(x, w):
            return jnp.sin(x @ w), (jnp.cos(x @ w), jnp.tile(x, (16, 1)))

        found, (kept, _) = jax.lax.scan(turn, x, w)
        return found, kept

    shapes = (4 * SIDE, SIDE), (4, SIDE, SIDE)
    body = _body(fn, *shapes)
    found = live.peak(Held(body.lean(), (), ())).bytes
    assert found == pytest.approx(_theirs(fn, *shapes), rel=0.15)
    assert live.peak(Held(body, (), ())).bytes > 3 * found


def test_each_result_of_a_barrier_is_of_its_own_operand():
    """Else zeros that one loop passes on are kept for as long as another's."""

    def fn(x, y):
        first, second = jax.lax.optimization_barrier((x @ x, y @ y))
        return jnp.sin(first @ x) @ second

    body = _body(fn, (SIDE, SIDE), (SIDE, SIDE))
    first, second = [op.outs[0] for op in body.ops if op.name == "dot_general"][:2]
    assert body.order.last()[first] < body.order.last()[second]


def test_parameters_behind_a_barrier_are_split_as_before_it():
    body = _body(lambda *x: jax.lax.optimization_barrier(x), (SIDE, SIDE), (SIDE, SIDE))
    held = Held(body, (Share(8.0, (2, 1)), Share(1.0)), ())
    assert [held.share(v) for v in body.outs] == [Share(8.0, (2, 1)), Share(1.0)]


def _attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def test_scores_of_attention_without_a_mask_are_no_buffers_on_cpus():
    shapes = [(2, SIDE, 4, 64)] * 3
    held = Held(_body(_attention, *shapes), (), ())
    assert live.peak(held).bytes > 8 * SQUARE
    assert live.peak(held, COMPILERS["cpu"]).bytes < 4 * SQUARE
    assert _theirs(_attention, *shapes) < 4.5 * SQUARE


def test_a_softmax_s_gradient_is_one_kernel_with_its_matmul_on_cpus():
    def fn(q, k, v, g):
        return jax.vjp(_attention, q, k, v)[1](g)

    held = Held(_body(fn, *[(1, SIDE, 4, 64)] * 4).broad(), (), ())
    less = live.peak(held).bytes - live.peak(held, PLAIN._replace(joins=True)).bytes
    assert less == pytest.approx(4 * SQUARE, rel=0.1)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_product_that_a_loop_reads_is_a_buffer(axis):
    """And one whose columns are summed, as a bias's gradient is."""

    def fn(x, w):
        y = x @ w
        total = jnp.sum(y, axis=axis)
        if axis:
            return jax.lax.scan(lambda s, row: (s + jnp.sum(row), None), jnp.sum(total), y)[0]
        return total, jnp.sin(y)

    held = Held(_body(fn, (4 * SIDE, SIDE), (SIDE, SIDE)), (), ())
    assert live.peak(held, PLAIN._replace(joins=True)).bytes >= 4 * SQUARE


def test_a_norm_s_factors_are_kept_for_its_backward_pass():
    def norm(x, scale):
        rows = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        return x * rows * scale

    def fn(x, scale, g):
        y, pull = jax.vjp(norm, x, scale)
        return pull(g + y)

    held = Held(_body(fn, (SIDE, SIDE), (1, SIDE), (SIDE, SIDE)), (), ())
    copies = passes.Passes(held, PLAIN._replace(joins=True), loop=False).copies
    assert [copy.bytes for copy in copies] == [SQUARE, SQUARE]
    assert all(0 < copy.first < copy.last for copy in copies)


def test_what_is_made_later_lies_where_moments_lay():
    """Each array holds one value at a time, the smallest that can."""

    def fn(x, w):
        kept = jax.lax.scan(lambda x, w: (jnp.sin(x @ w),) * 2, x, w)[1]
        return jnp.sum(kept**2) + jnp.sum(jnp.cos(x @ w[0]) @ w[1])

    held = Held(_body(fn, (SIDE, SIDE), (8, SIDE, SIDE)), (), ())
    whole = live.peak(held).bytes
    assert live.peak(held, room=(SQUARE / 2,)).bytes == whole  # holds none of them
    found = live.peak(held, room=(1.0 * SQUARE, 9.0 * SQUARE)).bytes
    assert whole - found == pytest.approx(9 * SQUARE, rel=0.01)


def test_a_matrix_that_a_loop_goes_through_by_another_dim_is_turned_twice_on_cpus():
    def fn(x, table):
        parts = jnp.moveaxis(table.reshape(SIDE, 4, -1), 1, 0)
        return jax.lax.scan(lambda s, part: (s + jnp.sum(jnp.exp(x @ part)), None), 0.0, parts)[0]

    shapes = (8, SIDE), (SIDE, 8 * SIDE)
    held = Held(_body(fn, *shapes), (Share(), Share(1.0)), ())
    found = live.peak(held, COMPILERS["cpu"]).bytes
    assert found == pytest.approx(16 * SQUARE, rel=0.05)
    assert live.peak(held).bytes < SQUARE


def test_what_turns_gather_alike_is_gathered_around_their_loop():
    def fn(x, w):
        return jax.lax.scan(lambda s, x: (s + jnp.sum(jnp.exp(x @ w) @ w.T), None), 0.0, x)[0]

    held = Held(_body(fn, (4, 8, SIDE), (SIDE, SIDE)), (Share(), Share(8.0)), ())
    (loop,) = held.inner.values()
    ((first, again),) = passes.invariant(loop).values()
    assert first is not again  # a view of it is no other parameter
    lifted = live.peak(held, COMPILERS["gpu"])
    assert lifted.parts["weights"] == pytest.approx(SQUARE)
    assert "weights" not in live.peak(held, COMPILERS["gpu"], room=(1.0 * SQUARE,) * 3).parts


def test_a_parameter_read_twice_in_a_loop_is_gathered_once():
    def fn(x, w):
        def turn(x, w):
            made = jnp.sin(x @ w)
            for _ in range(3):
                made = jnp.tanh(made * jnp.sum(made) + 1.0)
            return made @ w, None

        return jax.lax.scan(turn, x, w)[0]

    held = Held(_body(fn, (8, SIDE), (4, SIDE, SIDE)), (Share(), Share(8.0)), ())
    found = passes.Passes(held.inner[0], PLAIN._replace(keeps=True), loop=True)
    (copy,) = found.copies
    assert copy.bytes == pytest.approx(SQUARE) and copy.first < copy.last
    assert {op.name for op in held.inner[0].body.ops if copy.of in op.values} == {"dot_general"}


def test_sums_of_gradients_are_made_in_place_on_cpus():
    """And what a loop over layers stacks is there from the begin of a loop over chunks."""

    def fn(w, xs):
        def layers(x, w):
            return jnp.sin(x @ w), x

        def chunk(total, x):
            made = jax.lax.scan(layers, x, w)
            return total + 2.0 * made[1][:, :SIDE], jnp.sum(made[0])

        return jax.lax.scan(chunk, jnp.zeros((4, SIDE, SIDE)), xs)

    def other(w, xs):
        return jax.lax.scan(lambda t, x: (t * 0.5, x + t), w[0], xs)

    shares = Share(), Share()
    body = _body(fn, (4, SIDE, SIDE), (2, SIDE, SIDE))
    (loop,) = Held(body, shares, (Share(1.0), Share())).inner.values()
    does = passes.Passes(loop, PLAIN._replace(copied=True), loop=True)
    (total,) = [op.outs[0] for op in loop.body.ops if op.name == "add"]
    assert total in does.sunk
    assert [v.aval.shape for v in does.start] == [(4, SIDE, SIDE)]
    body = _body(other, (4, SIDE, SIDE), (2, SIDE, SIDE))
    (loop,) = Held(body, shares, (Share(1.0), Share(1.0))).inner.values()
    assert not passes.Passes(loop, PLAIN._replace(copied=True), loop=True).sunk


@pytest.mark.parametrize(
    ("mesh", "parts"), [(MeshConfig(data=8), 1), (MeshConfig(data=4, tensor=2), 2)]
)
def test_ddp_s_sums_of_microbatches_are_beside_themselves_on_cpus(mesh, parts):
    """Also where tensor parallelism splits them: no other row's device has that part."""
    strategy = resolve(StrategyConfig("ddp"), mesh, absent.devices("cpu", 8))[1]
    rows = 2 * mesh.data
    setup = memory.Setup(TINY, mesh, strategy, "cpu", rows, 64, 1, microbatches=2)
    moments = memory.estimate(setup).states["moments"]
    lies = memory._lies(setup)
    own = tuple(lies.model.shapes)
    found = memory._behind(setup, lies, own)
    assert found == {"gradients": moments, "update": moments}
    alone = setup._replace(microbatches=1)
    assert not memory._behind(alone, lies, own)
    assert parts == 1 or moments < 2 * sum(
        4 * math.prod(x.shape) for x in lies.model.shapes.values()
    )
