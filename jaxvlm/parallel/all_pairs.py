"""All pairs of rows and columns, tile by tile: rows stay on their device, columns go around a ring.

For losses over pairs: queries against the documents of all devices, where no device ever holds all
documents or all pairs. A device holds its own rows, one other device's columns, and one tile of
their pairs; the backward pass goes around the ring again and recomputes each tile.

Sources: the ring of SigLIP, arXiv 2303.15343, section 3; tiles with an online softmax, Inf-CL,
arXiv 2410.17243; the online softmax, arXiv 1805.02867.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxvlm.config import ConfigError
from jaxvlm.parallel.mesh import BATCH_AXES, batch_shards
from jaxvlm.parallel.per_device import free_axes


class PairSide(NamedTuple):
    """Rows or columns (leading dim of all leaves), or values that all pairs share (no such dim)."""

    embeddings: Any
    """Trees of float arrays; only these have gradients."""
    metadata: Any = ()
    """Trees of arrays without gradients: keys, masks, thresholds."""


class PairSides(NamedTuple):
    """What a tile of pairs is computed from."""

    rows: PairSide
    columns: PairSide
    shared: PairSide


@runtime_checkable
class PairTile(Protocol):
    """A reduction over all columns for each row.

    Pure functions of one tile of r rows and c columns. Rows and columns that are zero in every
    leaf are padding and must not contribute. Hashable.
    """

    def start(self, rows: PairSide) -> Any:
        """Return the initial carry over columns, a tree [r, ...]."""
        ...

    def tile(self, sides: PairSides) -> Any:
        """Return the differentiable part of a tile, a tree [r, c, ...], from ``embeddings``."""
        ...

    def add(self, carry: Any, tile: Any, sides: PairSides) -> Any:
        """Add the tile's columns to ``carry``; columns may come in any order."""
        ...

    def finish(self, carry: Any, rows: PairSide) -> Any:
        """Return the result, a tree [r, ...]."""
        ...

    def slope(self, carry: Any, d_result: Any, tile: Any, sides: PairSides) -> Any:
        """Return the cotangent of ``tile``, from the final carry and the result's cotangent."""
        ...


class _Plan(NamedTuple):
    """Static arguments."""

    reduction: PairTile
    ring: int
    """Devices in the ring; 1: columns stay on their device."""
    tile_size: int


def all_pairs(
    reduction: PairTile,
    rows: PairSide,
    columns: PairSide,
    shared: PairSide,
    tile_size: int,
    mesh: Mesh | None = None,
    around: bool = True,
) -> Any:
    """Reduce over all columns for every row.

    Temporaries are a few tiles of ``tile_size`` by ``tile_size`` pairs and a few copies of one
    device's rows and columns.

    Args:
        reduction: computes and reduces a tile.
        rows: leaves [b, ...], split over the mesh's batch axes.
        columns: leaves [b', ...], split over the mesh's batch axes.
        shared: leaves that are replicated on every device.
        tile_size: most rows, and most columns, of a tile.
        mesh: the device mesh; ``None``: one device.
        around: whether columns go to all devices; ``False``: rows are compared with the columns
            of their own device alone.

    Returns:
        A tree [b, ...], split as the rows.

    Raises:
        ConfigError: the mesh's batch axes do not divide b.
    """
    parts = 1 if mesh is None else batch_shards(mesh)
    if mesh is None or mesh.size == 1:
        return _reduce(_Plan(reduction, 1, tile_size), rows, columns, shared)
    for side in (rows, columns):
        count = jax.tree.leaves(side)[0].shape[0]
        if count % parts:
            raise ConfigError(
                f"{count} examples can't be split over the {parts} shards of mesh axes "
                f"{'×'.join(BATCH_AXES)}: config.data.batch_size must be a multiple of {parts}"
            )
    split, everywhere = PartitionSpec(BATCH_AXES), PartitionSpec()
    run = jax.shard_map(
        functools.partial(_reduce, _Plan(reduction, parts if around else 1, tile_size)),
        in_specs=(split, split, everywhere),
        out_specs=split,
        check_vma=False,
        **free_axes(mesh),
    )
    return run(rows, columns, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce(plan: _Plan, rows: PairSide, columns: PairSide, shared: PairSide) -> Any:
    return _forward(plan, rows, columns, shared)[0]


def _forward(plan: _Plan, rows: PairSide, columns: PairSide, shared: PairSide) -> tuple[Any, Any]:
    reduction, cut_rows = plan.reduction, _cut(rows, plan.tile_size)

    def by_columns(carry: Any, some: PairSide) -> tuple[Any, None]:
        def by_rows(_: None, x: Any) -> tuple[None, Any]:
            carry, mine = x
            sides = PairSides(mine, some, shared)
            return None, reduction.add(carry, reduction.tile(sides), sides)

        return jax.lax.scan(by_rows, None, (carry, cut_rows))[1], None

    def by_device(x: Any, _: None) -> tuple[Any, None]:
        carry, columns = x
        carry, _ = jax.lax.scan(by_columns, carry, columns)
        return (carry, _pass_on(plan, columns)), None

    start = (jax.vmap(reduction.start)(cut_rows), _cut(columns, plan.tile_size))
    (carry, _), _ = jax.lax.scan(by_device, start, None, length=plan.ring)
    result = jax.vmap(reduction.finish)(carry, cut_rows)
    return _joined(result, rows), (rows, columns, shared, carry)


def _backward(plan: _Plan, kept: Any, d_result: Any) -> tuple[PairSide, PairSide, PairSide]:
    rows, columns, shared, carry = kept
    reduction, cut_rows = plan.reduction, _cut(rows, plan.tile_size)
    d_result = _cut(d_result, plan.tile_size)

    def tile_gradient(mine: PairSide, some: PairSide, carry: Any, d: Any) -> Any:
        sides = PairSides(mine, some, shared)

        def tile(*embeddings: Any) -> Any:
            given = (s._replace(embeddings=x) for s, x in zip(sides, embeddings, strict=True))
            return reduction.tile(PairSides(*given))

        value, back = jax.vjp(tile, *(side.embeddings for side in sides))
        return back(reduction.slope(carry, d, value, sides))

    def by_columns(carried: Any, x: tuple[PairSide, Any]) -> tuple[Any, Any]:
        (d_rows, d_shared), (some, d_some) = carried, x

        def by_rows(carried: Any, x: Any) -> tuple[Any, Any]:
            d_mine, d_columns, d_common = tile_gradient(x[0], some, *x[1:])
            return _plus(carried, (d_columns, d_common)), d_mine

        start = (d_some, d_shared)
        (d_some, d_shared), more = jax.lax.scan(by_rows, start, (cut_rows, carry, d_result))
        return (_plus(d_rows, more), d_shared), d_some

    def by_device(x: Any, _: None) -> tuple[Any, None]:
        carried, travelling = x
        carried, d_columns = jax.lax.scan(by_columns, carried, travelling)
        return (carried, _pass_on(plan, (travelling[0], d_columns))), None

    cut_columns = _cut(columns, plan.tile_size)
    embeddings = (cut_rows.embeddings, shared.embeddings, cut_columns.embeddings)
    nothing = jax.tree.map(jnp.zeros_like, embeddings)
    start = (nothing[:2], (cut_columns, nothing[2]))
    ((d_rows, d_shared), home), _ = jax.lax.scan(by_device, start, None, length=plan.ring)
    d_rows, d_columns = _joined(d_rows, rows), _joined(home[1], columns)
    return PairSide(d_rows, None), PairSide(d_columns, None), PairSide(d_shared, None)


_reduce.defvjp(_forward, _backward)


def _plus(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _pass_on(plan: _Plan, tree: Any) -> Any:
    if plan.ring == 1:
        return tree
    pairs = [(i, (i + 1) % plan.ring) for i in range(plan.ring)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, BATCH_AXES, pairs), tree)


def _cut(tree: Any, tile_size: int) -> Any:
    """[n, ...] -> [tiles, at most ``tile_size``, ...], tiles of one size, padded with zeros."""

    def one(x: jax.Array) -> jax.Array:
        parts = math.ceil(len(x) / tile_size)
        size = math.ceil(len(x) / parts)
        x = jnp.pad(x, [(0, parts * size - len(x))] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(parts, size, *x.shape[1:])

    return jax.tree.map(one, tree)


def _joined(tree: Any, like: PairSide) -> Any:
    """The inverse of :func:`_cut`."""
    count = jax.tree.leaves(like)[0].shape[0]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], tree)
