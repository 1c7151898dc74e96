"""Every row meets every column: rows stay on their device, columns go round, a tile at a time.

What a loss over pairs needs: queries against the documents of all devices, where neither all
documents nor all pairs lie anywhere at once. A device holds its own rows and one other device's
columns, and of their pairs one tile; the backward pass goes round again and makes each tile again.

Sources: the ring of SigLIP, arXiv 2303.15343, section 3; tiles whose softmax is put together as
it goes, Inf-CL, arXiv 2410.17243; the online softmax, arXiv 1805.02867.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxvlm.config import ConfigError
from jaxvlm.parallel.local import free_axes
from jaxvlm.parallel.mesh import BATCH_AXES, batch_shards


class Side(NamedTuple):
    """Rows or columns (leading dim of all leaves), or what all pairs share (no such dim)."""

    vectors: Any
    """Trees of floats; gradients are taken of these alone."""
    facts: Any = ()
    """Trees of arrays: keys, masks, thresholds."""


@runtime_checkable
class Meeting(Protocol):
    """What pairs are for: a value for each row, from what it makes of all columns.

    Pure functions of one tile of r rows and c columns. Rows and columns that are zero in every
    leaf are padding: they count for nothing. Hashable.
    """

    def start(self, rows: Side) -> Any:
        """The tree [r, ...] that is carried over the columns."""
        ...

    def tile(self, rows: Side, columns: Side, shared: Side) -> Any:
        """What is differentiated: a tree [r, c, ...], of ``vectors``."""
        ...

    def add(self, carry: Any, tile: Any, rows: Side, columns: Side, shared: Side) -> Any:
        """``carry`` with the tile's columns in it, in whatever order columns come."""
        ...

    def finish(self, carry: Any, rows: Side) -> Any:
        """The result: a tree [r, ...]."""
        ...

    def slope(
        self, carry: Any, d_result: Any, tile: Any, rows: Side, columns: Side, shared: Side
    ) -> Any:
        """The cotangent of ``tile``, given the carry over all columns and the result's."""
        ...


class _Plan(NamedTuple):
    """Static."""

    meeting: Meeting
    ring: int
    """Devices in it; 1: columns stay."""
    chunk: int


def meet(
    meeting: Meeting,
    rows: Side,
    columns: Side,
    shared: Side,
    chunk: int,
    mesh: Mesh | None = None,
    around: bool = True,
) -> Any:
    """``meeting``'s result for every row.

    Temporaries are a few tiles of ``chunk`` by ``chunk`` pairs and, of the rows and columns of one
    device, a few copies.

    Args:
        meeting: what is made of the pairs.
        rows: leaves [b, ...], split over the mesh's batch axes.
        columns: leaves [b', ...], likewise.
        shared: leaves that every device holds.
        chunk: rows, and columns, of a tile at most.
        mesh: of the run; ``None``: one device.
        around: columns go to all devices; ``False``: rows meet the columns of their own.

    Returns:
        A tree [b, ...], split as the rows.

    Raises:
        ConfigError: the mesh's batch axes do not divide b.
    """
    parts = 1 if mesh is None else batch_shards(mesh)
    if mesh is None or mesh.size == 1:
        return _meet(_Plan(meeting, 1, chunk), rows, columns, shared)
    for side in (rows, columns):
        count = jax.tree.leaves(side)[0].shape[0]
        if count % parts:
            raise ConfigError(
                f"{count} examples can't be split over the {parts} parts of mesh axes "
                f"{'×'.join(BATCH_AXES)}: config.data.batch_size must be a multiple of {parts}"
            )
    split, whole = PartitionSpec(BATCH_AXES), PartitionSpec()
    run = jax.shard_map(
        functools.partial(_meet, _Plan(meeting, parts if around else 1, chunk)),
        in_specs=(split, split, whole),
        out_specs=split,
        check_vma=False,
        **free_axes(mesh),
    )
    return run(rows, columns, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _meet(plan: _Plan, rows: Side, columns: Side, shared: Side) -> Any:
    return _forward(plan, rows, columns, shared)[0]


def _forward(plan: _Plan, rows: Side, columns: Side, shared: Side) -> tuple[Any, Any]:
    meeting, cut_rows = plan.meeting, _cut(rows, plan.chunk)

    def by_columns(carry: Any, some: Side) -> tuple[Any, None]:
        def by_rows(_: None, x: Any) -> tuple[None, Any]:
            carry, mine = x
            tile = meeting.tile(mine, some, shared)
            return None, meeting.add(carry, tile, mine, some, shared)

        return jax.lax.scan(by_rows, None, (carry, cut_rows))[1], None

    def by_device(x: Any, _: None) -> tuple[Any, None]:
        carry, columns = x
        carry, _ = jax.lax.scan(by_columns, carry, columns)
        return (carry, _pass_on(plan, columns)), None

    start = (jax.vmap(meeting.start)(cut_rows), _cut(columns, plan.chunk))
    (carry, _), _ = jax.lax.scan(by_device, start, None, length=plan.ring)
    result = jax.vmap(meeting.finish)(carry, cut_rows)
    return _joined(result, rows), (rows, columns, shared, carry)


def _backward(plan: _Plan, kept: Any, d_result: Any) -> tuple[Side, Side, Side]:
    rows, columns, shared, carry = kept
    meeting, cut_rows, d_result = plan.meeting, _cut(rows, plan.chunk), _cut(d_result, plan.chunk)

    def tile_gradient(mine: Side, some: Side, carry: Any, d: Any) -> Any:
        def tile(a: Any, b: Any, c: Any) -> Any:
            sides = Side(a, mine.facts), Side(b, some.facts), Side(c, shared.facts)
            return meeting.tile(*sides)

        value, back = jax.vjp(tile, mine.vectors, some.vectors, shared.vectors)
        return back(meeting.slope(carry, d, value, mine, some, shared))

    def by_columns(carried: Any, x: tuple[Side, Any]) -> tuple[Any, Any]:
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

    cut_columns = _cut(columns, plan.chunk)
    nothing = jax.tree.map(jnp.zeros_like, (cut_rows.vectors, shared.vectors, cut_columns.vectors))
    start = (nothing[:2], (cut_columns, nothing[2]))
    ((d_rows, d_shared), home), _ = jax.lax.scan(by_device, start, None, length=plan.ring)
    d_rows, d_columns = _joined(d_rows, rows), _joined(home[1], columns)
    return Side(d_rows, None), Side(d_columns, None), Side(d_shared, None)


_meet.defvjp(_forward, _backward)


def _plus(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _pass_on(plan: _Plan, tree: Any) -> Any:
    if plan.ring == 1:
        return tree
    pairs = [(i, (i + 1) % plan.ring) for i in range(plan.ring)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, BATCH_AXES, pairs), tree)


def _cut(tree: Any, chunk: int) -> Any:
    """[n, ...] -> [parts, at most ``chunk``, ...], parts of one size, with zeros at the end."""

    def one(x: jax.Array) -> jax.Array:
        parts = math.ceil(len(x) / chunk)
        size = math.ceil(len(x) / parts)
        x = jnp.pad(x, [(0, parts * size - len(x))] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(parts, size, *x.shape[1:])

    return jax.tree.map(one, tree)


def _joined(tree: Any, like: Side) -> Any:
    """The inverse of :func:`_cut`."""
    count = jax.tree.leaves(like)[0].shape[0]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], tree)
