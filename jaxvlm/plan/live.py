"""How many bytes are alive at once in a traced program, without a compiler.

The program is gone through in order. A value that only elementwise work reads is taken to be made
where it is read (compilers fuse it); all others are buffers, from the operation that makes them to
the last one that reads them. Of a scan, stacked outputs exist as a whole from its start, and its
body has a peak of its own. What of each value a device holds, ``traced`` says.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from jaxvlm.plan.program import Op, Value
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


def peak(held: Held, early: bool = False, by_expert: bool = False) -> Peak:
    """Of a program, or of a loop's body. Inputs are not counted, outputs are.

    Args:
        held: what of each value a device holds.
        early: stacked outputs of the program's own scans exist from its start: XLA for GPUs fills
            them with zeros first of all.
    """
    order = held.body.order
    alive: dict[Any, tuple[str, float]] = {}
    copied, done = _copies(held)
    best, total = _NOTHING, 0.0
    if early:
        for op in held.body.ops:
            kept = [v for v in stacked(op) if v in order.last]
            alive.update({v: (_kind(held, op, v), held.bytes(v)) for v in kept})
        total = sum(size for _, size in alive.values())
    for i, op in enumerate(held.body.ops):
        made, dies = order.made[i], order.dies.get(i, ())
        for v in copied.get(i, ()):
            alive["copy", v] = (f"{op.tower} weights".strip(), held.bytes(v))
            total += held.bytes(v)
        if not made:
            continue
        if op.name not in _ANEW:  # a dead operand's buffer is taken over by a result like it
            wanted = collections.Counter((v.aval.shape, v.aval.dtype) for v in made)
            for v in dies:
                like = v.aval.shape, v.aval.dtype
                if wanted.get(like) and v in alive:
                    wanted[like] -= 1
                    total -= alive.pop(v)[1]
        for v in made:
            if v not in alive:
                alive[v] = (_kind(held, op, v), held.bytes(v))
                total += alive[v][1]
        extra = _inside(held, i, op, by_expert)
        if total + extra.bytes > best.bytes:
            parts: dict[str, float] = collections.defaultdict(float, extra.parts)
            for kind, size in alive.values():
                parts[kind] += size
            best = Peak(total + extra.bytes, dict(parts))
        for v in (*dies, *(v for v in made if v not in order.last)):
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


def _inside(held: Held, i: int, op: Op, by_expert: bool) -> Peak:
    """What is alive within an operation alone; branches and loops without a count whole."""
    if op.name == "scan":
        found = peak(held.inner[i], by_expert=by_expert)
        spread = _by_expert(held.inner[i]) if by_expert else 0.0
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
