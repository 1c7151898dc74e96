"""What compilers' passes do with a traced program's values, as far as memory goes.

Each rule was read from XLA's buffer assignments; which compiler has which, ``compilers`` says.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jaxvlm.parallel import compat
from jaxvlm.plan.compilers import Compiler
from jaxvlm.plan.operations import ADDS, OPAQUE, SUMS, VIEWS, Op, Value, base, is_number
from jaxvlm.plan.traced import Held, stacked

_GATHERS = (
    "dot_general", "conv_general_dilated", "ragged_dot_general", "pallas_call", "shard_map",
)  # fmt: skip
"""Operations for which a parameter that is split is made whole."""


class Copy(NamedTuple):
    """A buffer that no operation of a program makes."""

    of: Any
    """The value, or what it is made of."""
    first: int
    """The operation before which it is made."""
    last: int
    """The operation behind which it is read no more."""
    kind: str
    """See :func:`kind`."""
    bytes: float


class Passes:
    """What becomes of a program's values.

    Args:
        held: what of each value a device holds.
        compiler: whose passes.
        loop: whether it is a loop's body.
        lifted: parameters that are gathered around it.

    Attributes:
        start: values that are there from the program's start.
        sunk: values that are no buffers.
        copies: what there is besides.
        turning: bytes of a second copy, at an operation alone.
        fixed: values that lie nowhere but in room of their own, of a whole program.
        whole: parameters that are not gathered where they are read.
    """

    def __init__(
        self, held: Held, compiler: Compiler, loop: bool, lifted: frozenset[Value] = frozenset()
    ):
        numbers, sunk = _numbers(held) if compiler.sinks else (set(), set())
        self.sunk: set[Any] = sunk
        self.copies: list[Copy] = _turned(held)
        self.turning: dict[int, float] = {}
        self.start: list[Value] = []
        self.fixed: set[Any] = set()
        self.whole = set(lifted)
        if compiler.keeps and loop:
            self._gathered(held)
        if compiler.joins:
            self.sunk = self.sunk | _joined(held)
            self.copies += _factors(held)
        if compiler.copied and loop:
            self.sunk = self.sunk | _added(held)
        if compiler.copied if loop else compiler.early:
            last = held.body.order.last()
            for op in held.body.ops:
                self.start += [v for v in stacked(op) if v in last]
                self.start += [v for v in op.outs if v in numbers and not loop]
        if compiler.copied and not loop:
            self._scanned(held)
            self._fix(held)

    def _fix(self, held: Held) -> None:
        """Say what is made before moments are copied, or is read behind them."""
        self.fixed.update(results(held), held.gradients)
        # Of zeros of one shape all but one array are copies, made behind those of moments.
        zeros = {(v.aval.shape, v.aval.dtype): v for v in reversed(self.start)}
        self.fixed.update(zeros.values())
        for op, made in zip(held.body.ops, held.body.order.made):
            if op.name in ("scan", "dot_general"):
                break
            self.fixed.update(made)  # what is ready first is made first
        self.fixed -= _sums_of_two(held)

    def _scanned(self, held: Held) -> None:
        """Parameters that a loop goes through along a dim that is not their first are turned, which
        takes two copies. The loops read the second; where a buffer stands for it (what was padded
        before), there is none besides.
        """
        order, ends = held.body.order, dict[Value, int]()
        made = {v: i for i, values in enumerate(order.made) for v in values}
        for i, op in enumerate(held.body.ops):
            if op.name == "scan":
                over = op.ins[sum(compat.scan_inputs(dict(op.params))) :]
                ends.update({v: i for v in over if isinstance(v, Value)})
        for op, under in zip(held.body.ops, order.reads):
            v = op.outs[0] if op.outs else None
            if op.name != "transpose" or v not in ends or not held.parts(v):
                continue
            start, size = max((made[x] for x in under if x in made), default=0), held.bytes(v)
            self.turning[start] = self.turning.get(start, 0.0) + size
            if not start:
                self.copies.append(Copy(v, 0, ends[v], kind(held, op, v), size))

    def _gathered(self, held: Held) -> None:
        """Parameters that several operations read: gathered for the first, kept for the last."""
        for values in _read(held).values():
            (first, v), *more = values
            if more and v not in self.whole:
                size, tower = held.bytes(v) * held.parts(v), held.body.ops[first].tower
                name = f"{tower} weights".strip()
                self.copies.append(Copy(v, first, more[-1][0], name, size))
                self.whole.update(v for _, v in values)


def kind(held: Held, op: Op, v: Value) -> str:
    """What a value of an operation is: see :class:`jaxvlm.plan.live.Peak`."""
    found = "work"
    if v in held.gradients:
        found = "gradients"
    elif held.parts(v):
        found = "weights"
    elif v in stacked(op):
        found = "saved"
    return f"{op.tower} {found}".strip()


def results(held: Held) -> set[Any]:
    """Buffers that a program gives back."""
    return {v for read in held.body.order.given for v in read}


def sums(held: Held) -> dict[Any, frozenset[Any]]:
    """Of each sum, or maximum, the buffers that it is of."""
    found: dict[Any, frozenset[Any]] = {}
    order = held.body.order
    for op, made, read in zip(held.body.ops, order.made, order.reads):
        if op.name in SUMS:
            found |= dict.fromkeys(made, read.union(*(found.get(v, ()) for v in read)))
    return found


def shares(held: Held, op: Op) -> list[Value]:
    """Parameters of which a device has a share, that an operation reads whole."""
    values = op.values if op.name in _GATHERS else ()
    return [v for v in values if held.parts(v) > 1 and v not in held.gradients]


def _read(held: Held) -> dict[Any, list[tuple[int, Value]]]:
    """Of each parameter that operations read whole: which do, and what of it (views of one are one
    parameter)."""
    by = {out: op for op in held.body.ops for out in op.outs}
    found: dict[Any, list[tuple[int, Value]]] = {}
    for i, op in enumerate(held.body.ops):
        for v in shares(held, op):
            found.setdefault(base(by, v), []).append((i, v))
    return found


def invariant(held: Held) -> dict[Any, list[Value]]:
    """Parameters that each turn of a loop would gather alike: what it is given as it is, or what is
    made of that; and what operations read of each.
    """
    same = set(held.body.ins[: held.body.loop[0]])
    for op in held.body.ops:
        same.update(op.outs if op.values and same.issuperset(op.values) else ())
    read = {of: [v for _, v in values] for of, values in _read(held).items()}
    return {of: values for of, values in read.items() if same.issuperset(values)}


def by_expert(held: Held) -> float:
    """Bytes of rows once for each expert, zeros but for its own: XLA's own grouped matmul on CPU
    and GPU. A layer's exist at the same time. Within a map over devices none are seen to.
    """
    found: dict[Any, float] = {}
    for op in held.body.ops:
        if op.name == "ragged_dot_general":
            rows, groups = op.ins[0], op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
            experts = op.ins[1].aval if groups else op.outs[0].aval
            found[rows, bool(groups)] = held.bytes(rows) * experts.shape[0]
    return float(sum(found.values()))


def _added(held: Held) -> set[Any]:
    """Gradients that a loop adds to what it has of them: in their place."""
    (consts, carries), body = held.body.loop, held.body
    by = {out: op for op in body.ops for out in op.outs}
    found = set[Any]()
    for given, made in zip(body.ins[consts:], body.outs[:carries]):
        op = by.get(made) if isinstance(made, Value) else None
        if op and op.name in ADDS and given in op.values and held.parts(made):
            found.add(made)
    return found


def _sums_of_two(held: Held) -> set[Any]:
    """Gradients that two loops add up (a decoder that reads both sides of pairs): their zeros,
    being copies too, are made behind those of moments.
    """
    by = {out: op for op in held.body.ops for out in op.outs}
    shapes = set()
    for op in held.body.ops:
        if op.name in ADDS and op.outs[0] in held.gradients:
            loops = [by.get(base(by, v)) for v in op.values]
            if len(loops) == 2 and all(x and x.name == "scan" for x in loops):
                shapes.add(op.outs[0].aval.shape)
    return {v for v in held.gradients if v.aval.shape in shapes} - results(held)


def _turned(held: Held) -> list[Copy]:
    """Parameters that loops read in another layout: those that more than one loop reads, or one
    over microbatches or chunks, which has loops in it. One that a single loop over layers reads (a
    frozen tower's, forward) is not copied.
    """
    found = []
    loops = {i: op for i, op in enumerate(held.body.ops) if op.name == "scan"}
    for v in held.turned:
        readers = [i for i, op in loops.items() if v in op.values]
        if len(readers) > 1 or any(held.inner[i].inner for i in readers):
            tower = f"{loops[readers[0]].tower} weights".strip()
            found.append(Copy(v, readers[0], readers[-1], tower, held.bytes(v)))
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


def _joined(held: Held) -> set[Any]:
    """What a kernel that joins a matmul with what follows makes no buffer of: a product that only
    its rows' sums and one more elementwise result read (a softmax's gradient); and all of attention
    forward where nothing is done to scores before their softmax.
    """
    body, order, found = held.body, held.body.order, set[Any]()
    kept, readers = results(held), dict[Any, list[int]]()
    by = {out: op for op in body.ops for out in op.outs}
    for i, made in enumerate(order.made):
        for v in order.reads[i] if made else ():
            readers.setdefault(v, []).append(i)
    for op in body.ops:
        of = readers.get(op.outs[0], ()) if op.name == "dot_general" else ()
        over = [i for i in of if _is_of_rows(body.ops[i])]
        rest = [i for i in of if i not in over]
        if op.outs[0] in kept or not over or len(rest) != 1 or body.ops[rest[0]].name in OPAQUE:
            continue
        result = order.made[rest[0]]
        greatest = [body.ops[i].values[0] for i in over if body.ops[i].name == "reduce_max"]
        if not greatest:
            found.add(op.outs[0])
        elif not kept.intersection(result) and base(by, greatest[0]) is op.outs[0]:
            ends = [body.ops[i].name for v in result for i in readers.get(v, ())]
            found.update((op.outs[0], *result) if ends == ["dot_general"] else ())
    return found


def _is_of_rows(op: Op) -> bool:
    """Whether it makes one number of each row, which lies in the last dims."""
    if op.name not in SUMS:
        return False
    ndim, axes = op.values[0].aval.ndim, sorted(op.params["axes"])
    return axes == list(range(ndim - len(axes), ndim))


def _factors(held: Held) -> list[Copy]:
    """A norm's factors (of rows, and of channels) that are read again by the kernel of its backward
    pass are broadcast for it, once for both passes.
    """
    read: dict[tuple[Value, Any], list[int]] = {}
    for i, op in enumerate(held.body.ops):
        for v in op.values if op.name == "mul" else ():
            *rows, channels = v.aval.shape or (1,)
            if 1 < v.aval.size < op.outs[0].aval.size and 1 in (channels, math.prod(rows)):
                read.setdefault((v, op.outs[0].aval.shape), []).append(i)
    return [
        Copy(key, first, more[-1], "work", held.bytes(held.body.ops[first].outs[0]))
        for key, (first, *more) in read.items()
        if more
    ]
