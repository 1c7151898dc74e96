"""Compilers' passes compared with XLA for CPUs where compiling is quick, else with a count."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from builders import TINY

from jaxvlm.config import MeshConfig, StrategyConfig
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.memory import liveness, step_memory, xla_passes
from jaxvlm.planner.memory.compilers import COMPILERS, PLAIN
from jaxvlm.planner.memory.jaxpr_ops import Jaxpr, without_dead_code
from jaxvlm.planner.memory.jaxpr_sharding import NONE, ShardedValues, Share
from jaxvlm.planner.request import abstract_devices
from jaxvlm.train import program_memory

F32 = jnp.float32
SIDE = 512
SQUARE = SIDE * SIDE * 4


def _body(fn, *shapes):
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    return Jaxpr(jax.make_jaxpr(fn)(*given).jaxpr)


def _theirs(fn, *shapes):
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    memory = program_memory.memory(jax.jit(fn).lower(*given).compile())
    return memory["temporary"] + memory["outputs"]


def test_dead_code_is_removed():
    """For example a frozen table's gradient by a custom rule."""

    def fn(x, w):
        def turn(x, w):
            return jnp.sin(x @ w), (jnp.cos(x @ w), jnp.tile(x, (16, 1)))

        found, (kept, _) = jax.lax.scan(turn, x, w)
        return found, kept

    def with_a_sum(x, w):
        def turn(carry, w):
            x, total = carry
            return (jnp.sin(x @ w), total + jnp.tile(x, (16, 1))), jnp.cos(x @ w)

        (found, _), kept = jax.lax.scan(turn, (x, jnp.zeros((64 * SIDE, SIDE))), w)
        return found, kept

    shapes = (4 * SIDE, SIDE), (4, SIDE, SIDE)
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    for program in (fn, with_a_sum):
        jaxpr = jax.make_jaxpr(program)(*given).jaxpr
        body = Jaxpr(without_dead_code(jaxpr))
        found = liveness.peak(ShardedValues(body, (), ())).bytes
        assert found == pytest.approx(_theirs(program, *shapes), rel=0.15)
        assert liveness.peak(ShardedValues(Jaxpr(jaxpr), (), ())).bytes > 3 * found


def test_transposed_parameters_that_loops_read_are_copied_once():
    """As tied embeddings, of which cross-entropy's loops take slices."""

    def fn(w, x):
        matrix = w.T

        def turn(total, i):
            part = jax.lax.dynamic_slice_in_dim(matrix, i * SIDE, SIDE, 1)
            return total + jnp.sum(jnp.sin(x @ part)), None

        first, _ = jax.lax.scan(turn, 0.0, jnp.arange(16))
        return jax.lax.scan(turn, first, jnp.arange(16))[0]

    shapes = (16 * SIDE, SIDE), (SIDE, SIDE)
    given = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    jaxpr = without_dead_code(jax.make_jaxpr(fn)(*given).jaxpr)
    held = ShardedValues(Jaxpr(jaxpr), (Share(1.0), NONE), ())
    peaks = {p: liveness.peak(held, COMPILERS[p]).bytes for p in ("cpu", "tpu")}
    assert 16 * SQUARE < peaks["cpu"] < 20 * SQUARE
    assert peaks["tpu"] < 4 * SQUARE
    assert peaks["cpu"] == pytest.approx(_theirs(fn, *shapes), rel=0.1)


def test_each_result_of_a_barrier_is_a_view_of_its_operand():
    """Otherwise zeros that one loop passes on would live as long as another loop's."""

    def fn(x, y):
        first, second = jax.lax.optimization_barrier((x @ x, y @ y))
        return jnp.sin(first @ x) @ second

    body = _body(fn, (SIDE, SIDE), (SIDE, SIDE))
    first, second = [op.outs[0] for op in body.ops if op.name == "dot_general"][:2]
    assert body.order.last()[first] < body.order.last()[second]


def test_sharding_passes_through_a_barrier():
    body = _body(lambda *x: jax.lax.optimization_barrier(x), (SIDE, SIDE), (SIDE, SIDE))
    held = ShardedValues(body, (Share(8.0, (2, 1)), Share(1.0)), ())
    assert [held.share(v) for v in body.outs] == [Share(8.0, (2, 1)), Share(1.0)]


def _attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def test_scores_of_attention_without_a_mask_are_no_buffers_on_cpus():
    shapes = [(2, SIDE, 4, 64)] * 3
    held = ShardedValues(_body(_attention, *shapes), (), ())
    assert liveness.peak(held).bytes > 8 * SQUARE
    assert liveness.peak(held, COMPILERS["cpu"]).bytes < 4 * SQUARE
    assert _theirs(_attention, *shapes) < 4.5 * SQUARE


def test_a_softmax_s_gradient_is_one_kernel_with_its_matmul_on_cpus():
    def fn(q, k, v, g):
        return jax.vjp(_attention, q, k, v)[1](g)

    held = ShardedValues(_body(fn, *[(1, SIDE, 4, 64)] * 4).breadth_first(), (), ())
    less = (
        liveness.peak(held).bytes - liveness.peak(held, PLAIN._replace(fuses_reductions=True)).bytes
    )
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

    held = ShardedValues(_body(fn, (4 * SIDE, SIDE), (SIDE, SIDE)), (), ())
    assert liveness.peak(held, PLAIN._replace(fuses_reductions=True)).bytes >= 4 * SQUARE


def test_a_norm_s_factors_are_saved_for_its_backward_pass():
    def norm(x, scale):
        rows = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        return x * rows * scale

    def fn(x, scale, g):
        y, pull = jax.vjp(norm, x, scale)
        return pull(g + y)

    held = ShardedValues(_body(fn, (SIDE, SIDE), (1, SIDE), (SIDE, SIDE)), (), ())
    copies = xla_passes.XlaPasses(held, PLAIN._replace(fuses_reductions=True), loop=False).copies
    assert [copy.bytes for copy in copies] == [SQUARE, SQUARE]
    assert all(0 < copy.first < copy.last for copy in copies)


def test_later_values_reuse_the_moments_buffers():
    """Each array holds one value at a time, the smallest that can."""

    def fn(x, w):
        kept = jax.lax.scan(lambda x, w: (jnp.sin(x @ w),) * 2, x, w)[1]
        return jnp.sum(kept**2) + jnp.sum(jnp.cos(x @ w[0]) @ w[1])

    held = ShardedValues(_body(fn, (SIDE, SIDE), (8, SIDE, SIDE)), (), ())
    whole = liveness.peak(held).bytes
    assert liveness.peak(held, idle_buffers=(SQUARE / 2,)).bytes == whole  # holds none of them
    found = liveness.peak(held, idle_buffers=(1.0 * SQUARE, 9.0 * SQUARE)).bytes
    assert whole - found == pytest.approx(9 * SQUARE, rel=0.01)


def test_loop_invariant_gathers_are_hoisted():
    def fn(x, w):
        return jax.lax.scan(lambda s, x: (s + jnp.sum(jnp.exp(x @ w) @ w.T), None), 0.0, x)[0]

    held = ShardedValues(_body(fn, (4, 8, SIDE), (SIDE, SIDE)), (Share(), Share(8.0)), ())
    (loop,) = held.inner.values()
    ((first, again),) = xla_passes.invariant(loop).values()
    assert first is not again  # a view of it is no other parameter
    lifted = liveness.peak(held, COMPILERS["gpu"])
    assert lifted.parts["weights"] == pytest.approx(SQUARE)
    assert (
        "weights"
        not in liveness.peak(held, COMPILERS["gpu"], idle_buffers=(1.0 * SQUARE,) * 3).parts
    )


def test_a_parameter_read_twice_in_a_loop_is_gathered_once():
    def fn(x, w):
        def turn(x, w):
            made = jnp.sin(x @ w)
            for _ in range(3):
                made = jnp.tanh(made * jnp.sum(made) + 1.0)
            return made @ w, None

        return jax.lax.scan(turn, x, w)[0]

    held = ShardedValues(_body(fn, (8, SIDE), (4, SIDE, SIDE)), (Share(), Share(8.0)), ())
    found = xla_passes.XlaPasses(held.inner[0], PLAIN._replace(shares_gathers=True), loop=True)
    (copy,) = found.copies
    assert copy.bytes == pytest.approx(SQUARE) and copy.first < copy.last
    assert {op.name for op in held.inner[0].body.ops if copy.of in op.values} == {"dot_general"}


def test_gradients_are_accumulated_in_place_on_cpus():
    """Stacked outputs of a loop over layers exist from the start of the loop over chunks."""

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
    (loop,) = ShardedValues(body, shares, (Share(1.0), Share())).inner.values()
    does = xla_passes.XlaPasses(loop, PLAIN._replace(runs_when_ready=True), loop=True)
    (total,) = [op.outs[0] for op in loop.body.ops if op.name == "add"]
    assert total in does.unbuffered
    assert [v.aval.shape for v in does.start] == [(4, SIDE, SIDE)]
    body = _body(other, (4, SIDE, SIDE), (2, SIDE, SIDE))
    (loop,) = ShardedValues(body, shares, (Share(1.0), Share(1.0))).inner.values()
    assert not xla_passes.XlaPasses(
        loop, PLAIN._replace(runs_when_ready=True), loop=True
    ).unbuffered


@pytest.mark.parametrize(
    ("mesh", "parts"), [(MeshConfig(data=8), 1), (MeshConfig(data=4, tensor=2), 2)]
)
def test_ddp_all_reduces_microbatches_out_of_place_on_cpus(mesh, parts):
    """Also with tensor parallelism: devices with other sequences hold the same shard."""

    strategy = resolve(StrategyConfig("ddp"), mesh, abstract_devices.devices("cpu", 8))[1]
    rows = 2 * mesh.data
    setup = step_memory.StepSetup(TINY, mesh, strategy, "cpu", rows, 64, 1, microbatches=2)
    moments = step_memory.estimate(setup).states["moments"]
    lies = step_memory._layouts_of(setup)
    own = tuple(lies.model.shapes)
    found = step_memory._after_backward(setup, lies, own)
    assert found == {"gradients": moments, "update": moments}
    alone = setup._replace(microbatches=1)
    assert not step_memory._after_backward(alone, lies, own)
    assert parts == 1 or moments < 2 * sum(
        4 * math.prod(x.shape) for x in lies.model.shapes.values()
    )
