"""A traced program as a list of operations, and what its order alone says: who reads what when.

Nothing here depends on the mesh, so that one trace serves every way to split it; ``traced`` says
what of each value a device holds. A program may be traced for a number of rows that is a prime of
no other meaning (the ``unit``): its multiples among the dims are then the rows' own, and ``traced``
puts any other number in its place.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from jaxvlm.parallel import compat
from jaxvlm.plan.operations import (
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


class Body:
    """A program, or the body of a loop or branch.

    Args:
        jaxpr: not closed.
        unit: see this module's head; 0: rows are as they were traced.

    Attributes:
        ops: in order, calls resolved.
        ins: the inputs.
        outs: the outputs; a literal is one too.
        inner: the bodies of its loops, branches and maps over devices, by their place in ``ops``.
        loop: of a loop's body, how many inputs are the same each turn, and how many are carried.
    """

    def __init__(self, jaxpr: Any, unit: int = 0):
        self.unit = unit
        self.ops: list[Op] = []
        self.inner: dict[int, list[Body]] = {}
        self.loop = 0, 0
        self._known: dict[Any, list[Value]] = {}
        self._zeros: set[Value] = set()
        env = {v: Value(v.aval, unit) for v in (*jaxpr.invars, *jaxpr.constvars)}
        self.ins = [env[v] for v in jaxpr.invars]
        self._flatten(jaxpr, env, "")
        self.outs = [v if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]

    def _flatten(self, jaxpr: Any, env: dict[Any, Any], tower: str) -> None:
        """Operations of ``jaxpr`` and of all that it calls."""

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
        """The results of an operation; those that are there already are not made again."""
        outs = [Value(v.aval, self.unit) for v in eqn.outvars]
        if name in ADDS and all(isinstance(v, Value) for v in ins):  # zeros are not added
            for one, other in (ins, ins[::-1]):
                if one in self._zeros and other.aval.shape == outs[0].aval.shape:
                    return [other]
        if same := key(name, ins, eqn.params):
            if same in self._known:
                return self._known[same]
            self._known[same] = outs
        if name in BODIES:
            found = self.inner[len(self.ops)] = [Body(b, self.unit) for b in bodies(eqn.params)]
        if name == "scan":  # of equal results of a loop, one is kept
            first: dict[Any, Value] = {}
            _, carries = found[0].loop = compat.scan_inputs(dict(eqn.params))
            for n, v in enumerate(found[0].outs):
                if n >= carries and isinstance(v, Value):
                    outs[n] = first.setdefault(v, outs[n])
        values = tuple(v for v in ins if isinstance(v, Value))
        self.ops.append(Op(name, ins, tuple(outs), eqn.params, tower, values))
        if name == "broadcast_in_dim" and isinstance(ins[0], core.Literal) and not ins[0].val:
            self._zeros.update(outs)
        return self._unchanged(self.ops[-1]) if name == "scan" else outs

    def _unchanged(self, op: Op) -> list[Any]:
        """A loop's results; what no turn of it changes is what it was given, and no buffer of it.

        So are gradients of a tower that a loop over another one's chunks passes on. Zeros that a
        loop is given only to pass on it does not read; what it gives back are others, made anew.
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
            out.size, given[i - consts] = 0.0, op.ins[i]  # a result that takes no room
            if i in passed:
                zeros = given[i - consts] = Value(out.aval, self.unit)
                self._zeros.add(zeros)
                self.ops.append(Op("broadcast_in_dim", (), (zeros,), {}, op.tower, ()))
        return given

    def lean(self, kept: Sequence[bool] | None = None) -> Body:
        """The same program without what nobody reads (the gradient of a frozen table that a rule of
        its own makes): compilers leave it out. What a loop carries is kept.

        Args:
            kept: which of its results are wanted. ``None``: all are.
        """
        made = self._copy()
        made.outs = list(itertools.compress(self.outs, kept or [True] * len(self.outs)))
        read = {v for v in made.outs if isinstance(v, Value)}
        ops: list[tuple[Op, list[Body] | None]] = []
        for i, op in reversed(list(enumerate(self.ops))):
            if not read.intersection(op.outs):
                continue
            inner = self.inner.get(i)
            if op.name == "scan" and inner:
                consts, carries = compat.scan_inputs(dict(op.params))
                wanted = [n < carries or v in read for n, v in enumerate(op.outs)]
                inner = [inner[0].lean(wanted)]
                used = inner[0]._used
                given = [
                    v
                    for n, (v, own) in enumerate(zip(op.ins, inner[0].ins))
                    if v in op.values and (own in used or consts <= n < consts + carries)
                ]
                outs = tuple(itertools.compress(op.outs, wanted))
                op = op._replace(outs=outs, values=tuple(given))
            read.update(op.values)
            ops.append((op, inner))
        made.ops = [op for op, _ in reversed(ops)]
        made.inner = {i: inner for i, (_, inner) in enumerate(reversed(ops)) if inner}
        return made

    @property
    def _used(self) -> set[Value]:
        """What operations, or whoever reads the results, read."""
        found = {v for v in self.outs if isinstance(v, Value)}
        return found.union(*(op.values for op in self.ops))

    def _copy(self) -> Body:
        """One whose operations may be others."""
        made = copy.copy(self)
        for name in ("order", "written", "_kernels"):
            made.__dict__.pop(name, None)
        return made

    def late(self, carries: int = 0) -> Body:
        """The same program; in its loops, an operation is put off until the next turn needs it.

        A schedule that is made from the end, as XLA's for GPUs, is so: of attention's backward
        pass, the values' gradient is made last, and probabilities are kept until then. What no
        next turn needs (a weight's gradient) is made as soon as it can be.

        Args:
            carries: results that the next turn starts from; 0 leaves the order as it is.
        """
        return self._placed(lambda body, own: body._put_off(own) if own else None, carries)

    def broad(self) -> Body:
        """The same program, breadth first: what is ready first is done first, as XLA's for CPUs.

        What makes no buffer goes with what reads it.
        """
        return self._placed(lambda body, own: body._breadth_first(), 0)

    def hoisted(self, given: set[Value] | None = None) -> Body:
        """The same lean program; what a loop makes smaller of each layer's parameters (a copy in
        bfloat16) is made of all layers' before the first loop that reads it, once for all loops,
        as XLA for TPUs does it. A loop that keeps such copies for another keeps none. Within a loop
        over microbatches or chunks of pairs, what it is given whole counts as parameters: copies
        are there as long as it.

        Args:
            given: parameters; ``None``: what the program is given.
        """
        made = self._copy()
        made.ops, made.inner = [], {}
        done: dict[Any, Value] = {}
        same: dict[Any, Any] = {}
        given = given or set(self.ins)
        for i, op in enumerate(self.ops):
            values = tuple(same.get(v, v) for v in op.values)
            ins = tuple(same.get(v, v) if isinstance(v, Value) else v for v in op.ins)
            inner = self.inner.get(i)
            if op.name == "scan" and inner:
                consts, carries = compat.scan_inputs(dict(op.params))
                casts = inner[0]._casts(consts + carries, ins, given)
                for cast, whole in casts.items():
                    key = whole, str(cast.aval.dtype)
                    if key not in done:
                        aval = whole.aval.update(dtype=cast.aval.dtype)
                        done[key] = Value(aval, self.unit)
                        made.ops.append(Op(_CAST, (whole,), (done[key],), {}, op.tower, (whole,)))
                    ins, values = (*ins, done[key]), (*values, done[key])
                kept = [n < carries or v not in casts for n, v in enumerate(inner[0].outs)]
                for n, v in enumerate(inner[0].outs):
                    if n >= carries and v in casts:
                        same[op.outs[n]] = done[casts[v], str(v.aval.dtype)]
                around = zip(inner[0].ins[:consts], ins[:consts])
                within = {v for v, w in around if isinstance(w, Value) and w in given}
                inner = [inner[0]._given(tuple(casts), kept)]
                if not casts and within:
                    inner = [inner[0].hoisted(within)]
                op = op._replace(outs=tuple(itertools.compress(op.outs, kept)))
            if inner:
                made.inner[len(made.ops)] = inner
            made.ops.append(op._replace(ins=ins, values=values))
        made.outs = [same.get(v, v) if isinstance(v, Value) else v for v in self.outs]
        return made

    def _casts(self, first: int, ins: tuple[Any, ...], given: set[Value]) -> dict[Value, Value]:
        """Smaller copies of what a loop has an entry a turn of, and what that is as a whole."""
        whole = {v: w for v, w in zip(self.ins[first:], ins[first:]) if w in given}
        found = {}
        for op in self.ops:
            if op.name != _CAST or not op.values or op.values[0] not in whole:
                continue
            if op.outs[0].size < op.values[0].size:
                found[op.outs[0]] = whole[op.values[0]]
        return found

    def _given(self, casts: tuple[Value, ...], kept: list[bool]) -> Body:
        """The same loop's body; these values come from outside, and not all results go there."""
        left = [i for i, op in enumerate(self.ops) if op.outs[:1] not in [(v,) for v in casts]]
        made = self._placed(lambda body, _: left if body is self else None, 0)
        made.ins = [*self.ins, *casts]
        made.outs = list(itertools.compress(self.outs, kept))
        return made

    def _placed(self, how: Callable[[Body, int], list[int] | None], carries: int) -> Body:
        """The same program in another order, and so are the bodies in it."""
        places = how(self, carries) or list(range(len(self.ops)))
        made = self._copy()
        made.ops = [self.ops[i] for i in places]
        made.inner = {}
        for n, i in enumerate(places):
            if i in self.inner:
                op = self.ops[i]
                own = compat.scan_inputs(dict(op.params))[1] if op.name == "scan" else 0
                made.inner[n] = [b._placed(how, own) for b in self.inner[i]]
        return made

    def _breadth_first(self) -> list[int]:
        of = {v: i for i, op in enumerate(self.ops) for v in op.outs}
        readers: dict[int, list[int]] = {}
        missing = {}
        for i, op in enumerate(self.ops):
            given = {of[v] for v in op.values if v in of}
            missing[i] = len(given)
            for n in given:
                readers.setdefault(n, []).append(i)
        buffers = self.order.made
        found, queue = [], collections.deque(i for i, n in missing.items() if not n)
        while queue:
            found.append(i := queue.popleft())
            for n in readers.get(i, ()):
                missing[n] -= 1
                if not missing[n]:
                    (queue.append if buffers[n] else queue.appendleft)(n)
        return found

    def _put_off(self, carries: int) -> list[int]:
        """Operations in the order in which the first ``carries`` results need them."""
        of = {v: i for i, op in enumerate(self.ops) for v in op.outs}
        given = [[of[v] for v in op.values if v in of] for op in self.ops]
        ready = [of[v] for v in self.outs[:carries] if v in of]
        readers = collections.Counter(ready)
        seen, found = set(ready), list(ready)
        for i in found:  # all that the next turn needs, and by how many operations
            readers.update(given[i])
            found += [n for n in dict.fromkeys(given[i]) if n not in seen]
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
    def written(self) -> frozenset[Value]:
        """What a kernel reads and makes, and what a loop keeps of it: these lie as written."""
        found: set[Value] = set()
        for i, op in enumerate(self.ops):
            inner = self.inner.get(i, [])
            if op.name == _KERNEL or (op.name == "shard_map" and any(b._kernels for b in inner)):
                found.update(op.values, op.outs)
            elif op.name == "scan":
                found.update(v for v, own in zip(op.outs, inner[0].outs) if own in inner[0].written)
        return frozenset(found)

    @functools.cached_property
    def _kernels(self) -> bool:
        return any(op.name == _KERNEL for op in self.ops)

    @functools.cached_property
    def order(self) -> Order:
        """Which values are buffers, and when each was read last."""
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
                if op.name in VIEWS:  # each of a barrier's results is of its own operand
                    roots[v] = under(op.ins[n])
                else:
                    roots[v] = read if v in fused else frozenset([v])
            if op.name not in VIEWS and not all(v in fused for v in op.outs):
                last.update(dict.fromkeys(read, i))
        buffers = [tuple(v for v in op.outs if roots[v] == frozenset([v])) for op in self.ops]
        return Order(buffers, reads, last, [under(v) for v in self.outs])


class Order(NamedTuple):
    """When buffers live."""

    made: list[tuple[Value, ...]]
    """By each operation."""
    reads: list[frozenset[Value]]
    """Likewise."""
    read: dict[Value, int]
    """The last operation that reads each."""
    given: list[frozenset[Value]]
    """What each of the program's results is, or is a view of."""

    def last(self, results: int | None = None) -> dict[Value, int]:
        """The last operation that reads each buffer; one behind all is the program's end.

        Args:
            results: that are there until then; others are read where they are made. ``None``: all.
        """
        kept = frozenset().union(*self.given[:results])
        return self.read | dict.fromkeys(kept, len(self.made))


def _fused(body: Body) -> set[Value]:
    """Values that are made where they are read."""
    readers: dict[Value, list[str]] = {}
    kept = {v for v in body.outs if isinstance(v, Value)}
    for op in reversed(body.ops):
        if op.name in VIEWS:  # who reads a view reads what it is of
            for v, out in zip(op.ins, op.outs):
                if isinstance(v, Value):
                    readers.setdefault(v, []).extend(readers.get(out, []))
                    kept.update([v] if out in kept else ())
            continue
        for v in op.values:
            readers.setdefault(v, []).append(op.name)
    made: set[Value] = set()
    for op in body.ops:
        if op.name in OPAQUE or op.name in VIEWS or op.name.startswith(REDUCE):
            continue
        for v in op.outs:
            names = readers.get(v, [])
            again = len(names) < 2 or op.name in CHEAP
            if v not in kept and again and not OPAQUE.intersection(names):
                made.add(v)
    return made


def _done(readers: collections.Counter[int], i: int) -> bool:
    """Whether, with this one, all that read an operation's results have been gone through."""
    readers[i] -= 1
    return not readers[i]
