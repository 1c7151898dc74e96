"""Sharding and memory of a trace, compared with XLA's partitioner and its buffers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxvlm.nn.grouped_matmul import grouped_matmul
from jaxvlm.planner.memory import liveness, sharding_propagation
from jaxvlm.planner.memory.jaxpr_ops import Jaxpr
from jaxvlm.planner.memory.jaxpr_sharding import NONE, ShardedValues, Share
from jaxvlm.train import program_memory

MESH = Mesh(np.array(jax.devices()[:2]), ("tensor",))
CASES = {
    "heads joined": (lambda x: x.reshape(6, 4 * 8), (6, 4, 8), 1),
    "heads in groups": (lambda x: x.reshape(6, 2, 2, 8), (6, 4, 8), 1),
    "one group": (lambda x: x.reshape(6, 1, 4, 8), (6, 4, 8), 1),
    "cut into heads": (lambda x: x.reshape(6, 4, 8), (6, 32), 1),
    "rows joined": (lambda x: x.reshape(12, 4, 8), (2, 6, 4, 8), 2),
    "transposed": (lambda x: x.transpose(2, 0, 1) * 2, (6, 4, 8), 1),
    "summed": (lambda x: jnp.sum(x, axis=2), (6, 4, 8), 1),
    "a free dim": (lambda x: jnp.einsum("abc,cd->abd", x, jnp.ones((8, 3))), (6, 4, 8), 1),
    "a contracted dim": (lambda x: jnp.einsum("abc,bcd->ad", x, jnp.ones((4, 8, 3))), (6, 4, 8), 1),
    "scanned": (
        lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), jnp.zeros((4, 8)), x)[1],
        (6, 4, 8),
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_dims_are_sharded_as_by_xla(case):
    fn, shape, dim = CASES[case]
    split = tuple(2 if i == dim else 1 for i in range(len(shape)))
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    body = Jaxpr(jax.make_jaxpr(fn)(x).jaxpr)
    held = ShardedValues(body, [Share(0, split)], ())
    (found,) = (held.share(v).dims for v in body.outs)
    spec = P(*("tensor" if n > 1 else None for n in split))
    compiled = jax.jit(fn, in_shardings=NamedSharding(MESH, spec)).lower(x).compile()
    (out,) = (v.aval.shape for v in body.outs)
    theirs = compiled.output_shardings.shard_shape(out)
    assert theirs == tuple(n // s for n, s in zip(out, found or (1,) * len(out)))


def test_a_reshape_without_common_factors_is_replicated():
    assert sharding_propagation.reshaped((3, 4), (1, 4), (4, 3)) in (
        (4, 1),
        (2, 1),
    )  # 12 over 4 devices
    assert sharding_propagation.reshaped((6, 4), (1, 1), (24,)) == ()


L, B, D = 6, 2048, 256


def _layers(w, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])


def _found(parts=1.0):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((L, D, D), (B, D))]
    traced = jax.make_jaxpr(jax.grad(_layers))(*shapes)
    held = ShardedValues(Jaxpr(traced.jaxpr), [Share(parts), NONE], [Share(parts)])
    return liveness.peak(held), shapes


def test_saved_activations_of_a_stack_of_layers():
    found, shapes = _found()
    compiled = jax.jit(jax.grad(_layers)).lower(*shapes).compile()
    memory = program_memory.memory(compiled)
    kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(_layers, *a)[1], *shapes))
    assert found.parts["saved"] == sum(4 * x.size for x in kept if x.shape == (L, B, D))
    assert found.parts["gradients"] == L * D * D * 4
    theirs = memory["temporary"] + memory["outputs"]
    assert found.bytes == pytest.approx(theirs, rel=0.1)


def test_shards_of_parameters_and_gradients_are_counted():
    whole, split = _found()[0], _found(4.0)[0]
    assert split.parts["gradients"] == whole.parts["gradients"] / 4
    assert split.parts["saved"] == whole.parts["saved"]
    assert split.parts["weights"] == D * D * 4  # gathered for a layer's matmul


def test_transposed_parameters_exist_twice_while_loops_read_them():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((L, D, D), (B, D))]
    body = Jaxpr(jax.make_jaxpr(jax.grad(_layers))(*shapes).jaxpr)
    straight, turned = (
        liveness.peak(ShardedValues(body, [Share(4.0, (), turned), NONE], [Share(4.0)]))
        for turned in (False, True)
    )
    assert turned.bytes - straight.bytes == L * D * D * 4 / 4
    assert math.isclose(sum(turned.parts.values()), turned.bytes)


def grouped_by(transposed, kernel):
    """A grouped matmul and its gradients' matmuls, by a kernel or by JAX's ragged_dot."""

    def fn(rows, w, sizes):
        def matmul(rows, w):
            return grouped_matmul(rows, w, sizes, kernel, tail=False)

        return matmul(rows, w) if not transposed else jax.vjp(matmul, rows, w)[1](matmul(rows, w))

    return fn


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("split", [((2, 1), ()), ((), (1, 1, 2)), ((1, 2), (1, 2, 1)), ((), ())])
def test_a_grouped_kernel_is_sharded_as_ragged_dot(transposed, split):
    shapes = [((32, 8), "float32"), ((4, 8, 6), "float32"), ((4,), "int32")]
    shapes = [jax.ShapeDtypeStruct(*s) for s in shapes]
    found = []
    for kernel in ("gpu", ""):
        body = Jaxpr(jax.make_jaxpr(grouped_by(transposed, kernel))(*shapes).jaxpr)
        held = ShardedValues(body, [*(Share(0, dims) for dims in split), NONE], ())
        found.append([held.share(v).dims for v in body.outs])
    assert found[0] == found[1]


def test_casts_of_layers_are_hoisted_out_of_loops_on_tpus():
    """Against the buffer assignment of libtpu 0.0.42 for v5p: heap and the gradient."""
    depth, rows, width = 8, 8192, 2048
    theirs = 486719488 + 4 * depth * width * width

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w.astype(jnp.bfloat16)) @ w.astype(jnp.bfloat16).T)

    def loss(w, x):
        out, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)
        return jnp.sum(out.astype(jnp.float32))

    w = jax.ShapeDtypeStruct((depth, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    body = Jaxpr(jax.make_jaxpr(jax.grad(loss))(w, x).jaxpr)
    whole, tpu = (
        liveness.peak(ShardedValues(b, [Share(1.0), NONE], [Share(1.0)], tiled=True))
        for b in (body, body.with_hoisted_casts())
    )
    assert tpu.parts["weights"] == 2 * depth * width * width  # whole.parts has one layer's
    assert tpu.bytes == pytest.approx(theirs, rel=0.03)
    assert whole.bytes < 0.9 * theirs


def test_the_larger_of_two_branches_counts():
    def fn(x, big):
        return jax.lax.cond(big, lambda x: jnp.sum((x @ x.T) @ x), lambda x: jnp.sum(x), x)

    x = jax.ShapeDtypeStruct((256, 16), jnp.float32)
    traced = jax.make_jaxpr(fn)(x, jax.ShapeDtypeStruct((), bool))
    held = ShardedValues(Jaxpr(traced.jaxpr), [NONE] * 2, [NONE])
    assert liveness.peak(held).bytes >= 256 * 256 * 4


def test_one_trace_serves_any_batch_size():
    def found(rows, unit, times=1.0):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((L, D, D), (rows, D))]
        body = Jaxpr(jax.make_jaxpr(jax.grad(_layers))(*shapes).jaxpr, unit)
        return liveness.peak(ShardedValues(body, [Share(2.0), NONE], [Share(2.0)], times))

    assert found(10007, 10007, float(B)) == found(B, 0)


def test_categories_add_up_to_the_peak():
    found, _ = _found()
    assert math.isclose(sum(found.parts.values()), found.bytes)
