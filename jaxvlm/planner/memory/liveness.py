"""Peak of live bytes in a traced program, computed without a compiler.

Operations are visited in order. A value that only elementwise operations read is assumed to be
fused into its readers; all others are buffers, alive from the operation that creates them to the
last one that reads them. The stacked outputs of a scan exist from its start, and its body has a
peak of its own. ``jaxpr_sharding`` gives a device's bytes of each value; ``xla_passes`` gives what
compilers do differently.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxvlm.planner.memory import xla_passes
from jaxvlm.planner.memory.compilers import PLAIN, Compiler
from jaxvlm.planner.memory.jaxpr_sharding import NONE, ShardedValues
from jaxvlm.planner.memory.operation import NEVER_IN_PLACE, Op, Value
from jaxvlm.planner.memory.xla_passes import Copy, XlaPasses


class Peak(NamedTuple):
    """Live bytes at the moment when they are most."""

    bytes: float
    parts: dict[str, float]
    """Bytes by category: ``saved`` (for the backward pass), ``gradients``, ``weights`` (copies in
    another dtype, or all-gathered), ``work``; with the tower's name in front where it has one:
    ``decoder saved``.
    """


_NOTHING = Peak(0.0, {})


def peak(
    held: ShardedValues,
    compiler: Compiler = PLAIN,
    results: int | None = None,
    idle_buffers: tuple[float, ...] = (),
    gathered_outside: frozenset[Value] = frozenset(),
) -> Peak:
    """Peak of a program, or of a loop's body. Inputs are not counted, outputs are.

    Args:
        held: the program's values on one device.
        compiler: the compiler's behaviour.
        results: number of outputs that live until the end. The others are stacked outputs of a
            loop, written in place when they are computed. ``None``: all live until the end.
        idle_buffers: sizes of idle buffers in ascending order. Each holds one value at a time, and
            values in them are not counted.
        gathered_outside: parameters that are all-gathered outside of the loop.
    """
    order = held.body.order
    passes = XlaPasses(held, compiler, results is not None, gathered_outside)
    last = order.last(results)
    ends: dict[int, list[Any]] = collections.defaultdict(list)
    for v, i in last.items():
        ends[i].append(v)
    first: dict[int, list[Copy]] = collections.defaultdict(list)
    for copy in passes.copies:
        first[copy.first].append(copy)
    sums = xla_passes.sums(held) if compiler.separate_softmax_gradient else {}
    creator = {v: op for op in held.body.ops for v in op.outs}
    alive: dict[Any, tuple[str, float]] = {}
    alive.update({v: (xla_passes.kind(held, creator[v], v), held.bytes(v)) for v in passes.start})
    best, total = _NOTHING, sum((size for _, size in alive.values()), 0.0)
    for i, op in enumerate(held.body.ops):
        created, dying = order.created[i], ends.get(i, [])
        for copy in first.get(i, ()):
            alive[copy] = copy.kind, copy.bytes
            total += copy.bytes
        if not created:
            continue
        new = [v for v in created if v not in alive and v not in passes.unbuffered]
        apart = {v for x in order.reads[i] for v in sums.get(x, ())}
        for v in _reused(op, new, [v for v in dying if v in alive and v not in apart]):
            total -= alive.pop(v)[1]
        for v in new:
            alive[v] = (xla_passes.kind(held, op, v), held.bytes(v))
            total += alive[v][1]
        left, placed = idle_buffers, _NOTHING
        if idle_buffers:
            movable = [x for v, x in alive.items() if v not in passes.outside_idle_buffers]
            left, placed = _assigned(movable, idle_buffers)
        extra = _inside(held, i, op, compiler, left, passes.already_gathered)
        if total - placed.bytes + extra.bytes > best.bytes:
            categories = [*alive.values(), *((k, -size) for k, size in placed.parts.items())]
            best = _summed([*categories, *extra.parts.items()])
        ended = [copy for copy in alive if isinstance(copy, Copy) and copy.last <= i]
        for v in (*dying, *(v for v in created if v not in last), *ended):
            if v in alive:
                total -= alive.pop(v)[1]
    return best


def _reused(op: Op, new: list[Value], dying: list[Any]) -> list[Any]:
    """Operands read for the last time, whose buffers are reused by results of the same shape."""
    wanted = collections.Counter((v.aval.shape, v.aval.dtype) for v in new if v.size)
    reused = []
    for v in dying if op.name not in NEVER_IN_PLACE else ():
        if wanted[v.aval.shape, v.aval.dtype]:
            wanted[v.aval.shape, v.aval.dtype] -= 1
            reused.append(v)
    return reused


def _assigned(
    values: Iterable[tuple[str, float]], idle_buffers: tuple[float, ...]
) -> tuple[tuple[float, ...], Peak]:
    """Assign each value, the largest first, to the smallest idle buffer that can hold it.

    Returns the buffers that are left, and the values that were assigned.
    """
    left, assigned = list(idle_buffers), []
    for kind, size in sorted(values, key=lambda x: -x[1]):
        if size and (n := bisect.bisect_left(left, size)) < len(left):
            left.pop(n)
            assigned.append((kind, size))
    return tuple(left), _summed(assigned)


def _summed(values: Iterable[tuple[str, float]]) -> Peak:
    parts: dict[str, float] = collections.defaultdict(float)
    for kind, size in values:
        parts[kind] += size
    return Peak(sum(parts.values(), 0.0), dict(parts))


def _inside(
    held: ShardedValues,
    i: int,
    op: Op,
    compiler: Compiler,
    idle_buffers: tuple[float, ...],
    gathered_outside: set[Value],
) -> Peak:
    """Bytes alive only within an operation; branches and loops without a trip count count fully."""
    parts: list[tuple[str, float]] = []
    weights = f"{op.tower} weights".strip()
    if op.name == "scan":
        (_, carries), inner = held.inner[i].body.loop, held.inner[i]
        same = xla_passes.invariant(inner) if compiler.hoists_gathers else {}
        lifted = frozenset(v for values in same.values() for v in values)
        parts += peak(inner, compiler, carries, idle_buffers, lifted).parts.items()
        parts += [("work", xla_passes.by_expert(inner))] if compiler.copies_per_expert else []
        own = [inner.bytes(v) * inner.parts(v) for v, *_ in same.values()]
        parts += [(weights, size) for size in own if not any(n >= size for n in idle_buffers)]
    shares = [v for v in xla_passes.shares(held, op) if v not in gathered_outside]
    gathered = sum((held.bytes(v) * held.parts(v) for v in shares), 0.0)
    if gathered and not any(size >= gathered for size in idle_buffers):
        parts.append((weights, gathered))
    if op.name in ("cond", "while", "shard_map"):
        # Within a shard_map the batch is a device's own; outside of it, that of all devices.
        rows = held.rows * (op.params["mesh"].size if op.name == "shard_map" else 1)
        bodies = held.body.inner[i]
        inner_values = (ShardedValues(b, [NONE] * len(b.ins), (), rows, held.tiled) for b in bodies)
        each = map(peak, inner_values)
        parts += max(each, key=lambda x: x.bytes, default=_NOTHING).parts.items()
    return _summed(parts)
