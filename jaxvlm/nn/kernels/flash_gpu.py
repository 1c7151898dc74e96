"""Flash attention for NVIDIA GPUs since Ampere, which visits only the blocks that the mask needs.

Each program owns a block of queries or of keys, and loops over the other side's blocks twice: over
those with masked pairs, and over the rest, which computes no masks. Arrays are read in place.

Source: FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxvlm.nn.kernels.blocks import Visits, visits
from jaxvlm.nn.kernels.scores import HIDDEN, Form, dot, ended, scores
from jaxvlm.nn.mask import Spans, allowed

_LEAST = 16  # smallest dim of a product of matrices in Triton
_OUTER, _INNER = ((((1,), (b,)), ((), ())) for b in (1, 0))  # a b^T, and a b


class Block(NamedTuple):
    """How a kernel divides its work; sizes are in tokens and powers of 2."""

    own: int
    """Size of the block that a program owns."""
    other: int
    """Size of the blocks that it loops over."""
    warps: int
    stages: int
    """Steps of the loop whose loads are under way."""


class Sizes(NamedTuple):
    """The blocks of the three kernels."""

    forward: Block
    queries: Block
    """Of the gradient of queries."""
    keys: Block
    """Of the gradients of keys and values: it owns keys and loops over queries."""

    @property
    def unit(self) -> int:
        """The intervals' length is a multiple of this."""
        return max(max(block.own, block.other) for block in self)


def sizes_for(head_dim: int, dtype: Any, shared: int) -> Sizes:
    """Choose the sizes of blocks.

    Args:
        head_dim: H.
        dtype: of queries, keys and values.
        shared: bytes of shared memory that a program can have.
    """
    if jnp.dtype(dtype).itemsize > 2:  # not on tensor cores
        small = Block(32, 32, 8, 2) if head_dim <= 128 else Block(16, 16, 4, 2)
        return Sizes(small, small, small)
    if head_dim <= 64:
        return Sizes(Block(128, 64, 4, 3), Block(128, 64, 8, 2), Block(128, 64, 8, 2))
    if head_dim <= 128:
        return Sizes(Block(128, 64, 8, 3), Block(128, 64, 8, 2), Block(128, 64, 8, 2))
    if shared >= 160 * 2**10:
        return Sizes(Block(64, 32, 4, 3), Block(64, 32, 8, 2), Block(64, 32, 8, 2))
    return Sizes(Block(64, 32, 8, 2), Block(32, 32, 4, 2), Block(32, 32, 4, 2))


class _Tensor:
    """Reads and writes tokens of an array [B, T, N, H].

    H is divided into one or two powers of 2, so that 80 costs 64 + 16 and not 128.
    """

    def __init__(self, ref: Any, b: Any, n: Any):
        self.ref, self.b, self.n = ref, b, n
        self.parts = _parts(ref.shape[3])

    def _at(
        self, part: tuple[int, int], start: Any, size: int, bounded: bool
    ) -> tuple[Any, jax.Array | None]:
        """Return a tile [size, width], and a mask of what is in the array; ``None``: all is."""
        _, length, _, dim = self.ref.shape
        first, width = part
        token = start + jnp.arange(size, dtype=jnp.int32)[:, None]
        place = first + jnp.arange(width, dtype=jnp.int32)[None]
        mask = None
        if first + width > dim:
            mask = jnp.broadcast_to(place < dim, (size, width))
        if bounded and length % size:
            inside = jnp.broadcast_to(token < length, (size, width))
            mask = inside if mask is None else mask & inside
        return self.ref.at[self.b, token, self.n, place], mask

    def read(self, start: Any, size: int, bounded: bool = True) -> list[jax.Array]:
        """Return parts [size, width]; zeros beyond the array, if ``bounded``."""
        tiles = (self._at(part, start, size, bounded) for part in self.parts)
        return [triton.load(x, mask=m, other=None if m is None else 0) for x, m in tiles]

    def write(self, start: Any, values: Sequence[jax.Array]) -> None:
        """Write parts; what is beyond the array is dropped."""
        for part, value in zip(self.parts, values, strict=True):
            tile, mask = self._at(part, start, value.shape[0], True)
            triton.store(tile, value.astype(self.ref.dtype), mask=mask)

    def zeros(self, size: int) -> list[jax.Array]:
        """Return parts of zeros, in float32."""
        return [jnp.zeros((size, width), jnp.float32) for _, width in self.parts]


def _parts(dim: int) -> list[tuple[int, int]]:
    """First indices and widths of the parts of a head's dims."""
    whole = max(_LEAST, pl.next_power_of_2(dim))
    rest = max(_LEAST, pl.next_power_of_2(max(1, dim - whole // 2)))
    if whole // 2 < _LEAST or whole // 2 + rest >= whole:
        return [(0, whole)]
    return [(0, whole // 2), (whole // 2, rest)]


def _products(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """f32[rows of a, rows of b]."""
    return functools.reduce(jnp.add, (dot(x, y, _OUTER) for x, y in zip(a, b, strict=True)))


def _added(total: Sequence[jax.Array], a: jax.Array, b: Sequence[jax.Array]) -> list[jax.Array]:
    """Return ``total`` plus a matrix times each part of ``b``."""
    return [t + dot(a.astype(x.dtype), x, _INNER) for t, x in zip(total, b, strict=True)]


def _walk(refs: Visits, b: Any, i: Any, step: Callable[..., Any], carry: Any) -> Any:
    """Fold ``step(block, carry, masked)`` over the blocks that block ``i`` is paired with."""
    for runs, masked in ((refs.partial, True), (refs.full, False)):
        count = runs.end.shape[2]
        ends, shifts = ([x[b, i, r] for r in range(count)] for x in runs)

        def run(at: Any, carry: Any, ends: Any = ends, shifts: Any = shifts, masked: Any = masked):
            block = at + shifts[-1]
            for end, shift in zip(ends[-2::-1], shifts[-2::-1], strict=True):
                block = jnp.where(at < end, at + shift, block)
            return step(block, carry, masked)

        carry = jax.lax.fori_loop(0, ends[-1], run, carry)
    return carry


def _call(kernel: Any, name: str, block: Block, grid: Any, out: Any, form: Form) -> Any:
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out,
        compiler_params=triton.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=form.interpret,
        name=name,
    )


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans, form: Form
) -> tuple[jax.Array, jax.Array]:
    """Compute attention.

    Args:
        q: [B, T, N, H] queries.
        k: [B, T, K, H] keys; K divides N.
        v: [B, T, K, H] values.
        spans: the mask, of [B, P]: T, padded to a multiple of ``form.sizes.unit``.
        form: static arguments; ``sizes`` are of this module.

    Returns:
        [B, T, N, H] in ``q``'s dtype, zeros for a query without keys; and f32[B, N, P], the
        logarithm to base 2 of the sum of the exponentials of the scores, for :func:`backward`.
    """
    batch, _, heads, _ = q.shape
    group, block, length = heads // k.shape[2], form.sizes.forward, spans.start.shape[1]

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, rows: Any, pairs: Any, o_ref: Any, lse_ref: Any):
        n, b = pl.program_id(1), pl.program_id(2)
        i = _last_first()
        q_at, o_at = _Tensor(q_ref, b, n), _Tensor(o_ref, b, n)
        k_at, v_at = (_Tensor(x, b, n // group) for x in (k_ref, v_ref))
        mine = pl.ds(i * block.own, block.own)
        q, spans = q_at.read(mine.start, block.own), _of_rows(rows, b, mine)

        def step(j: Any, carry: Any, masked: bool) -> Any:
            out, most, total = carry
            start = j * block.other
            score, _ = scores(form, _products(q, k_at.read(start, block.other, masked)))
            if masked:
                score = jnp.where(_seen(start, block.other, spans, 0), score, HIDDEN)
            after = jnp.maximum(most, jnp.max(score, axis=1))
            shrink, weight = jnp.exp2(most - after), jnp.exp2(score - after[:, None])
            total = total * shrink + jnp.sum(weight, axis=1)
            out = [x * shrink[:, None] for x in out]
            return _added(out, weight, v_at.read(start, block.other, masked)), after, total

        most = jnp.full((block.own,), HIDDEN, jnp.float32)
        carry = o_at.zeros(block.own), most, jnp.zeros_like(most)
        out, most, total = _walk(pairs, b, i, step, carry)
        some, total, lse_ref[b, n, mine] = ended(most, total)
        o_at.write(mine.start, [jnp.where(some[:, None], x / total[:, None], 0.0) for x in out])

    grid = length // block.own, heads, batch
    lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype), lse
    run = _call(kernel, "flash_forward", block, grid, out, form)
    return run(q, k, v, spans, visits(spans, block.own, block.other, of_keys=False))


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
    """Compute the gradients of queries, keys and values.

    Args:
        q: as in :func:`forward`, like ``k``, ``v``, ``spans`` and ``form``.
        d_out: [B, T, N, H], gradient of the output.
        lse: second result of :func:`forward`.
        delta: f32[B, N, P], the products of outputs and their gradients, summed; 0 beyond T.
    """
    args = q, k, v, d_out, lse, delta, spans
    return _of_queries(*args, form), *_of_keys(*args, form)


def _of_queries(
    q: Any, k: Any, v: Any, d_out: Any, lse: Any, delta: Any, spans: Spans, form: Form
) -> jax.Array:
    batch, _, heads, _ = q.shape
    group, block, length = heads // k.shape[2], form.sizes.queries, spans.start.shape[1]

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, rows, pairs, dq_ref = refs
        n, b = pl.program_id(1), pl.program_id(2)
        i = _last_first()
        k_at, v_at = (_Tensor(x, b, n // group) for x in (k_ref, v_ref))
        mine = pl.ds(i * block.own, block.own)
        q, d_out = (_Tensor(x, b, n).read(mine.start, block.own) for x in (q_ref, d_out_ref))
        lse, delta = (x[b, n, mine][:, None] for x in (lse_ref, delta_ref))
        spans, dq_at = _of_rows(rows, b, mine), _Tensor(dq_ref, b, n)

        def step(j: Any, dq: Any, masked: bool) -> Any:
            start = j * block.other
            k = k_at.read(start, block.other, masked)
            score, slope = scores(form, _products(q, k))
            weight = jnp.exp2(score - lse)
            if masked:
                weight = jnp.where(_seen(start, block.other, spans, 0), weight, 0.0)
            d_score = weight * (_products(d_out, v_at.read(start, block.other, masked)) - delta)
            return _added(dq, d_score if slope is None else d_score * slope, k)

        dq = _walk(pairs, b, i, step, dq_at.zeros(block.own))
        dq_at.write(mine.start, [x * form.factor for x in dq])

    grid = length // block.own, heads, batch
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    run = _call(kernel, "flash_backward_queries", block, grid, out, form)
    pairs = visits(spans, block.own, block.other, of_keys=False)
    return run(q, k, v, d_out, lse, delta, spans, pairs)


def _of_keys(
    q: Any, k: Any, v: Any, d_out: Any, lse: Any, delta: Any, spans: Spans, form: Form
) -> tuple[jax.Array, jax.Array]:
    batch, _, kv_heads, _ = k.shape
    group, block, length = q.shape[2] // kv_heads, form.sizes.keys, spans.start.shape[1]

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, rows, pairs, dk_ref, dv_ref = refs
        j, n, b = (pl.program_id(axis) for axis in range(3))
        begin = j * block.own
        k, v = (_Tensor(x, b, n).read(begin, block.own) for x in (k_ref, v_ref))
        dk_at, dv_at = (_Tensor(x, b, n) for x in (dk_ref, dv_ref))

        def of_head(g: Any, sums: Any) -> Any:
            head = n * group + g
            q_at, d_out_at = (_Tensor(x, b, head) for x in (q_ref, d_out_ref))

            def step(i: Any, sums: Any, masked: bool) -> Any:
                dk, dv = sums
                theirs = pl.ds(i * block.other, block.other)
                q, d_out = (x.read(theirs.start, block.other, masked) for x in (q_at, d_out_at))
                lse, delta = (x[b, head, theirs][None] for x in (lse_ref, delta_ref))
                score, slope = scores(form, _products(k, q))
                weight = jnp.exp2(score - lse)
                if masked:
                    spans = _of_rows(rows, b, theirs)
                    weight = jnp.where(_seen(begin, block.own, spans, 1), weight, 0.0)
                dv = _added(dv, weight, d_out)
                d_score = weight * (_products(v, d_out) - delta)
                return _added(dk, d_score if slope is None else d_score * slope, q), dv

            return _walk(pairs, b, j, step, sums)

        sums = dk_at.zeros(block.own), dv_at.zeros(block.own)
        dk, dv = jax.lax.fori_loop(0, group, of_head, sums)
        dk_at.write(begin, [x * form.factor for x in dk])
        dv_at.write(begin, dv)

    grid = length // block.own, kv_heads, batch
    out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v))
    run = _call(kernel, "flash_backward_keys", block, grid, out, form)
    pairs = visits(spans, block.other, block.own, of_keys=True)
    return run(q, k, v, d_out, lse, delta, spans, pairs)


def _last_first() -> Any:
    """Number of the program's block: those with most keys, if causal, are started first."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


def _of_rows(spans: Spans, b: Any, queries: Any) -> list[jax.Array]:
    """The intervals of a block of queries, each i32[size]."""
    return [x[b, queries] for x in spans if x is not None]


def _seen(start: Any, size: int, spans: Sequence[jax.Array], axis: int) -> jax.Array:
    """bool: pairs of queries, along ``axis``, and ``size`` keys from ``start`` on that attend."""
    key = start + jnp.arange(size, dtype=jnp.int32)
    return allowed(jnp.expand_dims(key, axis), *(jnp.expand_dims(x, 1 - axis) for x in spans))
