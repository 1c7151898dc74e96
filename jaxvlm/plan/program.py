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
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from jaxvlm.parallel import compat


def words(text: str) -> frozenset[str]:
    """Those of a text."""
    return frozenset(text.split())


VIEWS = words(
    "reshape squeeze expand_dims transpose copy copy_p sharding_constraint "
    "optimization_barrier stop_gradient name reshard bitcast_convert_type pvary"
)
"""Operations that give their operand under another shape."""
OPAQUE = words(
    "dot_general conv_general_dilated scan while cond gather scatter scatter-add sort top_k "
    "cumsum cumlogsumexp cummax custom_call pallas_call shard_map "
    "ragged_dot_general dynamic_update_slice all_gather psum reduce_scatter all_to_all "
    "ppermute"
)
"""Operations that read and write whole buffers."""
_BODIES = ("scan", "cond", "while", "shard_map")
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_TOWERS = ("vision", "top", "connector", "decoder", "text")
_ADDS = ("add", "add_any")
_CAST, _KERNEL = "convert_element_type", "pallas_call"
_REDUCE = ("reduce_", "argmax", "argmin")
SUMS = words("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or")
"""Operations that make one number of several."""
_CHEAP = words(
    "broadcast_in_dim iota convert_element_type lt le gt ge eq ne and or not slice neg exp select_n"
)
"""Operations that are done again for each reader, rather than once for all."""


class Value:
    """A value of the program, calls resolved.

    Attributes:
        aval: as it was traced.
        rows: how many of its dims are rows'.
        size: bytes, of one row.
    """

    __slots__ = ("aval", "rows", "size")

    def __init__(self, aval: Any, unit: int):
        self.aval, self.rows, self.size = aval, 0, 0.0
        dtype = getattr(aval, "dtype", None)
        if dtype is None or str(dtype) == "float0":
            return
        dims = list(aval.shape)
        if unit:
            self.rows = sum(n % unit == 0 for n in dims if n)
            dims = [n // unit if n % unit == 0 else n for n in dims]
        self.size = float(math.prod(dims) * itemsize(dtype))

    def shape(self, unit: int, rows: float | int) -> tuple[float | int, ...]:
        """Its dims where the unit stands for so many rows."""
        dims = self.aval.shape
        return tuple(n / unit * rows if unit and n and n % unit == 0 else n for n in dims)


class Op(NamedTuple):
    """An operation."""

    name: str
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    params: Mapping[str, Any]
    tower: str
    """Whose it is; "" where none's."""
    values: tuple[Value, ...]
    """Of ``ins``, those that are no literals."""


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
    """

    def __init__(self, jaxpr: Any, unit: int = 0):
        self.unit = unit
        self.ops: list[Op] = []
        self.inner: dict[int, list[Body]] = {}
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
            name, own = eqn.primitive.name, _tower(str(eqn.source_info.name_stack)) or tower
            called = None
            if name not in OPAQUE:
                called = next((eqn.params[k] for k in _CALLS if k in eqn.params), None)
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
        if name in _ADDS and all(isinstance(v, Value) for v in ins):  # zeros are not added
            for one, other in (ins, ins[::-1]):
                if one in self._zeros and other.aval.shape == outs[0].aval.shape:
                    return [other]
        if key := _key(name, ins, eqn.params):
            if key in self._known:
                return self._known[key]
            self._known[key] = outs
        if name in _BODIES:
            found = self.inner[len(self.ops)] = [Body(b, self.unit) for b in _bodies(eqn.params)]
        if name == "scan":  # of equal results of a loop, one is kept
            first: dict[Any, Value] = {}
            carries = compat.scan_inputs(dict(eqn.params))[1]
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
        """The same program; what a loop makes smaller of each layer's parameters (a copy in
        bfloat16) is made of all layers' before the first loop that reads it, once for all loops, as
        XLA for TPUs does it. A loop that keeps such copies for another keeps none, and none that
        nobody reads (the gradient of frozen tables). Within a loop over microbatches or chunks of
        pairs, what it is given whole counts as parameters: copies are there as long as it.

        Args:
            given: parameters; ``None``: what the program is given.
        """
        made = copy.copy(self)
        made.__dict__.pop("order", None)
        made.__dict__.pop("written", None)
        made.ops, made.inner = [], {}
        done: dict[Any, Value] = {}
        same: dict[Any, Any] = {}
        given, read = given or set(self.ins), {v for v in self.outs if isinstance(v, Value)}
        for op in reversed(self.ops):
            read.update(op.values if read.intersection(op.outs) else ())
        for i, op in enumerate(self.ops):
            if not read.intersection(op.outs):
                continue
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
                kept = [
                    n < carries or (v not in casts and op.outs[n] in read)
                    for n, v in enumerate(inner[0].outs)
                ]
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
        made = copy.copy(self)
        made.__dict__.pop("order", None)
        made.__dict__.pop("written", None)
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
            for v in op.outs:
                roots[v] = read if op.name in VIEWS or v in fused else frozenset([v])
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


def is_number(op: Op) -> bool:
    """Whether an operation broadcasts one number."""
    return op.name == "broadcast_in_dim" and all(v.aval.size == 1 for v in op.values)


def _fused(body: Body) -> set[Value]:
    """Values that are made where they are read."""
    readers: dict[Value, list[str]] = {}
    kept = {v for v in body.outs if isinstance(v, Value)}
    for op in reversed(body.ops):
        seen = [op.name]
        if op.name in VIEWS:  # who reads a view reads what it is of
            seen = readers.get(op.outs[0], [])
            kept.update(op.values if op.outs[0] in kept else ())
        for v in op.values:
            readers.setdefault(v, []).extend(seen)
    made: set[Value] = set()
    for op in body.ops:
        if op.name in OPAQUE or op.name in VIEWS or op.name.startswith(_REDUCE):
            continue
        for v in op.outs:
            names = readers.get(v, [])
            again = len(names) < 2 or op.name in _CHEAP
            if v not in kept and again and not OPAQUE.intersection(names):
                made.add(v)
    return made


def _key(name: str, ins: tuple[Any, ...], params: Mapping[str, Any]) -> Any:
    """What equal operations have in common: compilers do them once. None: it is done anyway."""
    if name in (*_BODIES, "optimization_barrier"):
        return None
    given = tuple(v if isinstance(v, Value) else (str(v.val), str(v.aval)) for v in ins)
    found = (name, given, *((k, v) for k, v in params.items() if k not in ("name", "sharding")))
    try:
        hash(found)
    except TypeError:
        return None
    return found


def _done(readers: collections.Counter[int], i: int) -> bool:
    """Whether, with this one, all that read an operation's results have been gone through."""
    readers[i] -= 1
    return not readers[i]


def itemsize(dtype: Any) -> int:
    """Bytes of an element."""
    try:
        return int(np.dtype(dtype).itemsize)
    except TypeError:  # a PRNG key
        return 8


@functools.lru_cache(maxsize=4096)
def _tower(scope: str) -> str:
    """Whose an operation is, by the names around it."""
    parts = scope.split("/")
    return next((t for t in _TOWERS if f"({t})" in scope or t in parts), "")


def _bodies(params: Mapping[str, Any]) -> list[Any]:
    """The jaxprs among an equation's parameters."""
    found = []
    for value in params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                found.append(x)
    return found
