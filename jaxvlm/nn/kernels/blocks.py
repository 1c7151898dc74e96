"""Which blocks of keys a block of queries needs, computed from the mask's intervals of keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.nn.mask import Spans


class Ranges(NamedTuple):
    """Per block of queries, the keys that at least one of them attends to, and that all do.

    Each is i32[B, n], for n blocks. A range is empty if its start is not below its end.
    """

    start: Any
    """First key of a query's own interval."""
    end: Any
    parent_start: Any
    """First key of a parent's interval."""
    parent_end: Any
    full_start: Any
    """First key that all queries have in their own interval."""
    full_end: Any


def ranges(spans: Spans, block: int) -> Ranges:
    """Compute the ranges of blocks of ``block`` queries, which divides T."""

    def hull(start: Any, end: Any) -> tuple[jax.Array, jax.Array]:
        start, end = (x.reshape(x.shape[0], -1, block) for x in (start, end))
        some, most = start < end, jnp.iinfo(jnp.int32).max
        end = jnp.max(jnp.where(some, end, 0), axis=-1)
        return jnp.minimum(jnp.min(jnp.where(some, start, most), axis=-1), end), end

    start, end = hull(spans.start, spans.end)
    parents = jnp.zeros_like(start), jnp.zeros_like(end)
    if spans.parent_start is not None:
        parents = hull(spans.parent_start, spans.parent_end)
    each = (x.reshape(x.shape[0], -1, block) for x in (spans.start, spans.end))
    return Ranges(start, end, *parents, *(f(x, axis=-1) for f, x in zip((jnp.max, jnp.min), each)))


def needed(of: Ranges, num_blocks: int, block: int) -> jax.Array:
    """bool[B, n, num_blocks]: blocks of ``block`` keys that each block of queries needs."""
    begin = jnp.arange(num_blocks, dtype=jnp.int32) * block

    def overlap(start: jax.Array, end: jax.Array) -> jax.Array:
        start, end = start[..., None], end[..., None]
        return (start < end) & (begin < end) & (begin + block > start)

    return overlap(of.start, of.end) | overlap(of.parent_start, of.parent_end)


class Steps(NamedTuple):
    """The pairs of blocks of queries and of keys that a kernel visits, by blocks of queries."""

    query: Any
    """i32[B, n * m]: number of the block of queries; repeats the last after ``count``."""
    key: Any
    """i32[B, n * m]: number of the block of keys."""
    count: Any
    """i32[B]: number of pairs. Each block of queries has at least one."""


def steps(needs: jax.Array) -> Steps:
    """List the pairs of ``needs``, bool[B, n, m]."""
    batch, rows, columns = needs.shape
    # A block of queries without keys is visited once, to write its zeros.
    needs = needs.at[:, :, 0].set(needs[:, :, 0] | ~jnp.any(needs, axis=-1))
    flat = needs.reshape(batch, rows * columns)
    count = jnp.sum(flat, axis=-1, dtype=jnp.int32)
    order = jnp.argsort(~flat, axis=-1, stable=True).astype(jnp.int32)
    last = jnp.minimum(jnp.arange(rows * columns, dtype=jnp.int32), count[:, None] - 1)
    order = jnp.take_along_axis(order, last, axis=-1)
    return Steps(order // columns, order % columns, count)


class Runs(NamedTuple):
    """Numbers of blocks, in runs of consecutive ones.

    The i-th is ``i + shift[r]``, in the first run r with ``i < end[r]``.
    """

    end: Any
    """i32[B, n, R]: number of blocks in this run and those before; the last is that of all."""
    shift: Any
    """i32[B, n, R]."""


class Visits(NamedTuple):
    """Per block of one side (queries or keys), the blocks of the other that it is paired with."""

    partial: Runs
    """Blocks with masked pairs of a query and a key."""
    full: Runs
    """Blocks without."""


def visits(spans: Spans, query: int, key: int, of_keys: bool) -> Visits:
    """List the pairs of blocks that have an allowed pair of a query and a key, each once.

    Some of the partial blocks may have none: what is listed is the hull of the needed ones.

    Args:
        spans: the mask, i32[B, T], for T keys.
        query: size of the blocks of queries; divides T.
        key: size of the blocks of keys; divides T.
        of_keys: list blocks of queries per block of keys, instead of the reverse.
    """
    length = spans.start.shape[1]
    begin = jnp.arange(0, length, key, dtype=jnp.int32)
    intervals, hulls, full = [Spans(spans.start, spans.end)], [], jnp.zeros((), bool)
    if spans.parent_start is not None:
        intervals.append(Spans(spans.parent_start, spans.parent_end))
    for each in intervals:
        of = ranges(each, query)
        some = needed(of, len(begin), key)
        every = (begin >= of.full_start[..., None]) & (begin + key <= of.full_end[..., None])
        if of_keys:
            some, every = (jnp.swapaxes(x, 1, 2) for x in (some, every))
        hulls.append(_hull(some))
        full = full | every
    index = jnp.arange(full.shape[-1], dtype=jnp.int32)
    partial, without = [], []
    for start, end in _apart(hulls):
        inside = full & (index >= start[..., None]) & (index < end[..., None])
        first = jnp.minimum(_hull(inside)[0], end)
        after = jnp.minimum(_hull(~inside & (index >= first[..., None]))[0], end)
        partial += [(start, first), (after, end)]
        without += [(first, after)]
    return Visits(_runs(partial), _runs(without))


def _apart(hulls: list[Any]) -> list[Any]:
    """Cut off from the later of two hulls what the earlier has."""
    if len(hulls) == 1:
        return hulls
    (start, end), (other_start, other_end) = hulls
    early = start <= other_start
    first = jnp.minimum(start, other_start), jnp.where(early, end, other_end)
    begin = jnp.maximum(jnp.maximum(start, other_start), first[1])
    return [first, (begin, jnp.maximum(jnp.where(early, other_end, end), begin))]


def _hull(some: jax.Array) -> tuple[jax.Array, jax.Array]:
    """i32[B, n] twice: the first index that is set and the one past the last; m, m if none is."""
    index, m = jnp.arange(some.shape[-1], dtype=jnp.int32), some.shape[-1]
    start = jnp.min(jnp.where(some, index, m), axis=-1)
    return start, jnp.maximum(jnp.max(jnp.where(some, index + 1, 0), axis=-1), start)


def _runs(pieces: list[tuple[jax.Array, jax.Array]]) -> Runs:
    total, ends, shifts = jnp.zeros((), jnp.int32), [], []
    for start, end in pieces:
        total = total + end - start
        ends.append(total)
        shifts.append(end - total)
    return Runs(*(jnp.stack(x, axis=-1) for x in (ends, shifts)))
