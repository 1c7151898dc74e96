"""How many bytes are alive at once in a traced program, without a compiler.

The program is gone through in order. A value that only elementwise work reads is taken to be made
where it is read (compilers fuse it); all others are buffers, from the operation that makes them to
the last one that reads them. Of a scan, stacked outputs exist as a whole from its start, and its
body has a peak of its own. What of each value a device holds, ``traced`` says.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from jaxvlm.parallel import compat
from jaxvlm.plan.compilers import PLAIN, Compiler
from jaxvlm.plan.program import SUMS, VIEWS, Op, Value, is_number
from jaxvlm.plan.traced import NONE, Held, stacked


class Peak(NamedTuple):
    """Bytes at the moment when most are alive."""

    bytes: float
    parts: dict[str, float]
    """By what they are: ``saved`` (for the backward pass), ``gradients``, ``weights`` (copies in
    another dtype, or gathered), ``work``; each with its tower in front: ``decoder saved``."""


_NOTHING = Peak(0.0, {})
_ANEW = ("dot_general", "conv_general_dilated", "gather")
"""Operations that never write over an operand."""
_GATHERS = (
    "dot_general", "conv_general_dilated", "ragged_dot_general", "pallas_call", "shard_map",
)  # fmt: skip
"""Operations for which a parameter that is split is made whole."""


def peak(held: Held, compiler: Compiler = PLAIN, results: int | None = None) -> Peak:
    """Of a program, or of a loop's body. Inputs are not counted, outputs are.

    Args:
        held: what of each value a device holds.
        compiler: what it does besides.
        results: outputs that are there until the end. Others, of which a loop has an entry a turn,
            are written into their place when they are made. ``None``: all are.
    """
    order = held.body.order
    last = order.last(results)
    ends: dict[int, list[Any]] = {}
    for v, i in last.items():
        ends.setdefault(i, []).append(v)
    alive: dict[Any, tuple[str, float]] = {}
    copied, done = _copies(held)
    whole, sunk = _numbers(held) if compiler.sinks else (set(), set())
    sums = _sums(held) if compiler.apart else {}
    best, total = _NOTHING, 0.0
    if compiler.early and results is None:
        for op in held.body.ops:
            kept = [v for v in stacked(op) if v in last]
            kept += [v for v in op.outs if v in whole]
            alive.update({v: (_kind(held, op, v), held.bytes(v)) for v in kept})
        total = sum(size for _, size in alive.values())
    for i, op in enumerate(held.body.ops):
        made, dies = order.made[i], ends.get(i, ())
        for v in copied.get(i, ()):
            alive["copy", v] = (f"{op.tower} weights".strip(), held.bytes(v))
            total += held.bytes(v)
        if not made:
            continue
        if op.name not in _ANEW:  # a dead operand's buffer is taken over by a result like it
            new = (v for v in made if v.size and v not in alive and v not in sunk)
            wanted = collections.Counter((v.aval.shape, v.aval.dtype) for v in new)
            for v in dies:
                like = v.aval.shape, v.aval.dtype
                apart = any(v in sums.get(x, ()) for x in order.reads[i])
                if wanted.get(like) and v in alive and not apart:
                    wanted[like] -= 1
                    total -= alive.pop(v)[1]
        for v in made:
            if v not in alive and v not in sunk:
                alive[v] = (_kind(held, op, v), held.bytes(v))
                total += alive[v][1]
        extra = _inside(held, i, op, compiler)
        if total + extra.bytes > best.bytes:
            parts: dict[str, float] = collections.defaultdict(float, extra.parts)
            for kind, size in alive.values():
                parts[kind] += size
            best = Peak(total + extra.bytes, dict(parts))
        for v in (*dies, *(v for v in made if v not in last)):
            if v in alive:
                total -= alive.pop(v)[1]
        for v in done.get(i, ()):
            total -= alive.pop(("copy", v))[1]
    return best


def _copies(held: Held) -> tuple[dict[int, list[Value]], dict[int, list[Value]]]:
    """Parameters that loops read in another layout: before which one each is copied, and behind
    which its copy is read no more.
    """
    first: dict[int, list[Value]] = {}
    last: dict[int, list[Value]] = {}
    loops = {i: op for i, op in enumerate(held.body.ops) if op.name == "scan"}
    for v in held.turned:
        if readers := [i for i, op in loops.items() if v in op.values]:
            first.setdefault(readers[0], []).append(v)
            last.setdefault(readers[-1], []).append(v)
    return first, last


def _sums(held: Held) -> dict[Any, frozenset[Any]]:
    """Of each sum, or maximum, the buffers that it is of."""
    found: dict[Any, frozenset[Any]] = {}
    order = held.body.order
    for op, made, read in zip(held.body.ops, order.made, order.reads):
        if op.name in SUMS:
            found |= dict.fromkeys(made, read.union(*(found.get(v, ()) for v in read)))
    return found


def _numbers(held: Held) -> tuple[set[Any], set[Any]]:
    """One number, broadcast, that loops read as it is: what forward passes read, and what none
    but backward passes do, which are loops over what another loop has stacked.
    """
    numbers = {op.outs[0] for op in held.body.ops if is_number(op)}
    numbers.difference_update(v for v in held.body.outs if isinstance(v, Value))
    kept: set[Any] = set()
    forward: set[Any] = set()
    for op in held.body.ops:
        if op.name != "scan":
            numbers.difference_update(op.values)
            if op.name in VIEWS or op.name == "convert_element_type":
                kept.update(op.outs if kept.intersection(op.values) else ())
            continue
        consts, carries = compat.scan_inputs(dict(op.params))
        numbers.difference_update(v for v in op.ins[consts:] if isinstance(v, Value))
        if not kept.intersection(v for v in op.ins[consts + carries :] if isinstance(v, Value)):
            forward.update(v for v in op.ins[:consts] if isinstance(v, Value))
        kept.update(stacked(op))
    return numbers & forward, numbers - forward


def _inside(held: Held, i: int, op: Op, compiler: Compiler) -> Peak:
    """What is alive within an operation alone; branches and loops without a count whole."""
    if op.name == "scan":
        carries = compat.scan_inputs(dict(op.params))[1]
        found = peak(held.inner[i], compiler, carries)
        spread = _by_expert(held.inner[i]) if compiler.by_expert else 0.0
        work = {"work": found.parts.get("work", 0.0) + spread} if spread else {}
        return Peak(found.bytes + spread, found.parts | work)
    found = _NOTHING
    if op.name in _GATHERS:
        shares = [v for v in op.values if held.parts(v) > 1 and v not in held.gradients]
        if whole := sum(held.bytes(v) * held.parts(v) for v in shares):
            found = Peak(whole, {f"{op.tower} weights".strip(): whole})
    if op.name in ("cond", "while", "shard_map"):
        # A map over devices has a device's rows in it, and all of theirs around it.
        rows = held.rows * (op.params["mesh"].size if op.name == "shard_map" else 1)
        each = [
            peak(Held(b, [NONE] * len(b.ins), (), rows, held.tiled)) for b in held.body.inner[i]
        ]
        most = max(each, key=lambda x: x.bytes, default=_NOTHING)
        both = collections.Counter(found.parts)
        both.update(most.parts)
        return Peak(found.bytes + most.bytes, dict(both))
    return found


def _by_expert(held: Held) -> float:
    """Rows once for each expert, zeros but for its own: XLA's own grouped matmul on CPU and GPU.

    A layer's exist at the same time. Within a map over devices none are seen to.
    """
    found: dict[Any, float] = {}
    for op in held.body.ops:
        if op.name == "ragged_dot_general":
            rows, groups = op.ins[0], op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
            experts = op.ins[1].aval if groups else op.outs[0].aval
            whole = held.bytes(rows) * experts.shape[0]
            found[rows, bool(groups)] = whole
    return float(sum(found.values()))


def _kind(held: Held, op: Op, v: Value) -> str:
    kind = "work"
    if v in held.gradients:
        kind = "gradients"
    elif held.parts(v):
        kind = "weights"
    elif v in stacked(op):
        kind = "saved"
    return f"{op.tower} {kind}".strip()
