"""How much of each value of a traced program a device holds.

Parameters are unsharded in the trace. One that is sharded between matmuls (FSDP) counts as a
device's shard, and so does what is computed from parameters alone (a copy in the compute dtype)
and what becomes their gradients. Dims that are sharded in matmuls too (tensor parallelism) are
propagated through the program; see ``sharding_propagation``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxvlm.parallel import compat
from jaxvlm.planner.memory import sharding_propagation, tpu_padding
from jaxvlm.planner.memory.jaxpr_ops import Jaxpr
from jaxvlm.planner.memory.operation import OPAQUE, VIEWS, Op, Value, is_number, itemsize, words
from jaxvlm.planner.memory.sharding_propagation import Dims

_SAME = VIEWS | words(
    "convert_element_type slice dynamic_slice mul div add add_any sub neg reduce_precision "
    "pad concatenate split stack unstack select_n rev broadcast_in_dim"
)
"""Operations that make a parameter-like value of parameters, and a gradient of gradients."""
_INTO = ("scatter-add", "scatter", "dynamic_update_slice")
"""Operations that write into their first operand."""


class Share(NamedTuple):
    """How an input or output is sharded."""

    parts: float = 0.0
    """Number of shards of a parameter, or of its gradient, between matmuls; 0: it is neither."""
    dims: Dims = ()
    """Shards of each dim, in matmuls too."""
    transposed: bool = False
    """Whether a loop over layers all-gathers a dim of it that is not a layer's first."""


NONE = Share()


class ShardedValues:
    """The values of a program on one device.

    Args:
        body: the program.
        ins: sharding of each input.
        outs: sharding of each output that must have one; () leaves all open.
        rows: batch size that the program's unit stands for.
        tiled: arrays are padded to tiles, as on TPUs; parameters' shares include the padding.

    Attributes:
        body: the program.
        rows: as given.
        tiled: as given.
        inner: values of its scans, by their index in ``body.ops``.
        gradients: values that become one of ``outs`` with parts.
        transposed: inputs that a loop reads in another layout; see :class:`Share`.
    """

    def __init__(
        self,
        body: Jaxpr,
        ins: Sequence[Share],
        outs: Sequence[Share],
        rows: float = 1.0,
        tiled: bool = False,
    ):
        self.body, self.rows, self.tiled, self._ins = body, rows, tiled, ins
        self._parts: dict[Any, float] = {v: s.parts for v, s in zip(body.ins, ins) if s.parts}
        self._dims: dict[Any, Dims] = {v: s.dims for v, s in zip(body.ins, ins) if s.dims}
        self.transposed = {v for v, s in zip(body.ins, ins) if s.transposed}
        self.inner: dict[int, ShardedValues] = {}
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
        """Number of shards, see :class:`Share`."""
        return self._parts.get(v, 0.0) if isinstance(v, Value) else 0.0

    def share(self, v: Any) -> Share:
        """Sharding of a value."""
        return Share(self.parts(v), self._dims.get(v, ()) if isinstance(v, Value) else ())

    def bytes(self, v: Value) -> float:
        """Bytes of a value on one device."""
        parts, dims = self._parts.get(v), self._dims.get(v, ())
        if self.tiled and not parts and v.size:
            split = (*dims, *[1] * len(v.aval.shape))
            shape = tuple(n / d for n, d in zip(v.shape(self.body.unit, self.rows), split))
            return tpu_padding.size(shape, itemsize(v.aval.dtype), v in self.body.fixed_layout)
        size = v.size * self.rows**v.rows
        return size / (parts or 1.0) / math.prod(dims)

    def _forward(self, op: Op) -> None:
        """Propagate sharding from an operation's operands to its results."""
        if op.name == "optimization_barrier":  # each result is a view of its own operand
            for x, v in zip(op.ins, op.outs):
                if isinstance(x, Value):
                    self._parts |= {v: self._parts[x]} if x in self._parts else {}
                    self._dims |= {v: self._dims[x]} if x in self._dims else {}
            return
        if op.name == "shard_map":
            for v, spec in zip(op.outs, op.params["out_specs"]):
                if not v.rows and (
                    dims := sharding_propagation.of_out_spec(spec, op.params["mesh"], v.aval)
                ):
                    self._dims[v] = dims
        elif self._dims:
            splits = [self._dims.get(v, ()) for v in op.values]
            for v in op.outs if any(splits) else ():
                avals = [x.aval for x in op.values]
                dims = sharding_propagation.propagated(op.name, op.params, avals, splits, v.aval)
                if not dims:
                    continue
                self._dims[v] = dims
                if op.name not in OPAQUE:  # operands are computed with the same sharding
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
        # An iteration's slice of a scanned input lacks its first dim.
        ins[consts + carries :] = [Share(s.parts, s.dims[1:]) for s in ins[consts + carries :]]
        (inner,) = self.body.inner[i]
        held = ShardedValues(inner, ins, (), self.rows, self.tiled)
        before = ins[consts : consts + carries]
        after = [Share(x.parts, held.share(v).dims or x.dims) for v, x in zip(inner.outs, before)]
        if after != before:  # a carry that becomes sharded stays sharded
            ins[consts : consts + carries] = after
            held = ShardedValues(inner, ins, (), self.rows, self.tiled)
        self.inner[i] = held
        for const, read in zip(op.ins[:consts], inner.ins):
            # A broadcast scalar is sharded as its reader needs it.
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
        """Propagate gradients from results to operands: operands become sharded gradients too."""
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
            # Skip small factors.
            if v.aval.ndim and not self.parts(v) and 64 * v.aval.size >= out.aval.size:
                self._parts[v] = self.parts(out)
                self.gradients.add(v)
                if op.name in _INTO and out in self._dims:
                    self._dims.setdefault(v, self._dims[out])

    def _sums(self, i: int, op: Op) -> None:
        """Mark gradients that a scan accumulates, as one over microbatches does."""
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
        self.inner[i] = ShardedValues(self.inner[i].body, ins, outs, self.rows, self.tiled)


def stacked(op: Op) -> tuple[Value, ...]:
    """Stacked outputs of a scan, which have one entry per iteration."""
    return op.outs[compat.scan_inputs(dict(op.params))[1] :] if op.name == "scan" else ()
