"""Gradient of grouped matrices on TPUs: tiles of each group's own rows, by Pallas.

XLA for TPUs (libtpu 0.0.42) multiplies all rows once per group, masked. Here a step multiplies one
tile of rows for one group, and a tile that holds rows of several groups is visited by each of them.

Source: the visits of MegaBlocks' grouped matmuls, arXiv 2211.15841, as in JAX's ``megablox``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

OUTER = "grouped_matrices"
"""Name of the kernel: [M, K], [M, N] to [G, K, N]."""
_LEAST, _MOST = 128, 512
"""Rows of a tile: the depth of a matmul. More are fewer additions to the sum in fast memory, and
more rows of other groups."""
_SIDE = 4096
"""Largest side of a tile of a matrix in bytes, so that tiles fit v5e's 16 MiB of fast memory."""


class _Visits(NamedTuple):
    """Tiles of rows and the groups that visit them, in order. Each is i32[steps] but the last."""

    group: jax.Array
    tile: jax.Array
    start: jax.Array
    """First row of the visiting group."""
    end: jax.Array
    num_active: jax.Array
    """i32[1], number of visits; those beyond it do nothing."""


def matrices(rows: jax.Array, d_out: jax.Array, sizes: jax.Array, interpret: bool) -> jax.Array:
    """Compute each group's rows, transposed, times its rows of ``d_out``.

    Args:
        rows: [M, K], the rows of group 0, then those of group 1, ...; rows after the last group's
            are not read.
        d_out: [M, N], in ``rows``' dtype.
        sizes: i32[G], rows of each group; may be 0.
        interpret: run on any platform, slowly.

    Returns:
        [G, K, N] in ``rows``' dtype, summed in float32.
    """
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import tpu as pltpu

    (M, K), N, G = rows.shape, d_out.shape[1], sizes.shape[0]
    depth = _depth(M, G)
    height, width = (min(dim, _SIDE // (2 * rows.dtype.itemsize)) for dim in (K, N))
    visits = _visits(M, depth, sizes)
    steps = len(visits.group)

    def of_rows(i: Any, j: Any, step: Any, _group: Any, tile: Any, *_: Any) -> tuple[Any, Any]:
        return tile[step], i

    def of_d_out(i: Any, j: Any, step: Any, _group: Any, tile: Any, *_: Any) -> tuple[Any, Any]:
        return tile[step], j

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(visits),
        grid=(pl.cdiv(K, height), pl.cdiv(N, width), steps),
        in_specs=[pl.BlockSpec((depth, height), of_rows), pl.BlockSpec((depth, width), of_d_out)],
        out_specs=pl.BlockSpec(
            (None, height, width), lambda i, j, step, group, *_: (group[step], i, j)
        ),
        scratch_shapes=[pltpu.VMEM((height, width), jnp.float32)],
    )
    size = rows.dtype.itemsize
    read = rows.size * pl.cdiv(N, width) + d_out.size * pl.cdiv(K, height) + G * K * N
    call = pl.pallas_call(
        _kernel(depth, steps),
        out_shape=jax.ShapeDtypeStruct((G, K, N), rows.dtype),
        grid_spec=spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * depth * steps * K * N, bytes_accessed=size * read, transcendentals=0
        ),
        interpret=interpret,
        name=OUTER,
    )
    return call(*visits, rows, d_out)


def _kernel(depth: int, steps: int) -> Callable[..., None]:
    """Return what a step does: add the product of a tile's own rows to its group's matrix."""
    from jax.experimental import pallas as pl

    def kernel(
        group: Any,
        tile: Any,
        start: Any,
        end: Any,
        count: Any,
        x: Any,
        y: Any,
        out: Any,
        total: Any,
    ) -> None:
        step = pl.program_id(2)
        mine = group[step]
        first = (step == 0) | (group[jnp.maximum(step - 1, 0)] != mine)
        last = (step == steps - 1) | (group[jnp.minimum(step + 1, steps - 1)] != mine)

        @pl.when(first)
        def _begin() -> None:
            total[...] = jnp.zeros_like(total)

        @pl.when((step < count[0]) & (start[step] < end[step]))
        def _add() -> None:
            at = tile[step] * depth + jax.lax.broadcasted_iota(jnp.int32, (depth, 1), 0)
            own = (at >= start[step]) & (at < end[step])
            # Both: another group's row may hold an infinity, and 0 times it is NaN.
            left, right = (jnp.where(own, ref[...], jnp.zeros_like(ref)) for ref in (x, y))
            dims = (((0,), (0,)), ((), ()))
            total[...] += jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)

        @pl.when(last)
        def _end() -> None:
            out[...] = total[...].astype(out.dtype)

    return kernel


def _depth(num_rows: int, groups: int) -> int:
    """Rows of a tile: a power of two, at most half of a group's rows where they are even."""
    half = num_rows // groups // 2
    return max(_LEAST, min(_MOST, 1 << max(half, 1).bit_length() - 1))


def _visits(num_rows: int, depth: int, sizes: jax.Array) -> _Visits:
    """List the visits: a group without rows has one too, which writes zeros.

    There are as many steps as there can be visits at most: each tile once, and once more for each
    group.
    """
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    tiles = jnp.where(sizes > 0, (ends + depth - 1) // depth - starts // depth, 1)
    done = jnp.cumsum(tiles)
    step = jnp.arange(-(-num_rows // depth) + len(sizes), dtype=jnp.int32)
    at = jnp.minimum(step, done[-1] - 1)  # a step that does nothing loads nothing
    group = jnp.searchsorted(done, at, side="right").astype(jnp.int32)
    # A group without rows at the very end would start after the last tile.
    tile = jnp.minimum(starts[group] // depth + at - (done - tiles)[group], (num_rows - 1) // depth)
    return _Visits(group, tile, starts[group], ends[group], done[-1:])
