"""A traced program as a list of operations, and what of each value a device holds.

The program was traced for one device's share of a batch. Parameters are whole in it. One that is
split over devices between matmuls (FSDP) is counted by a device's share, and so is what is made of
parameters alone (a copy in the compute dtype) and what becomes them (gradients). Dims that are
split in matmuls too (tensor parallelism) are followed through the program; see ``spread``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from jaxvlm.parallel import compat
from jaxvlm.plan import spread
from jaxvlm.plan.spread import Dims


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
    "cumsum cumlogsumexp cummax custom_call pallas_call shard_map ragged_dot "
    "ragged_dot_general dynamic_update_slice all_gather psum reduce_scatter all_to_all "
    "ppermute"
)
"""Operations that read and write whole buffers."""
_SAME = VIEWS | words(
    "convert_element_type slice dynamic_slice mul div add add_any sub neg reduce_precision "
    "pad concatenate split stack unstack select_n rev broadcast_in_dim"
)
"""Operations that make a parameter's like of parameters, a gradient's of gradients."""
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_TOWERS = ("vision", "top", "connector", "decoder", "text")


class Share(NamedTuple):
    """What of an input or output a device holds."""

    parts: float = 0.0
    """Devices that a parameter, or its gradient, is split over between matmuls; 0: it is neither
    of them."""
    dims: Dims = ()
    """How its dims are split besides, in matmuls too."""


class Value:
    """A value of the program, calls resolved."""

    def __init__(self, aval: Any):
        self.aval = aval


class Op(NamedTuple):
    """An operation."""

    name: str
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    params: Mapping[str, Any]
    tower: str
    """Whose it is; "" where none's."""


class Body:
    """A program, or a loop's body.

    Args:
        jaxpr: not closed.
        ins: what of each input a device holds.
        outs: of each output, where that is wanted; () says nothing.

    Attributes:
        ops: in order, calls resolved.
        ins: the inputs.
        outs: the outputs.
        inner: bodies of its scans, by their place in ``ops``.
        gradients: values that become one of ``outs`` with parts.
    """

    def __init__(self, jaxpr: Any, ins: Sequence[Share], outs: Sequence[Share]):
        self.ops: list[Op] = []
        found = self._flatten(jaxpr, {}, "")
        self.ins, self.outs = list(jaxpr.invars), [found.get(v, v) for v in jaxpr.outvars]
        self._parts: dict[Any, float] = {v: s.parts for v, s in zip(self.ins, ins) if s.parts}
        self._dims: dict[Any, Dims] = {v: s.dims for v, s in zip(self.ins, ins) if s.dims}
        self.inner: dict[int, Body] = {}
        for i, op in enumerate(self.ops):
            if op.name == "scan":
                self._scan(i, op)
            else:
                self._forward(op)
        self.gradients: set[Any] = set()
        for v, share in zip(self.outs, outs):
            if share.parts and not isinstance(v, core.Literal):
                self._parts[v] = max(share.parts, self.parts(v))
                self.gradients.add(v)
        for op in reversed(self.ops):
            self._backward(op)

    def parts(self, v: Any) -> float:
        """See :class:`Share`."""
        return 0.0 if isinstance(v, core.Literal) else self._parts.get(v, 0.0)

    def share(self, v: Any) -> Share:
        """What of a value a device holds."""
        return Share(self.parts(v), () if isinstance(v, core.Literal) else self._dims.get(v, ()))

    def bytes(self, v: Any) -> float:
        """Of a value, on a device."""
        dtype = getattr(v.aval, "dtype", None)
        if dtype is None or str(dtype) == "float0":
            return 0.0
        share = self.share(v)
        size = math.prod(v.aval.shape) * _itemsize(dtype)
        return size / (share.parts or 1.0) / math.prod(share.dims)

    def _flatten(self, jaxpr: Any, env: dict[Any, Any], tower: str) -> dict[Any, Any]:
        """Operations of ``jaxpr`` and of all that it calls; returns what its values are called."""

        def read(v: Any) -> Any:
            return v if isinstance(v, core.Literal) else env.get(v, v)

        for eqn in jaxpr.eqns:
            name, scope = eqn.primitive.name, str(eqn.source_info.name_stack)
            own = next((t for t in _TOWERS if f"({t})" in scope or t in scope.split("/")), tower)
            called = None
            if name not in OPAQUE:
                called = next((eqn.params[k] for k in _CALLS if k in eqn.params), None)
            ins = tuple(read(v) for v in eqn.invars)
            if called is None:
                fresh = {v: Value(v.aval) for v in eqn.outvars}
                env.update(fresh)
                self.ops.append(Op(name, ins, tuple(fresh.values()), eqn.params, own))
                continue
            called = getattr(called, "jaxpr", called)
            inside = dict(zip(called.invars, ins))
            self._flatten(called, inside, own)
            for out, v in zip(eqn.outvars, called.outvars):
                env[out] = v if isinstance(v, core.Literal) else inside.get(v, v)
        return env

    def _forward(self, op: Op) -> None:
        """How an operation's results are split."""
        values = [v for v in op.ins if not isinstance(v, core.Literal)]
        splits = [self._dims.get(v, ()) for v in values]
        for v in op.outs:
            dims = spread.through(op.name, op.params, [x.aval for x in values], splits, v.aval)
            if not dims:
                continue
            self._dims[v] = dims
            if op.name not in OPAQUE:  # what it is worked on with is made split likewise
                for x in values:
                    if getattr(x.aval, "shape", ()) == v.aval.shape:
                        self._dims.setdefault(x, dims)
        if op.name in _SAME:
            parts = [self.parts(v) for v in values if v.aval.size > 1]
            if parts and all(parts):
                self._parts.update(dict.fromkeys(op.outs, min(parts)))

    def _scan(self, i: int, op: Op) -> None:
        consts, carries = compat.scan_inputs(dict(op.params))
        ins = [self.share(v) for v in op.ins]
        # An entry of what is scanned over lacks its first dim.
        ins[consts + carries :] = [Share(s.parts, s.dims[1:]) for s in ins[consts + carries :]]
        inner = op.params["jaxpr"].jaxpr
        body = Body(inner, ins, ())
        before = ins[consts : consts + carries]
        after = [Share(x.parts, body.share(v).dims or x.dims) for v, x in zip(body.outs, before)]
        if after != before:  # a carry that becomes split stays so
            ins[consts : consts + carries] = after
            body = Body(inner, ins, ())
        self.inner[i] = body
        for n, (v, own) in enumerate(zip(op.outs, body.outs)):
            share, is_stacked = body.share(own), n >= carries
            if share.dims:
                self._dims[v] = (1, *share.dims) if is_stacked else share.dims
            if share.parts and (is_stacked or ins[consts + n].parts):
                self._parts[v] = share.parts

    def _backward(self, op: Op) -> None:
        """What becomes a gradient is one, and is split as it is."""
        out = next((v for v in op.outs if v in self.gradients), None)
        if out is None or op.name not in _SAME:
            return
        for v in op.ins:
            like = not isinstance(v, core.Literal) and v.aval.ndim and not self.parts(v)
            if like and 64 * v.aval.size >= out.aval.size:  # no small factor
                self._parts[v] = self.parts(out)
                self.gradients.add(v)


def stacked(op: Op) -> tuple[Any, ...]:
    """Outputs of a scan that have an entry a turn."""
    return op.outs[compat.scan_inputs(dict(op.params))[1] :] if op.name == "scan" else ()


def bodies(params: Mapping[str, Any]) -> list[Any]:
    """The jaxprs among an equation's parameters."""
    found = []
    for value in params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                found.append(x)
    return found


def _itemsize(dtype: Any) -> int:
    try:
        return int(np.dtype(dtype).itemsize)
    except TypeError:  # a PRNG key
        return 8
