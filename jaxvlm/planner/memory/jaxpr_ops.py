"""A traced program as a list of operations, with the readers of each value and their order.

Nothing here depends on the mesh, so one trace serves every way to shard the program;
``jaxpr_sharding`` knows which part of each value a device holds. A program may be traced for a
batch size that is a prime which divides no other dim (the ``unit``): the dims that it divides are
batch dims, and ``jaxpr_sharding`` puts any other batch size in its place.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend import core
from jax.interpreters import partial_eval

from jaxvlm.parallel import compat
from jaxvlm.planner.memory.operation import (
    ADDS,
    BODIES,
    CALLS,
    CHEAP,
    OPAQUE,
    REDUCE,
    VIEWS,
    Op,
    Value,
    bodies,
    key,
    tower_of,
)

_CAST, _KERNEL = "convert_element_type", "pallas_call"


def without_dead_code(jaxpr: Any) -> Any:
    """Remove what no result needs, carries of loops too, as compilers do.

    Such as the gradient of a frozen table by a custom rule.
    """
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


class Jaxpr:
    """A program, or the body of a loop or branch, as a flat list of operations.

    Args:
        jaxpr: an open jaxpr.
        unit: traced batch size, see this module's docstring; 0: batch dims are as traced.

    Attributes:
        ops: operations in order, calls inlined.
        ins: the inputs.
        outs: the outputs; they may be literals.
        inner: bodies of its loops, branches and shard_maps, by their index in ``ops``.
        loop: for a loop's body, the number of loop-invariant inputs and of carries.
    """

    def __init__(self, jaxpr: Any, unit: int = 0):
        self.unit = unit
        self.ops: list[Op] = []
        self.inner: dict[int, list[Jaxpr]] = {}
        self.loop = 0, 0
        self._known: dict[Any, list[Value]] = {}
        self._zeros: set[Value] = set()
        env = {v: Value(v.aval, unit) for v in (*jaxpr.invars, *jaxpr.constvars)}
        self.ins = [env[v] for v in jaxpr.invars]
        self._flatten(jaxpr, env, "")
        self.outs = [v if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]

    def _flatten(self, jaxpr: Any, env: dict[Any, Any], tower: str) -> None:
        """Append the operations of ``jaxpr`` and of all functions that it calls."""

        def read(v: Any) -> Any:
            return v if isinstance(v, core.Literal) else env[v]

        for eqn in jaxpr.eqns:
            name, own = eqn.primitive.name, tower_of(str(eqn.source_info.name_stack)) or tower
            called = None
            if name not in OPAQUE:
                called = next((eqn.params[k] for k in CALLS if k in eqn.params), None)
            ins = tuple(read(v) for v in eqn.invars)
            if called is None:
                env.update(zip(eqn.outvars, self._op(name, ins, eqn, own)))
                continue
            called = getattr(called, "jaxpr", called)
            inside = dict(zip(called.invars, ins))
            inside |= {v: Value(v.aval, self.unit) for v in called.constvars}
            self._flatten(called, inside, own)
            for out, v in zip(eqn.outvars, called.outvars):
                env[out] = v if isinstance(v, core.Literal) else inside[v]

    def _op(self, name: str, ins: tuple[Any, ...], eqn: Any, tower: str) -> list[Any]:
        """Append an operation and return its results; those of an equal operation are reused."""
        outs = [Value(v.aval, self.unit) for v in eqn.outvars]
        if name in ADDS and all(isinstance(v, Value) for v in ins):  # adding zeros is a no-op
            for one, other in (ins, ins[::-1]):
                if one in self._zeros and other.aval.shape == outs[0].aval.shape:
                    return [other]
        if same := key(name, ins, eqn.params):
            if same in self._known:
                return self._known[same]
            self._known[same] = outs
        if name in BODIES:
            inner = self.inner[len(self.ops)] = [Jaxpr(b, self.unit) for b in bodies(eqn.params)]
        if name == "scan":  # equal results of a loop share one buffer
            first: dict[Any, Value] = {}
            _, carries = inner[0].loop = compat.scan_inputs(dict(eqn.params))
            for n, v in enumerate(inner[0].outs):
                if n >= carries and isinstance(v, Value):
                    outs[n] = first.setdefault(v, outs[n])
        values = tuple(v for v in ins if isinstance(v, Value))
        self.ops.append(Op(name, ins, tuple(outs), eqn.params, tower, values))
        if name == "broadcast_in_dim" and isinstance(ins[0], core.Literal) and not ins[0].val:
            self._zeros.update(outs)
        return self._unchanged(self.ops[-1]) if name == "scan" else outs

    def _unchanged(self, op: Op) -> list[Any]:
        """Results of a loop; a carry that no iteration changes is its input, not a buffer.

        So are gradients of a tower that a loop over another tower's microbatches passes on. Zeros
        that a loop only passes on are not read by it; its results are other zeros, with their own
        buffer.
        """
        (body,), given = self.inner[len(self.ops) - 1], list(op.outs)
        consts, carries = compat.scan_inputs(dict(op.params))
        same = {
            consts + n
            for n in range(carries)
            if body.outs[n] is body.ins[consts + n] and isinstance(op.ins[consts + n], Value)
        }
        passed = {i for i in same if op.ins[i] in self._zeros}
        read = tuple(v for i, v in enumerate(op.ins) if isinstance(v, Value) and i not in passed)
        self.ops[-1] = op._replace(values=read)
        for i in sorted(same):
            out = op.outs[i - consts]
            out.size, given[i - consts] = 0.0, op.ins[i]  # a result without a buffer
            if i in passed:
                zeros = given[i - consts] = Value(out.aval, self.unit)
                self._zeros.add(zeros)
                self.ops.append(Op("broadcast_in_dim", (), (zeros,), {}, op.tower, ()))
        return given

    def _copy(self) -> Jaxpr:
        """A copy whose operations may be replaced."""
        program = copy.copy(self)
        for name in ("order", "fixed_layout", "_kernels"):
            program.__dict__.pop(name, None)
        return program

    def scheduled_late(self, carries: int = 0) -> Jaxpr:
        """The program with operations in its loops delayed until the next iteration needs them.

        XLA for GPUs schedules from the end: in attention's backward pass, the gradient of the
        values comes last, and probabilities are kept until then. Results that no next iteration
        needs (a weight's gradient) are computed as soon as possible.

        Args:
            carries: number of results that the next iteration starts from; 0 keeps the order.
        """
        return self._reordered(lambda body, own: body._late_order(own) if own else None, carries)

    def breadth_first(self) -> Jaxpr:
        """The program in breadth-first order: ready operations run first, as XLA for CPUs schedules
        them.

        An operation without a buffer goes with its readers.
        """
        return self._reordered(lambda body, own: body._breadth_first(), 0)

    def with_hoisted_casts(self, parameters: set[Value] | None = None) -> Jaxpr:
        """The dead-code-free program with casts of layers' parameters moved out of the loops over
        layers.

        Smaller copies (bfloat16) are made of all layers' parameters before the first loop that
        reads them, once for all loops, as XLA for TPUs does. A loop that would save such copies for
        another loop saves none. Within a loop over microbatches or GradCache mini-batches, its
        loop-invariant inputs count as parameters: copies exist as long as the loop runs.

        Args:
            parameters: the parameters; ``None``: the program's inputs.

        """
        program = self._copy()
        program.ops, program.inner = [], {}
        copies: dict[Any, Value] = {}
        replaced: dict[Any, Any] = {}
        parameters = parameters or set(self.ins)
        for i, op in enumerate(self.ops):
            values = tuple(replaced.get(v, v) for v in op.values)
            ins = tuple(replaced.get(v, v) if isinstance(v, Value) else v for v in op.ins)
            inner = self.inner.get(i)
            if op.name == "scan" and inner:
                consts, carries = compat.scan_inputs(dict(op.params))
                casts = inner[0]._casts(consts + carries, ins, parameters)
                for cast, stacked in casts.items():
                    key = stacked, str(cast.aval.dtype)
                    if key not in copies:
                        aval = stacked.aval.update(dtype=cast.aval.dtype)
                        copies[key] = Value(aval, self.unit)
                        new = Op(_CAST, (stacked,), (copies[key],), {}, op.tower, (stacked,))
                        program.ops.append(new)
                    ins, values = (*ins, copies[key]), (*values, copies[key])
                keeps = [n < carries or v not in casts for n, v in enumerate(inner[0].outs)]
                for n, v in enumerate(inner[0].outs):
                    if n >= carries and v in casts:
                        replaced[op.outs[n]] = copies[casts[v], str(v.aval.dtype)]
                invariants = zip(inner[0].ins[:consts], ins[:consts])
                within = {v for v, w in invariants if isinstance(w, Value) and w in parameters}
                inner = [inner[0]._with_inputs(tuple(casts), keeps)]
                if not casts and within:
                    inner = [inner[0].with_hoisted_casts(within)]
                op = op._replace(outs=tuple(itertools.compress(op.outs, keeps)))
            if inner:
                program.inner[len(program.ops)] = inner
            program.ops.append(op._replace(ins=ins, values=values))
        program.outs = [replaced.get(v, v) if isinstance(v, Value) else v for v in self.outs]
        return program

    def _casts(
        self, first: int, ins: tuple[Any, ...], parameters: set[Value]
    ) -> dict[Value, Value]:
        """Smaller copies of a loop's scanned inputs -> the stacked array that is scanned over."""
        stacked = {v: w for v, w in zip(self.ins[first:], ins[first:]) if w in parameters}
        casts = {}
        for op in self.ops:
            if op.name != _CAST or not op.values or op.values[0] not in stacked:
                continue
            if op.outs[0].size < op.values[0].size:
                casts[op.outs[0]] = stacked[op.values[0]]
        return casts

    def _with_inputs(self, casts: tuple[Value, ...], keeps: list[bool]) -> Jaxpr:
        """The loop's body with these casts as inputs, and with some of its results dropped."""
        order = [i for i, op in enumerate(self.ops) if op.outs[:1] not in [(v,) for v in casts]]
        made = self._reordered(lambda body, _: order if body is self else None, 0)
        made.ins = [*self.ins, *casts]
        made.outs = list(itertools.compress(self.outs, keeps))
        return made

    def _reordered(self, reorder: Callable[[Jaxpr, int], list[int] | None], carries: int) -> Jaxpr:
        """The program with its operations in another order, applied to the bodies in it too."""
        places = reorder(self, carries) or list(range(len(self.ops)))
        program = self._copy()
        program.ops = [self.ops[i] for i in places]
        program.inner = {}
        for n, i in enumerate(places):
            if i in self.inner:
                op = self.ops[i]
                own = compat.scan_inputs(dict(op.params))[1] if op.name == "scan" else 0
                program.inner[n] = [b._reordered(reorder, own) for b in self.inner[i]]
        return program

    def _breadth_first(self) -> list[int]:
        creator = {v: i for i, op in enumerate(self.ops) for v in op.outs}
        readers: dict[int, list[int]] = {}
        missing = {}
        for i, op in enumerate(self.ops):
            given = {creator[v] for v in op.values if v in creator}
            missing[i] = len(given)
            for n in given:
                readers.setdefault(n, []).append(i)
        buffers = self.order.created
        order, queue = [], collections.deque(i for i, n in missing.items() if not n)
        while queue:
            order.append(i := queue.popleft())
            for n in readers.get(i, ()):
                missing[n] -= 1
                if not missing[n]:
                    (queue.append if buffers[n] else queue.appendleft)(n)
        return order

    def _late_order(self, carries: int) -> list[int]:
        """Operations in the order in which the first ``carries`` results need them."""
        creator = {v: i for i, op in enumerate(self.ops) for v in op.outs}
        given = [[creator[v] for v in op.values if v in creator] for op in self.ops]
        ready = [creator[v] for v in self.outs[:carries] if v in creator]
        readers = collections.Counter(ready)
        seen, needed = set(ready), list(ready)
        for i in needed:  # all that the next iteration needs, with their reader counts
            readers.update(given[i])
            needed += [n for n in dict.fromkeys(given[i]) if n not in seen]
            seen.update(given[i])
        last, ready = [], [i for i in dict.fromkeys(ready) if _done(readers, i)]
        while ready:
            last.append(i := ready.pop())
            ready += [n for n in reversed(given[i]) if _done(readers, n)]
        place = {i: n for n, i in enumerate(reversed(last))}
        for i in range(len(self.ops)):
            place.setdefault(i, max((place[n] for n in given[i]), default=0))
        return sorted(place, key=lambda i: (place[i], i not in seen, i))

    @functools.cached_property
    def fixed_layout(self) -> frozenset[Value]:
        """Operands and results of kernels, and those saved by loops: their layout is fixed."""
        fixed: set[Value] = set()
        for i, op in enumerate(self.ops):
            inner = self.inner.get(i, [])
            if op.name == _KERNEL or (op.name == "shard_map" and any(b._kernels for b in inner)):
                fixed.update(op.values, op.outs)
            elif op.name == "scan":
                inside = inner[0].fixed_layout
                fixed.update(v for v, own in zip(op.outs, inner[0].outs) if own in inside)
        return frozenset(fixed)

    @functools.cached_property
    def _kernels(self) -> bool:
        return any(op.name == _KERNEL for op in self.ops)

    @functools.cached_property
    def order(self) -> OpOrder:
        """Which values are buffers, and the last operation that reads each."""
        fused = _fused(self)
        roots: dict[Any, frozenset[Any]] = {v: frozenset() for v in self.ins}

        def under(v: Any) -> frozenset[Any]:
            return roots.get(v, frozenset()) if isinstance(v, Value) else frozenset()

        last: dict[Any, int] = {}
        reads = []
        for i, op in enumerate(self.ops):
            read = frozenset().union(*map(under, op.values))
            reads.append(read)
            for n, v in enumerate(op.outs):
                if op.name in VIEWS:  # each result of a barrier is a view of its own operand
                    roots[v] = under(op.ins[n])
                else:
                    roots[v] = read if v in fused else frozenset([v])
            if op.name not in VIEWS and not all(v in fused for v in op.outs):
                last.update(dict.fromkeys(read, i))
        buffers = [tuple(v for v in op.outs if roots[v] == frozenset([v])) for op in self.ops]
        return OpOrder(buffers, reads, last, [under(v) for v in self.outs])


class OpOrder(NamedTuple):
    """Lifetimes of buffers."""

    created: list[tuple[Value, ...]]
    """Buffers that each operation creates."""
    reads: list[frozenset[Value]]
    """Buffers that each operation reads."""
    last_read: dict[Value, int]
    """Index of the last operation that reads each buffer."""
    returned: list[frozenset[Value]]
    """Buffers that each of the program's results is a view of."""

    def last(self, results: int | None = None) -> dict[Value, int]:
        """Index of the last operation that reads each buffer; the number of operations means the
        end.

        Args:
            results: number of results that live until the end; others live until their last reader.
                ``None``: all.
        """
        returned = frozenset().union(*self.returned[:results])
        return self.last_read | dict.fromkeys(returned, len(self.created))


def _fused(body: Jaxpr) -> set[Value]:
    """Values that are fused into their readers, and so have no buffer."""
    readers: dict[Value, list[str]] = {}
    returned = {v for v in body.outs if isinstance(v, Value)}
    for op in reversed(body.ops):
        if op.name in VIEWS:  # a reader of a view reads its operand
            for v, out in zip(op.ins, op.outs):
                if isinstance(v, Value):
                    readers.setdefault(v, []).extend(readers.get(out, []))
                    returned.update([v] if out in returned else ())
            continue
        for v in op.values:
            readers.setdefault(v, []).append(op.name)
    fused: set[Value] = set()
    for op in body.ops:
        if op.name in OPAQUE or op.name in VIEWS or op.name.startswith(REDUCE):
            continue
        for v in op.outs:
            names = readers.get(v, [])
            recomputable = len(names) < 2 or op.name in CHEAP
            if v not in returned and recomputable and not OPAQUE.intersection(names):
                fused.add(v)
    return fused


def _done(readers: collections.Counter[int], i: int) -> bool:
    """Count down an operation's unvisited readers; whether none is left."""
    readers[i] -= 1
    return not readers[i]
