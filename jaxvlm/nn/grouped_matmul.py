"""Grouped matmul (each group of rows has its own matrix): XLA's ragged_dot, or kernels.

On TPUs ``jax.lax.ragged_dot`` is a kernel, except for the gradient with respect to the matrices,
which :mod:`jaxvlm.nn.kernels.grouped_tpu` computes. On GPUs XLA (JAX 0.10 to 0.12) copies the rows
once per group, with zeros for the rows of other groups, and multiplies all copies: memory and FLOPs
are multiplied by the number of groups. The kernel in this module, for GPUs, reads rows in place and
allocates nothing but its result.

Source: the tiles of MegaBlocks, arXiv 2211.15841, per group as in JAX's ``ragged_dot_mgpu``; in
Triton, since that one supports Hopper only.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxvlm.nn.kernels import grouped_tpu
from jaxvlm.nn.kernels.grouped_tpu import OUTER

MATMULS = ("auto", "xla")
"""Values of the setting ``expert_matmul``; see :func:`kernel_of`."""
FORWARD, BACKWARD = "grouped_rows", "grouped_rows_back"
"""Names of kernels: [M, K] x [G, K, N] and [M, N] x [G, K, N]; see :data:`OUTER` too."""
_TILE, _DEPTH = 128, 32
"""Rows and columns of a tile of the result, and elements of the contracted dim per load: fastest
on an H100 for 128 experts of 2048 x 768, by tokamax's measurements."""
_SHARED = 2**16
"""Bytes of shared memory for a tile's prefetched loads; every GPU since Ampere has more."""
_LEAST = 16
"""Smallest dim of a matmul in Triton."""


def kernel_of(name: str, platform: str, capability: str = "") -> str:
    """Return whose kernels a grouped matmul and its gradients run.

    Args:
        name: one of :data:`MATMULS`.
        platform: platform of the mesh's devices: cpu | gpu | tpu.
        capability: compute capability of a GPU, such as "9.0"; "" (unknown) counts as sufficient.

    Returns:
        ``gpu``: three Triton kernels instead of XLA's ragged_dot. ``tpu``: ragged_dot, but a kernel
        for the gradient with respect to the matrices. "": ragged_dot.
    """
    if name != "auto" or platform not in ("gpu", "tpu"):
        return ""
    known = re.fullmatch(r"(\d+)\.\d+", capability or "8.0")  # AMD's are gfx90a
    return platform if platform == "tpu" or (known is not None and int(known[1]) >= 8) else ""


def grouped_matmul(
    rows: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    kernel: str,
    tail: bool,
    interpret: bool = False,
) -> jax.Array:
    """Multiply each group's rows by its matrix; differentiable in both.

    Args:
        rows: [M, K], the rows of group 0, then those of group 1, ...
        w: [G, K, N], in ``rows``' dtype.
        sizes: i32[G], rows of each group; may be 0.
        kernel: a value of :func:`kernel_of`. Forward-mode and second derivatives are supported
            without kernels only.
        tail: whether rows follow the last group's. Their result and their gradient are zero.
        interpret: run kernels on any platform, slowly.

    Returns:
        [M, N] in ``rows``' dtype; kernels accumulate in float32.
    """
    if kernel == "gpu":
        return _by_kernels(rows, w, sizes, kernel, interpret)
    if not tail:
        return _ragged(rows, w, sizes, kernel, interpret)
    grouped = (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]
    # XLA leaves the tail undefined, in the result and in the gradient with respect to the rows.
    inside = jnp.where(grouped, rows, 0)
    return jnp.where(grouped, _ragged(inside, w, sizes, kernel, interpret), 0)


def _ragged(
    rows: jax.Array, w: jax.Array, sizes: jax.Array, kernel: str, interpret: bool
) -> jax.Array:
    if kernel:
        return _by_kernels(rows, w, sizes, kernel, interpret)
    return jax.lax.ragged_dot(rows, w, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _by_kernels(
    rows: jax.Array, w: jax.Array, sizes: jax.Array, kernel: str, interpret: bool
) -> jax.Array:
    if kernel == "tpu":
        return jax.lax.ragged_dot(rows, w, sizes)
    return _rows_times(rows, w, sizes, False, interpret)


def _fwd(
    rows: Any, w: Any, sizes: Any, kernel: str, interpret: bool
) -> tuple[jax.Array, tuple[Any, ...]]:
    out = _by_kernels(rows.value, w.value, sizes.value, kernel, interpret)
    # Each operand is saved for the other's gradient: with frozen experts, no rows are saved.
    saved = rows.value if w.perturbed else None, w.value if rows.perturbed else None
    return out, (*saved, sizes.value)


def _bwd(kernel: str, interpret: bool, saved: tuple[Any, ...], d_out: Any) -> tuple[Any, Any, None]:
    rows, w, sizes = saved
    if isinstance(d_out, SymbolicZero):
        return None, None, None
    d_rows = d_w = None
    if w is not None and kernel == "tpu":
        like = jax.ShapeDtypeStruct((len(d_out), w.shape[1]), w.dtype)
        back = jax.linear_transpose(lambda rows: jax.lax.ragged_dot(rows, w, sizes), like)
        (d_rows,) = back(d_out)
    elif w is not None:
        d_rows = _rows_times(d_out, w, sizes, True, interpret)
    if rows is not None:
        matrices = grouped_tpu.matrices if kernel == "tpu" else _matrices
        d_w = matrices(rows, d_out, sizes, interpret)
    return d_rows, d_w, None


_by_kernels.defvjp(_fwd, _bwd, symbolic_zeros=True)


class _Span(NamedTuple):
    """Range of indices of a dim that a tile reads or writes."""

    start: Any
    size: int
    end: Any
    """First index that is out of the tile's bounds; ``None``: the whole tile is in bounds."""

    @property
    def inside(self) -> Any:
        """bool[size], mask of indices in bounds; ``None``: all are."""
        return None if self.end is None else self.start + jnp.arange(self.size) < self.end


def _cut(dim: int) -> int:
    """Return a tile's size along a dim: a power of two."""
    return max(_LEAST, min(_TILE, 1 << (dim - 1).bit_length()))


def _part(i: Any, size: int, dim: int) -> _Span:
    return _Span(i * size, size, dim if dim % size else None)


def _at(ref: Any, group: Any, a: _Span, b: _Span) -> tuple[Any, Any]:
    """Return a tile of ``ref`` (of its matrix ``group``, unless that is ``None``) and its mask."""
    from jax.experimental import pallas as pl  # slow to import

    place = (pl.ds(a.start, a.size), pl.ds(b.start, b.size))
    masks = [] if a.inside is None else [a.inside[:, None]]
    masks += [] if b.inside is None else [b.inside[None]]
    mask = None
    if masks:
        mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (a.size, b.size))
    return ref.at[place if group is None else (group, *place)], mask


def _read(ref: Any, group: Any, a: _Span, b: _Span) -> jax.Array:
    from jax.experimental.pallas import triton

    tile, mask = _at(ref, group, a, b)
    return triton.load(tile, mask=mask, other=None if mask is None else 0)


def _write(ref: Any, group: Any, a: _Span, b: _Span, value: jax.Array) -> None:
    from jax.experimental.pallas import triton

    tile, mask = _at(ref, group, a, b)
    triton.store(tile, value.astype(ref.dtype), mask=mask)


def _call(
    kernel: Any, name: str, out: jax.ShapeDtypeStruct, grid: tuple[int, ...], interpret: bool
) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    size = out.dtype.itemsize
    ahead = _SHARED // (2 * _TILE * _DEPTH * size)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=2 * size, num_stages=ahead),
        interpret=interpret,
        name=name,
    )


def _rows_times(
    rows: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool, interpret: bool
) -> jax.Array:
    """Compute [M, K] x [G, K, N] -> [M, N]; ``transposed``: the matrices are [G, N, K].

    Tiles start at a group's first row, so that no tile has rows of two groups. The number of tiles
    is a run-time value: programs are launched for the largest possible number, and each finds its
    tile by a cumulative sum of the groups' tile counts. Rows after the last group are one more
    group, whose sum over the contracted dim has no terms.
    """
    from jax.experimental import pallas as pl

    (M, K), G, N = rows.shape, w.shape[0], w.shape[1 if transposed else 2]
    tile, width, depth = _cut(M), _cut(N), min(_DEPTH, _cut(K))
    columns = math.ceil(N / width)
    ends = jnp.append(jnp.cumsum(sizes), M)
    tiles = jnp.cumsum((jnp.diff(ends, prepend=0) + tile - 1) // tile)
    missing = (1 << G.bit_length()) - len(tiles)  # up to a power of two
    tiles = jnp.pad(tiles, (0, missing), constant_values=jnp.iinfo(tiles.dtype).max)
    dims = (((1,), (1 if transposed else 0,)), ((), ()))

    def kernel(rows: Any, w: Any, ends: Any, tiles: Any, out: Any) -> None:
        # Programs of the same rows are adjacent, so that they hit the rows in the GPU's cache.
        number, column = pl.program_id(0) // columns, pl.program_id(0) % columns
        group = jnp.sum((tiles[...] <= number).astype(jnp.int32))

        @pl.when(group <= G)
        def _work() -> None:
            before = jnp.maximum(group - 1, 0)
            done = jnp.where(group > 0, tiles[before], 0)
            first = jnp.where(group > 0, ends[before], 0)
            mine = _Span(first + (number - done) * tile, tile, ends[group])
            to = _part(column, width, N)

            def add(i: Any, total: jax.Array) -> jax.Array:
                along = _part(i, depth, K)
                x = _read(rows, None, mine, along)
                y = _read(w, group, *((to, along) if transposed else (along, to)))
                return total + jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)

            total = jnp.zeros((tile, width), jnp.float32)
            steps = (group < G).astype(jnp.int32) * math.ceil(K / depth)
            _write(out, None, mine, to, jax.lax.fori_loop(0, steps, add, total))

    grid = ((math.ceil(M / tile) + G + 1) * columns,)
    out = jax.ShapeDtypeStruct((M, N), rows.dtype)
    call = _call(kernel, BACKWARD if transposed else FORWARD, out, grid, interpret)
    return call(rows, w, ends, tiles)


def _matrices(rows: jax.Array, d_out: jax.Array, sizes: jax.Array, interpret: bool) -> jax.Array:
    """Compute [M, K], [M, N] -> [G, K, N]: per group, rows transposed times ``d_out``."""
    from jax.experimental import pallas as pl

    (_, K), N, G = rows.shape, d_out.shape[1], sizes.shape[0]
    height, width = _cut(K), _cut(N)

    def kernel(rows: Any, d_out: Any, ends: Any, out: Any) -> None:
        group = pl.program_id(2)
        first = jnp.where(group > 0, ends[jnp.maximum(group - 1, 0)], 0)
        end = ends[group]
        row, column = _part(pl.program_id(0), height, K), _part(pl.program_id(1), width, N)

        def add(i: Any, total: jax.Array) -> jax.Array:
            along = _Span(first + i * _DEPTH, _DEPTH, end)
            x, y = _read(rows, None, along, row), _read(d_out, None, along, column)
            dims = (((0,), (0,)), ((), ()))
            return total + jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)

        total = jnp.zeros((height, width), jnp.float32)
        total = jax.lax.fori_loop(0, (end - first + _DEPTH - 1) // _DEPTH, add, total)
        _write(out, group, row, column, total)

    grid = (math.ceil(K / height), math.ceil(N / width), G)
    call = _call(kernel, OUTER, jax.ShapeDtypeStruct((G, K, N), rows.dtype), grid, interpret)
    return call(rows, d_out, jnp.cumsum(sizes))
