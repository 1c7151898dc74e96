"""How many bytes are alive at once in a traced program, without a compiler.

The program is gone through in order. A value that only elementwise work reads is taken to be made
where it is read (compilers fuse it); all others are buffers, from the operation that makes them to
the last one that reads them. Of a scan, stacked outputs exist as a whole from its start, and its
body has a peak of its own. What of each value a device holds, ``traced`` says.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from jaxvlm.plan.traced import OPAQUE, VIEWS, Body, Op, Share, bodies, stacked, words


class Peak(NamedTuple):
    """Bytes at the moment when most are alive."""

    bytes: float
    parts: dict[str, float]
    """By what they are: ``saved`` (for the backward pass), ``gradients``, ``weights`` (copies in
    another dtype, or gathered), ``work``; each with its tower in front: ``decoder saved``."""


_NOTHING = Peak(0.0, {})
_REDUCE = ("reduce_", "argmax", "argmin")
_CHEAP = words(
    "broadcast_in_dim iota convert_element_type lt le gt ge eq ne and or not slice neg exp"
)
"""Operations that are done again for each reader, rather than once for all."""
_ANEW = ("dot_general", "conv_general_dilated", "gather")
"""Operations that never write over an operand."""


def peak(jaxpr: Any, ins: Sequence[Share], outs: Sequence[Share], early: bool = False) -> Peak:
    """Of a traced function.

    Args:
        jaxpr: a ClosedJaxpr.
        ins: what of each input a device holds. Inputs are not counted.
        outs: of each output likewise.
        early: stacked outputs of the program's own scans exist from its start: XLA for GPUs fills
            them with zeros first of all.

    Returns:
        Its peak, outputs counted.
    """
    return of(Body(jaxpr.jaxpr, ins, outs), early)


def of(body: Body, early: bool = False) -> Peak:
    """Of a program, or of a loop's body; see :func:`peak`."""
    fused = _fused(body)
    roots: dict[Any, frozenset[Any]] = {v: frozenset() for v in body.ins}

    def under(v: Any) -> frozenset[Any]:
        return frozenset() if isinstance(v, core.Literal) else roots.get(v, frozenset())

    last: dict[Any, int] = {}
    for i, op in enumerate(body.ops):
        read = frozenset().union(*map(under, op.ins))
        for v in op.outs:
            roots[v] = read if op.name in VIEWS or v in fused else frozenset([v])
        if op.name not in VIEWS and not all(v in fused for v in op.outs):
            last.update(dict.fromkeys(read, i))
    for v in body.outs:
        last.update(dict.fromkeys(under(v), len(body.ops)))
    buffers = {v for v, found in roots.items() if found == frozenset([v])}
    return _walk(body, buffers, last, early)


def _walk(body: Body, buffers: set[Any], last: Mapping[Any, int], early: bool) -> Peak:
    alive: dict[Any, tuple[str, float]] = {}
    dies: dict[int, list[Any]] = collections.defaultdict(list)
    for v, i in last.items():
        dies[i].append(v)
    best, total = _NOTHING, 0.0
    if early:
        for op in body.ops:
            alive.update({v: (_kind(body, op, v), body.bytes(v)) for v in stacked(op) if v in last})
        total = sum(size for _, size in alive.values())
    for i, op in enumerate(body.ops):
        made = [v for v in op.outs if v in buffers]
        if not made:
            continue
        if op.name not in _ANEW:  # a dead operand's buffer is taken over by a result like it
            wanted = collections.Counter((v.aval.shape, str(v.aval.dtype)) for v in made)
            for v in [v for v in dies[i] if v in alive]:
                like = v.aval.shape, str(v.aval.dtype)
                if wanted[like]:
                    wanted[like] -= 1
                    total -= alive.pop(v)[1]
        for v in made:
            if v not in alive:
                alive[v] = (_kind(body, op, v), body.bytes(v))
                total += alive[v][1]
        extra = _inside(body, i, op)
        if total + extra.bytes > best.bytes:
            parts: dict[str, float] = collections.defaultdict(float, extra.parts)
            for kind, size in alive.values():
                parts[kind] += size
            best = Peak(total + extra.bytes, dict(parts))
        for v in (*dies[i], *(v for v in made if v not in last)):
            if v in alive:
                total -= alive.pop(v)[1]
    return best


def _inside(body: Body, i: int, op: Op) -> Peak:
    """What is alive within an operation alone; branches and loops without a count whole."""
    if op.name == "scan":
        return of(body.inner[i])
    if op.name in ("cond", "while", "shard_map"):
        each = [of(Body(b, [Share()] * len(b.invars), ())) for b in bodies(op.params)]
        return max(each, key=lambda x: x.bytes, default=_NOTHING)
    if op.name in ("dot_general", "conv_general_dilated"):
        shares = [v for v in op.ins if body.parts(v) > 1 and v not in body.gradients]
        whole = sum(body.bytes(v) * body.parts(v) for v in shares)
        return Peak(whole, {f"{op.tower} weights".strip(): whole}) if whole else _NOTHING
    return _NOTHING


def _kind(body: Body, op: Op, v: Any) -> str:
    kind = "work"
    if v in body.gradients:
        kind = "gradients"
    elif body.parts(v):
        kind = "weights"
    elif v in stacked(op):
        kind = "saved"
    return f"{op.tower} {kind}".strip()


def _fused(body: Body) -> set[Any]:
    """Values that are made where they are read."""
    readers: dict[Any, list[str]] = collections.defaultdict(list)
    kept = {v for v in body.outs if not isinstance(v, core.Literal)}
    for op in reversed(body.ops):
        values = [v for v in op.ins if not isinstance(v, core.Literal)]
        seen = [op.name]
        if op.name in VIEWS:  # who reads a view reads what it is of
            seen = readers[op.outs[0]]
            kept.update(values if op.outs[0] in kept else ())
        for v in values:
            readers[v].extend(seen)
    made: set[Any] = set()
    for op in body.ops:
        if op.name in OPAQUE or op.name in VIEWS or op.name.startswith(_REDUCE):
            continue
        for v in op.outs:
            names = readers[v]
            again = len(names) < 2 or op.name in _CHEAP
            if v not in kept and again and not OPAQUE.intersection(names):
                made.add(v)
    return made
