"""How many bytes are alive at once in a traced program, without a compiler.

The program is gone through in order. A value that only elementwise work reads is taken to be made
where it is read (compilers fuse it); all others are buffers, from the operation that makes them to
the last one that reads them. Of a scan, stacked outputs exist as a whole from its start, and its
body has a peak of its own. What of each value a device holds, ``traced`` says; what a compiler does
otherwise, ``passes``.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxvlm.plan import passes
from jaxvlm.plan.compilers import PLAIN, Compiler
from jaxvlm.plan.operations import ANEW, Op, Value
from jaxvlm.plan.passes import Copy, Passes
from jaxvlm.plan.traced import NONE, Held


class Peak(NamedTuple):
    """Bytes at the moment when most are alive."""

    bytes: float
    parts: dict[str, float]
    """By what they are: ``saved`` (for the backward pass), ``gradients``, ``weights`` (copies in
    another dtype, or gathered), ``work``; a tower in front where it is one's: ``decoder saved``."""


_NOTHING = Peak(0.0, {})


def peak(
    held: Held,
    compiler: Compiler = PLAIN,
    results: int | None = None,
    room: tuple[float, ...] = (),
    lifted: frozenset[Value] = frozenset(),
) -> Peak:
    """Of a program, or of a loop's body. Inputs are not counted, outputs are.

    Args:
        held: what of each value a device holds.
        compiler: what it does besides.
        results: outputs that are there until the end. Others, of which a loop has an entry a turn,
            are written into their place when they are made. ``None``: all are.
        room: sizes of arrays that lie idle meanwhile, ascending: what each can hold it holds, one
            value at a time, and that is not counted.
        lifted: parameters that are gathered around it.
    """
    order, does = held.body.order, Passes(held, compiler, results is not None, lifted)
    last = order.last(results)
    ends: dict[int, list[Any]] = collections.defaultdict(list)
    for v, i in last.items():
        ends[i].append(v)
    first: dict[int, list[Copy]] = collections.defaultdict(list)
    for copy in does.copies:
        first[copy.first].append(copy)
    sums = passes.sums(held) if compiler.apart else {}
    by = {v: op for op in held.body.ops for v in op.outs}
    alive: dict[Any, tuple[str, float]] = {}
    alive.update({v: (passes.kind(held, by[v], v), held.bytes(v)) for v in does.start})
    best, total = _NOTHING, sum((size for _, size in alive.values()), 0.0)
    for i, op in enumerate(held.body.ops):
        made, dies = order.made[i], ends.get(i, [])
        for copy in first.get(i, ()):
            alive[copy] = copy.kind, copy.bytes
            total += copy.bytes
        if not made and i not in does.turning:
            continue
        new = [v for v in made if v not in alive and v not in does.sunk]
        apart = {v for x in order.reads[i] for v in sums.get(x, ())}
        for v in _taken(op, new, [v for v in dies if v in alive and v not in apart]):
            total -= alive.pop(v)[1]
        for v in new:
            alive[v] = (passes.kind(held, op, v), held.bytes(v))
            total += alive[v][1]
        left, placed = room, _NOTHING
        if room:
            left, placed = _placed([x for v, x in alive.items() if v not in does.fixed], room)
        extra = _inside(held, i, op, compiler, left, does.whole)
        if (size := does.turning.get(i, 0.0)) > extra.bytes:
            extra = Peak(size, {"weights": size})
        if total - placed.bytes + extra.bytes > best.bytes:
            found = [*alive.values(), *((k, -size) for k, size in placed.parts.items())]
            best = _summed([*found, *extra.parts.items()])
        gone = [copy for copy in alive if isinstance(copy, Copy) and copy.last <= i]
        for v in (*dies, *(v for v in made if v not in last), *gone):
            if v in alive:
                total -= alive.pop(v)[1]
    return best


def _taken(op: Op, new: list[Value], dies: list[Any]) -> list[Any]:
    """Operands read last whose buffers results like them take over."""
    wanted = collections.Counter((v.aval.shape, v.aval.dtype) for v in new if v.size)
    found = []
    for v in dies if op.name not in ANEW else ():
        if wanted[v.aval.shape, v.aval.dtype]:
            wanted[v.aval.shape, v.aval.dtype] -= 1
            found.append(v)
    return found


def _placed(
    values: Iterable[tuple[str, float]], room: tuple[float, ...]
) -> tuple[tuple[float, ...], Peak]:
    """Which arrays are left when each value, the largest first, has the smallest that can hold it;
    and what has found one.
    """
    left, found = list(room), []
    for kind, size in sorted(values, key=lambda x: -x[1]):
        if size and (n := bisect.bisect_left(left, size)) < len(left):
            left.pop(n)
            found.append((kind, size))
    return tuple(left), _summed(found)


def _summed(values: Iterable[tuple[str, float]]) -> Peak:
    parts: dict[str, float] = collections.defaultdict(float)
    for kind, size in values:
        parts[kind] += size
    return Peak(sum(parts.values(), 0.0), dict(parts))


def _inside(
    held: Held,
    i: int,
    op: Op,
    compiler: Compiler,
    room: tuple[float, ...],
    whole: set[Value],
) -> Peak:
    """What is alive within an operation alone; branches and loops without a count whole."""
    parts: list[tuple[str, float]] = []
    weights = f"{op.tower} weights".strip()
    if op.name == "scan":
        (_, carries), inner = held.inner[i].body.loop, held.inner[i]
        same = passes.invariant(inner) if compiler.lifts else {}
        lifted = frozenset(v for values in same.values() for v in values)
        parts += peak(inner, compiler, carries, room, lifted).parts.items()
        parts += [("work", passes.by_expert(inner))] if compiler.by_expert else []
        own = [inner.bytes(v) * inner.parts(v) for v, *_ in same.values()]
        parts += [(weights, size) for size in own if not any(n >= size for n in room)]
    shares = [v for v in passes.shares(held, op) if v not in whole]
    gathered = sum((held.bytes(v) * held.parts(v) for v in shares), 0.0)
    if gathered and not any(size >= gathered for size in room):
        parts.append((weights, gathered))
    if op.name in ("cond", "while", "shard_map"):
        # A map over devices has a device's rows in it, and all of theirs around it.
        rows = held.rows * (op.params["mesh"].size if op.name == "shard_map" else 1)
        each = [
            peak(Held(b, [NONE] * len(b.ins), (), rows, held.tiled)) for b in held.body.inner[i]
        ]
        parts += max(each, key=lambda x: x.bytes, default=_NOTHING).parts.items()
    return _summed(parts)
