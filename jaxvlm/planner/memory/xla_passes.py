"""Effects of compilers' passes on the memory of a traced program.

Each rule was read from XLA's buffer assignments; ``compilers`` says which compiler has which.
"""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

from jaxvlm.parallel import compat
from jaxvlm.planner.memory.compilers import Compiler
from jaxvlm.planner.memory.jaxpr_sharding import ShardedValues, stacked
from jaxvlm.planner.memory.operation import ADDS, OPAQUE, SUMS, VIEWS, Op, Value, base, is_number

_GATHERS = (
    "dot_general", "conv_general_dilated", "ragged_dot_general", "pallas_call", "shard_map",
)  # fmt: skip
"""Operations before which a sharded parameter is all-gathered."""


class Copy(NamedTuple):
    """A buffer that no operation of the traced program creates."""

    of: Any
    """The value that is copied, or what the buffer is computed from."""
    first: int
    """Index of the operation before which it is created."""
    last: int
    """Index of the last operation that reads it."""
    kind: str
    """Category, see :func:`kind`."""
    bytes: float


class XlaPasses:
    """Changes that a compiler makes to the buffers of a program.

    Args:
        held: the program's values on one device.
        compiler: the compiler's behaviour.
        loop: whether the program is a loop's body.
        gathered_outside: parameters that are all-gathered outside of the loop.

    Attributes:
        start: values that exist from the start of the program.
        unbuffered: values without a buffer.
        copies: additional buffers.
        outside_idle_buffers: values that never use an idle buffer, for the top-level program.
        already_gathered: parameters that are not all-gathered at their readers.

    """

    def __init__(
        self,
        held: ShardedValues,
        compiler: Compiler,
        loop: bool,
        gathered_outside: frozenset[Value] = frozenset(),
    ):
        numbers, sunk = _numbers(held) if compiler.sinks_scalars else (set(), set())
        self.unbuffered: set[Any] = sunk
        self.copies: list[Copy] = _transposed(held)
        self.start: list[Value] = []
        self.outside_idle_buffers: set[Any] = set()
        self.already_gathered = set(gathered_outside)
        if compiler.shares_gathers and loop:
            self._gathered(held)
        if compiler.fuses_reductions:
            self.unbuffered = self.unbuffered | _fused_reductions(held)
            self.copies += _factors(held)
        if compiler.runs_when_ready and loop:
            self.unbuffered = self.unbuffered | _accumulated_in_place(held)
        if compiler.runs_when_ready if loop else compiler.fills_stacks_first:
            last = held.body.order.last()
            for op in held.body.ops:
                self.start += [v for v in stacked(op) if v in last]
                self.start += [v for v in op.outs if v in numbers and not loop]
        if compiler.runs_when_ready and not loop:
            self.copies += _turned(held)
            self._fix(held)

    def _fix(self, held: ShardedValues) -> None:
        """Mark the values that are created before moments are copied, or read after they are
        written.
        """
        self.outside_idle_buffers.update(results(held), held.gradients)
        # Of zeros of one shape, all but one array are copies, made after those of the moments.
        zeros = {(v.aval.shape, v.aval.dtype): v for v in reversed(self.start)}
        self.outside_idle_buffers.update(zeros.values())
        for op, created in zip(held.body.ops, held.body.order.created):
            if op.name in ("scan", "dot_general"):
                break
            self.outside_idle_buffers.update(created)  # ready operations run first
        self.outside_idle_buffers -= _sums_of_two(held)

    def _gathered(self, held: ShardedValues) -> None:
        """Count parameters with several readers: all-gathered for the first, freed after the
        last.
        """
        for values in _read(held).values():
            (first, v), *more = values
            if more and v not in self.already_gathered:
                size, tower = held.bytes(v) * held.parts(v), held.body.ops[first].tower
                name = f"{tower} weights".strip()
                self.copies.append(Copy(v, first, more[-1][0], name, size))
                self.already_gathered.update(v for _, v in values)


def kind(held: ShardedValues, op: Op, v: Value) -> str:
    """Category of a value, see :class:`jaxvlm.planner.memory.liveness.Peak`."""
    category = "work"
    if v in held.gradients:
        category = "gradients"
    elif held.parts(v):
        category = "weights"
    elif v in stacked(op):
        category = "saved"
    return f"{op.tower} {category}".strip()


def results(held: ShardedValues) -> set[Any]:
    """Buffers that a program returns."""
    return {v for read in held.body.order.returned for v in read}


def sums(held: ShardedValues) -> dict[Any, frozenset[Any]]:
    """Reduction -> the buffers that it reduces."""
    reduced: dict[Any, frozenset[Any]] = {}
    order = held.body.order
    for op, created, read in zip(held.body.ops, order.created, order.reads):
        if op.name in SUMS:
            reduced |= dict.fromkeys(created, read.union(*(reduced.get(v, ()) for v in read)))
    return reduced


def shares(held: ShardedValues, op: Op) -> list[Value]:
    """Sharded parameters that an operation reads all-gathered."""
    values = op.values if op.name in _GATHERS else ()
    return [v for v in values if held.parts(v) > 1 and v not in held.gradients]


def _read(held: ShardedValues) -> dict[Any, list[tuple[int, Value]]]:
    """Sharded parameter -> (operation, view that it reads) of each reader that all-gathers it.

    Views of a parameter count as that parameter.
    """
    by = {out: op for op in held.body.ops for out in op.outs}
    readers: dict[Any, list[tuple[int, Value]]] = {}
    for i, op in enumerate(held.body.ops):
        for v in shares(held, op):
            readers.setdefault(base(by, v), []).append((i, v))
    return readers


def invariant(held: ShardedValues) -> dict[Any, list[Value]]:
    """Loop-invariant parameters that every iteration would all-gather, and the values read of each.

    Values computed only from loop-invariant inputs are loop-invariant too.
    """
    invariants = set(held.body.ins[: held.body.loop[0]])
    for op in held.body.ops:
        invariants.update(op.outs if op.values and invariants.issuperset(op.values) else ())
    read = {parameter: [v for _, v in values] for parameter, values in _read(held).items()}
    return {p: values for p, values in read.items() if invariants.issuperset(values)}


def by_expert(held: ShardedValues) -> float:
    """Bytes of the per-expert copies of tokens, which XLA's grouped matmul makes on CPU and GPU.

    The copies of a layer exist at the same time. Those within a shard_map are not counted.
    """
    sizes: dict[Any, float] = {}
    for op in held.body.ops:
        if op.name == "ragged_dot_general":
            rows, groups = op.ins[0], op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
            experts = op.ins[1].aval if groups else op.outs[0].aval
            sizes[rows, bool(groups)] = held.bytes(rows) * experts.shape[0]
    return float(sum(sizes.values()))


def _accumulated_in_place(held: ShardedValues) -> set[Any]:
    """Gradients that a loop adds to its carried sums in place."""
    (consts, carries), body = held.body.loop, held.body
    by = {out: op for op in body.ops for out in op.outs}
    in_place = set[Any]()
    for given, total in zip(body.ins[consts:], body.outs[:carries]):
        op = by.get(total) if isinstance(total, Value) else None
        if op and op.name in ADDS and given in op.values and held.parts(total):
            in_place.add(total)
    return in_place


def _sums_of_two(held: ShardedValues) -> set[Any]:
    """Gradients that two loops accumulate (a decoder that reads both sides of pairs).

    Their zeros are copies too, made after those of the moments.
    """
    by = {out: op for op in held.body.ops for out in op.outs}
    shapes = set()
    for op in held.body.ops:
        if op.name in ADDS and op.outs[0] in held.gradients:
            loops = [by.get(base(by, v)) for v in op.values]
            if len(loops) == 2 and all(x and x.name == "scan" for x in loops):
                shapes.add(op.outs[0].aval.shape)
    return {v for v in held.gradients if v.aval.shape in shapes} - results(held)


def _transposed(held: ShardedValues) -> list[Copy]:
    """Copies of parameters that loops read in another layout.

    A parameter is copied if more than one loop reads it, or one over microbatches or GradCache
    mini-batches, which contains loops. One that a single loop over layers reads (a frozen tower's
    forward pass) is not.
    """
    copies = []
    loops = {i: op for i, op in enumerate(held.body.ops) if op.name == "scan"}
    for v in held.transposed:
        readers = [i for i, op in loops.items() if v in op.values]
        if len(readers) > 1 or any(held.inner[i].inner for i in readers):
            tower = f"{loops[readers[0]].tower} weights".strip()
            copies.append(Copy(v, readers[0], readers[-1], tower, held.bytes(v)))
    return copies


def _turned(held: ShardedValues) -> list[Copy]:
    """Copies of transposed parameters that loops read, as tied embeddings: one for all loops."""
    views = {op.outs[0]: op for op in held.body.ops if op.name in VIEWS and op.outs}
    readers: dict[Value, list[int]] = collections.defaultdict(list)
    for i, op in enumerate(held.body.ops):
        if op.name == "scan":
            for v in op.ins[: compat.scan_inputs(dict(op.params))[0]]:
                if isinstance(v, Value) and held.parts(v) and _is_turned(v, views):
                    readers[v].append(i)
    return [
        Copy(v, at[0], at[-1], f"{held.body.ops[at[0]].tower} weights".strip(), held.bytes(v))
        for v, at in readers.items()
    ]


def _is_turned(v: Any, views: dict[Any, Op]) -> bool:
    """Whether a value is another one transposed, with other dims or not."""
    while v in views and views[v].name != "transpose":
        v = views[v].ins[0]
    return v in views


def _numbers(held: ShardedValues) -> tuple[set[Any], set[Any]]:
    """Broadcast scalars that loops read: those of forward loops, and those of backward loops alone.

    A backward loop is one over the stacked outputs of another loop.
    """
    numbers = {op.outs[0] for op in held.body.ops if is_number(op)}
    numbers.difference_update(v for v in held.body.outs if isinstance(v, Value))
    saved: set[Any] = set()
    forward: set[Any] = set()
    for op in held.body.ops:
        if op.name != "scan":
            numbers.difference_update(op.values)
            if op.name in VIEWS or op.name == "convert_element_type":
                saved.update(op.outs if saved.intersection(op.values) else ())
            continue
        consts, carries = compat.scan_inputs(dict(op.params))
        numbers.difference_update(v for v in op.ins[consts:] if isinstance(v, Value))
        if not saved.intersection(v for v in op.ins[consts + carries :] if isinstance(v, Value)):
            forward.update(v for v in op.ins[:consts] if isinstance(v, Value))
        saved.update(stacked(op))
    return numbers & forward, numbers - forward


def _fused_reductions(held: ShardedValues) -> set[Any]:
    """Values without a buffer because a kernel fuses a matmul with what follows it.

    These are a product that only its row reduction and one more elementwise operation read (a
    softmax's gradient), and all of attention's forward pass if nothing changes scores before
    softmax.
    """
    body, order, fused = held.body, held.body.order, set[Any]()
    returned, readers = results(held), dict[Any, list[int]]()
    by = {out: op for op in body.ops for out in op.outs}
    for i, created in enumerate(order.created):
        for v in order.reads[i] if created else ():
            readers.setdefault(v, []).append(i)
    for op in body.ops:
        reading = readers.get(op.outs[0], ()) if op.name == "dot_general" else ()
        over = [i for i in reading if _is_of_rows(body.ops[i])]
        rest = [i for i in reading if i not in over]
        if op.outs[0] in returned or not over or len(rest) != 1 or body.ops[rest[0]].name in OPAQUE:
            continue
        result = order.created[rest[0]]
        greatest = [body.ops[i].values[0] for i in over if body.ops[i].name == "reduce_max"]
        if not greatest:
            fused.add(op.outs[0])
        elif not returned.intersection(result) and base(by, greatest[0]) is op.outs[0]:
            ends = [body.ops[i].name for v in result for i in readers.get(v, ())]
            fused.update((op.outs[0], *result) if ends == ["dot_general"] else ())
    return fused


def _is_of_rows(op: Op) -> bool:
    """Whether an operation reduces the last dims."""
    if op.name not in SUMS:
        return False
    ndim, axes = op.values[0].aval.ndim, sorted(op.params["axes"])
    return axes == list(range(ndim - len(axes), ndim))


def _factors(held: ShardedValues) -> list[Copy]:
    """Broadcast copies of a norm's factors (per row and per channel), which its backward pass reads
    again.

    They are made once for both passes.
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
