"""What of each value of a traced program a device holds.

Parameters are whole in the trace. One that is split over devices between matmuls (FSDP) is counted
by a device's share, and so is what is made of parameters alone (a copy in the compute dtype) and
what becomes them (gradients). Dims that are split in matmuls too (tensor parallelism) are followed
through the program; see ``spread``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxvlm.parallel import compat
from jaxvlm.plan import spread, tiles
from jaxvlm.plan.operations import OPAQUE, VIEWS, Op, Value, is_number, itemsize, words
from jaxvlm.plan.program import Body
from jaxvlm.plan.spread import Dims

_SAME = VIEWS | words(
    "convert_element_type slice dynamic_slice mul div add add_any sub neg reduce_precision "
    "pad concatenate split stack unstack select_n rev broadcast_in_dim"
)
"""Operations that make a parameter's like of parameters, a gradient's of gradients."""
_INTO = ("scatter-add", "scatter", "dynamic_update_slice")
"""Operations that write into their first operand."""


class Share(NamedTuple):
    """What of an input or output a device holds."""

    parts: float = 0.0
    """Devices that a parameter, or its gradient, is split over between matmuls; 0: it is neither
    of them."""
    dims: Dims = ()
    """How its dims are split besides, in matmuls too."""
    turned: bool = False
    """Whether a loop over layers gathers a dim of it that is not a layer's first."""


NONE = Share()


class Held:
    """A program's values on a device.

    Args:
        body: the program.
        ins: what of each input a device holds.
        outs: of each output, where that is wanted; () says nothing.
        rows: that the body's unit stands for.
        tiled: values lie in tiles, as on TPUs; shares of parameters have that in them.

    Attributes:
        body: the program.
        rows: as given.
        tiled: as given.
        inner: of its scans, by their place in ``body.ops``.
        gradients: values that become one of ``outs`` with parts.
        turned: inputs that a loop reads in another layout; see :class:`Share`.
    """

    def __init__(
        self,
        body: Body,
        ins: Sequence[Share],
        outs: Sequence[Share],
        rows: float = 1.0,
        tiled: bool = False,
    ):
        self.body, self.rows, self.tiled, self._ins = body, rows, tiled, ins
        self._parts: dict[Any, float] = {v: s.parts for v, s in zip(body.ins, ins) if s.parts}
        self._dims: dict[Any, Dims] = {v: s.dims for v, s in zip(body.ins, ins) if s.dims}
        self.turned = {v for v, s in zip(body.ins, ins) if s.turned}
        self.inner: dict[int, Held] = {}
        self._numbers = {op.outs[0] for op in body.ops if is_number(op)}
        for i, op in enumerate(body.ops):
            if op.name == "scan":
                self._scan(i, op)
            else:
                self._forward(op)
        self.gradients: set[Any] = set()
        for v, share in zip(body.outs, outs):
            if share.parts and isinstance(v, Value):
                self._parts[v] = max(share.parts, self.parts(v))
                if share.dims:
                    self._dims[v] = share.dims
                self.gradients.add(v)
        if self.gradients:
            for i in reversed(range(len(body.ops))):
                self._backward(i, body.ops[i])

    def parts(self, v: Any) -> float:
        """See :class:`Share`."""
        return self._parts.get(v, 0.0) if isinstance(v, Value) else 0.0

    def share(self, v: Any) -> Share:
        """What of a value a device holds."""
        return Share(self.parts(v), self._dims.get(v, ()) if isinstance(v, Value) else ())

    def bytes(self, v: Value) -> float:
        """Of a value, on a device."""
        parts, dims = self._parts.get(v), self._dims.get(v, ())
        if self.tiled and not parts and v.size:
            split = (*dims, *[1] * len(v.aval.shape))
            shape = tuple(n / d for n, d in zip(v.shape(self.body.unit, self.rows), split))
            return tiles.size(shape, itemsize(v.aval.dtype), v in self.body.written)
        size = v.size * self.rows**v.rows
        return size / (parts or 1.0) / math.prod(dims)

    def _forward(self, op: Op) -> None:
        """How an operation's results are split."""
        if op.name == "optimization_barrier":  # each result is of its own operand
            for x, v in zip(op.ins, op.outs):
                if isinstance(x, Value):
                    self._parts |= {v: self._parts[x]} if x in self._parts else {}
                    self._dims |= {v: self._dims[x]} if x in self._dims else {}
            return
        if op.name == "shard_map":
            for v, spec in zip(op.outs, op.params["out_specs"]):
                if not v.rows and (dims := spread.placed(spec, op.params["mesh"], v.aval)):
                    self._dims[v] = dims
        elif self._dims:
            splits = [self._dims.get(v, ()) for v in op.values]
            for v in op.outs if any(splits) else ():
                avals = [x.aval for x in op.values]
                dims = spread.through(op.name, op.params, avals, splits, v.aval)
                if not dims:
                    continue
                self._dims[v] = dims
                if op.name not in OPAQUE:  # what it is worked on with is made split likewise
                    for x in op.values:
                        if getattr(x.aval, "shape", ()) == v.aval.shape:
                            self._dims.setdefault(x, dims)
        if op.name in _SAME:
            parts = [self._parts.get(v, 0.0) for v in op.values if v.aval.size > 1]
            if parts and all(parts):
                self._parts.update(dict.fromkeys(op.outs, min(parts)))

    def _scan(self, i: int, op: Op) -> None:
        consts, carries = compat.scan_inputs(dict(op.params))
        ins = [self.share(v) for v in op.ins]
        # An entry of what is scanned over lacks its first dim.
        ins[consts + carries :] = [Share(s.parts, s.dims[1:]) for s in ins[consts + carries :]]
        (inner,) = self.body.inner[i]
        held = Held(inner, ins, (), self.rows, self.tiled)
        before = ins[consts : consts + carries]
        after = [Share(x.parts, held.share(v).dims or x.dims) for v, x in zip(inner.outs, before)]
        if after != before:  # a carry that becomes split stays so
            ins[consts : consts + carries] = after
            held = Held(inner, ins, (), self.rows, self.tiled)
        self.inner[i] = held
        for const, read in zip(op.ins[:consts], inner.ins):
            # One number, broadcast, is split as it is read.
            number = isinstance(const, Value) and const in self._numbers
            if number and (dims := held.share(read).dims):
                self._dims.setdefault(const, dims)
        for n, (v, own) in enumerate(zip(op.outs, inner.outs)):
            share, is_stacked = held.share(own), n >= carries
            if share.dims:
                self._dims[v] = (1, *share.dims) if is_stacked else share.dims
            if share.parts and (is_stacked or ins[consts + n].parts):
                self._parts[v] = share.parts

    def _backward(self, i: int, op: Op) -> None:
        """What becomes a gradient is one, and is split as it is."""
        if op.name == "scan":
            self._sums(i, op)
        values = op.values if op.name in _SAME else op.values[: op.name in _INTO]
        out = next((v for v in op.outs if v in self.gradients), None) if values else None
        if out is None:
            return
        if op.name == "optimization_barrier":
            own = [x for x, v in zip(op.ins, op.outs) if v in self.gradients]
            values = tuple(x for x in own if isinstance(x, Value))
        for v in values:
            # No small factor.
            if v.aval.ndim and not self.parts(v) and 64 * v.aval.size >= out.aval.size:
                self._parts[v] = self.parts(out)
                self.gradients.add(v)
                if op.name in _INTO and out in self._dims:
                    self._dims.setdefault(v, self._dims[out])

    def _sums(self, i: int, op: Op) -> None:
        """Gradients that a scan adds up, as one over microbatches does."""
        consts, carries = compat.scan_inputs(dict(op.params))
        outs = [self.share(v) if v in self.gradients else NONE for v in op.outs[:carries]]
        if not any(share.parts for share in outs):
            return
        ins = list(self.inner[i]._ins)
        for n, share in enumerate(outs):
            if share.parts:
                ins[consts + n] = share
                if isinstance(first := op.ins[consts + n], Value):
                    self._parts[first] = share.parts
                    self.gradients.add(first)
        self.inner[i] = Held(self.inner[i].body, ins, outs, self.rows, self.tiled)


def stacked(op: Op) -> tuple[Value, ...]:
    """Outputs of a scan that have an entry a turn."""
    return op.outs[compat.scan_inputs(dict(op.params))[1] :] if op.name == "scan" else ()
