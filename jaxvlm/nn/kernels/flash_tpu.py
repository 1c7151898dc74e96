"""Flash attention for TPUs, which visits only the blocks that the mask needs.

Scores are kept transposed, [keys, queries]: what a query has one of (its maximum, its sum, its
intervals of keys) then lies along lanes, and is reduced over sublanes, the cheaper direction.

Source: FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxvlm.nn.kernels.blocks import needed, ranges, steps
from jaxvlm.nn.kernels.scores import HIDDEN, Form, dot, ended, scores
from jaxvlm.nn.mask import Spans, allowed

_MEMORY = 100 * 2**20  # of fast memory, in bytes
_BOUNDS = 6  # fields of Ranges
_INNER, _OUTER, _FIRST = ((((a,), (b,)), ((), ())) for a, b in ((1, 0), (1, 1), (0, 0)))


class Sizes(NamedTuple):
    """Sizes of blocks, in tokens: multiples of 128."""

    query: int
    key: int
    part: int
    """Keys of a block that are computed or skipped together; divides ``key``."""

    @property
    def unit(self) -> int:
        """T is padded to a multiple of this."""
        return max(self.query, self.key)


class _Walk(NamedTuple):
    """What a step's number means. Static."""

    form: Form
    most: int
    """Steps per row of the batch that there is room for."""
    blocks: int
    """Blocks of queries per row of the batch."""


class _Step:
    """One step of a kernel's grid: a block of queries and a block of keys.

    Args:
        walk: static arguments.
        scalars: references to the fields of ``Steps`` and to ``Ranges``, each flattened.
        w: number of the step in its row of the batch.
    """

    def __init__(self, walk: _Walk, scalars: Any, w: jax.Array):
        query, key, count, bounds = scalars
        b = pl.program_id(0)
        at = b * walk.most + w
        block, self.key, count = query[at], key[at], count[b]
        self.size, self.active = walk.form.sizes, w < count
        first = (w == 0) | (query[jnp.maximum(at - 1, 0)] != block)
        last = (w == count - 1) | (query[jnp.minimum(at + 1, query.shape[0] - 1)] != block)
        self.begins, self.ends = self.active & first, self.active & last
        where = (b * walk.blocks + block) * _BOUNDS
        self.bounds = [bounds[where + i] for i in range(_BOUNDS)]

    def each_part(self, run: Callable[[Any, Any], None], spans: Sequence[Any]) -> None:
        """Call ``run(keys, seen)`` for the parts of the block of keys that the mask needs.

        ``keys`` is the part's slice of the block, and ``seen()`` the mask bool[keys, queries];
        ``None``: all is allowed.
        """
        start, end, parent_start, parent_end, full_start, full_end = self.bounds
        part = self.size.part
        for inside in range(0, self.size.key, part):
            begin = self.key * self.size.key + inside
            some = (begin < end) & (begin + part > start)
            some |= (begin < parent_end) & (begin + part > parent_start)
            full = (begin >= full_start) & (begin + part <= full_end)

            def seen(begin: Any = begin) -> jax.Array:
                shape = (part, self.size.query)
                return allowed(
                    begin + jax.lax.broadcasted_iota(jnp.int32, shape, 0), *(x[0] for x in spans)
                )

            keys = pl.ds(inside, part)
            pl.when(self.active & full)(functools.partial(run, keys, None))
            pl.when(self.active & some & ~full)(functools.partial(run, keys, seen))


def _plan(
    spans: Spans, batch: int, num_keys: int, form: Form
) -> tuple[_Walk, list[jax.Array], jax.Array, Callable[[Any], Any]]:
    """Return static arguments; the scalars of the steps; their number; a maker of index maps."""
    size = form.sizes
    of = ranges(spans, size.query)
    listed = steps(needed(of, num_keys // size.key, size.key))
    walk = _Walk(form, listed.query.shape[1], of.start.shape[1])
    scalars = [
        jnp.broadcast_to(x, (batch, *x.shape[1:])).reshape(-1)
        for x in (*listed, jnp.stack(of, axis=-1))
    ]

    def at(index: Callable[..., Any]) -> Callable[..., Any]:
        def of_step(*args: Any) -> Any:
            grid, (query, key, *_) = args[:-4], args[-4:]
            where = grid[0] * walk.most + grid[-1]
            return index(*grid, query[where], key[where])

        return of_step

    return walk, scalars, jnp.max(listed.count), at


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans, form: Form
) -> tuple[jax.Array, jax.Array]:
    """Compute attention.

    Args:
        q: [B, N, T, H] queries; T is a multiple of the size of their blocks.
        k: [B, K, S, H] keys; K divides N, and S is a multiple of the size of their blocks.
        v: [B, K, S, H] values.
        spans: the mask, of [B, T].
        form: static arguments.

    Returns:
        [B, N, T, H] in ``q``'s dtype, zeros for a query without keys; and f32[B, N, 1, T], the
        logarithm to base 2 of the sum of the exponentials of the scores, for :func:`backward`.
    """
    batch, heads, dim, length = q.shape
    size, group = form.sizes, heads // k.shape[1]
    walk, scalars, width, at = _plan(spans, batch, k.shape[3], form)
    of_query = pl.BlockSpec((1, 1, dim, size.query), at(lambda b, n, w, i, j: (b, n, 0, i)))
    of_key = pl.BlockSpec((1, 1, dim, size.key), at(lambda b, n, w, i, j: (b, n // group, 0, j)))
    row = pl.BlockSpec((1, 1, size.query), at(lambda b, n, w, i, j: (b, 0, i)))
    per_head = pl.BlockSpec((1, 1, 1, size.query), at(lambda b, n, w, i, j: (b, n, 0, i)))
    rows = [jnp.broadcast_to(x[:, None], (batch, 1, length)) for x in spans if x is not None]
    run = pl.pallas_call(
        functools.partial(_forward, walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, heads, width),
            in_specs=[of_query, of_key, of_key, *[row] * len(rows)],
            out_specs=[of_query, per_head],
            scratch_shapes=[
                pltpu.VMEM((dim, size.query), jnp.float32),
                pltpu.VMEM((1, size.query), jnp.float32),
                pltpu.VMEM((1, size.query), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=form.interpret,
        name="flash_forward",
    )
    return run(*scalars, q, k, v, *rows)


def _forward(walk: _Walk, *refs: Any) -> None:
    scalars, (q_ref, k_ref, v_ref, *rows) = refs[:4], refs[4:]
    spans, (o_ref, lse_ref, sum_ref, most_ref, total_ref) = rows[:-5], rows[-5:]
    form, step = walk.form, _Step(walk, scalars, pl.program_id(2))

    @pl.when(step.begins)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)
        most_ref[...] = jnp.full_like(most_ref, HIDDEN)
        total_ref[...] = jnp.zeros_like(total_ref)

    def part(keys: Any, seen: Callable[[], jax.Array] | None) -> None:
        v = v_ref[0, 0, :, keys]
        score, _ = scores(form, dot(k_ref[0, 0, :, keys], q_ref[0, 0], _FIRST))
        if seen is not None:
            score = jnp.where(seen(), score, HIDDEN)
        most = jnp.maximum(most_ref[...], jnp.max(score, axis=0, keepdims=True))
        shrink, weight = jnp.exp2(most_ref[...] - most), jnp.exp2(score - most)
        most_ref[...] = most
        total_ref[...] = total_ref[...] * shrink + jnp.sum(weight, axis=0, keepdims=True)
        sum_ref[...] = sum_ref[...] * shrink + dot(v, weight.astype(v.dtype), _INNER)

    step.each_part(part, spans)

    @pl.when(step.ends)
    def _() -> None:
        some, total, lse_ref[0, 0] = ended(most_ref[...], total_ref[...])
        o_ref[0, 0] = jnp.where(some, sum_ref[...] / total, 0.0).astype(o_ref.dtype)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: Spans,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    form: Form,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of queries, keys and values in one call.

    The gradients of all keys and values of a head stay in fast memory.

    Args:
        q: as in :func:`forward`, like ``k``, ``v``, ``spans`` and ``form``.
        d_out: [B, N, T, H], gradient of the output.
        lse: second result of :func:`forward`.
        delta: f32[B, N, 1, T], the products of outputs and their gradients, summed.
    """
    batch, heads, dim, length = q.shape
    size, kv_heads, keys = form.sizes, k.shape[1], k.shape[3]
    group = heads // kv_heads
    walk, scalars, width, at = _plan(spans, batch, keys, form)
    of_query = pl.BlockSpec(
        (1, 1, dim, size.query), at(lambda b, n, g, w, i, j: (b, n * group + g, 0, i))
    )
    of_key = pl.BlockSpec((1, 1, dim, size.key), at(lambda b, n, g, w, i, j: (b, n, 0, j)))
    row = pl.BlockSpec((1, 1, size.query), at(lambda b, n, g, w, i, j: (b, 0, i)))
    per_head = pl.BlockSpec(
        (1, 1, 1, size.query), at(lambda b, n, g, w, i, j: (b, n * group + g, 0, i))
    )
    whole = pl.BlockSpec((1, 1, dim, keys), at(lambda b, n, g, w, i, j: (b, n, 0, 0)))
    rows = [jnp.broadcast_to(x[:, None], (batch, 1, length)) for x in spans if x is not None]
    run = pl.pallas_call(
        functools.partial(_backward, walk, group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, group, width),
            in_specs=[of_query, of_key, of_key, of_query, per_head, per_head, *[row] * len(rows)],
            out_specs=[of_query, whole, whole],
            scratch_shapes=[
                pltpu.VMEM((dim, size.query), jnp.float32),
                pltpu.VMEM((keys // size.part, dim, size.part), jnp.float32),
                pltpu.VMEM((keys // size.part, dim, size.part), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_MEMORY,
        ),
        interpret=form.interpret,
        name="flash_backward",
    )
    return run(*scalars, q, k, v, d_out, lse, delta, *rows)


def _backward(walk: _Walk, group: int, *refs: Any) -> None:
    scalars, (q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, *rows) = refs[:4], refs[4:]
    spans, (dq_ref, dk_ref, dv_ref, dq_sum, dk_sum, dv_sum) = rows[:-6], rows[-6:]
    g, w = pl.program_id(2), pl.program_id(3)
    form, step = walk.form, _Step(walk, scalars, w)

    @pl.when((g == 0) & (w == 0))
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when(step.begins)
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

    def part(keys: Any, seen: Callable[[], jax.Array] | None) -> None:
        q, d_out, k, v = q_ref[0, 0], d_out_ref[0, 0], k_ref[0, 0, :, keys], v_ref[0, 0, :, keys]
        score, slope = scores(form, dot(k, q, _FIRST))
        weight = jnp.exp2(score - lse_ref[0, 0])
        if seen is not None:
            weight = jnp.where(seen(), weight, 0.0)
        here = (step.key * form.sizes.key + keys.start) // keys.size
        dv_sum[here] += dot(d_out, weight.astype(q.dtype), _OUTER)
        d_weight = dot(v, d_out, _FIRST)
        d_score = weight * (d_weight - delta_ref[0, 0])
        d_score = d_score if slope is None else d_score * slope
        d_score = (d_score * form.factor).astype(q.dtype)
        dk_sum[here] += dot(q, d_score, _OUTER)
        dq_sum[...] += dot(k, d_score, _INNER)

    step.each_part(part, spans)

    @pl.when(step.ends)
    def _() -> None:
        dq_ref[0, 0] = dq_sum[...].astype(dq_ref.dtype)

    @pl.when((g == group - 1) & (w == pl.num_programs(3) - 1))
    def _() -> None:
        for i in range(dk_sum.shape[0]):
            keys = pl.ds(i * form.sizes.part, form.sizes.part)
            dk_ref[0, 0, :, keys] = dk_sum[i].astype(dk_ref.dtype)
            dv_ref[0, 0, :, keys] = dv_sum[i].astype(dv_ref.dtype)


def sizes_for(length: int) -> Sizes:
    """Choose the sizes of blocks for sequences of ``length`` tokens."""
    lanes = 128
    if length <= 1024:
        whole = -(-length // lanes) * lanes
        return Sizes(whole, whole, whole)
    return Sizes(256, 1024, 256)
