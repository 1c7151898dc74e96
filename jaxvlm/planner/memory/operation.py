"""One operation of a traced program, and properties that follow from its primitive's name."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


def words(text: str) -> frozenset[str]:
    """Set of the words of a text."""
    return frozenset(text.split())


VIEWS = words(
    "reshape squeeze expand_dims transpose copy copy_p sharding_constraint "
    "optimization_barrier stop_gradient name reshard bitcast_convert_type pvary"
)
"""Operations whose result is their operand with another shape or layout."""
OPAQUE = words(
    "dot_general conv_general_dilated scan while cond gather scatter scatter-add sort top_k cumsum "
    "cumlogsumexp cummax custom_call pallas_call shard_map ragged_dot_general dynamic_update_slice "
    "all_gather psum reduce_scatter all_to_all ppermute"
)
"""Operations that read and write full buffers: they are not fused with elementwise work."""
BODIES = ("scan", "cond", "while", "shard_map")
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_TOWERS = ("vision", "vision_top", "connector", "decoder", "text")
REDUCE = ("reduce_", "argmax", "argmin")
SUMS = words("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or")
"""Reductions: operations that make one number of several."""
ADDS = ("add", "add_any")
"""Additions of two values."""
NEVER_IN_PLACE = ("dot_general", "conv_general_dilated", "gather")
"""Operations that never write in place of an operand."""
CHEAP = words(
    "broadcast_in_dim iota convert_element_type lt le gt ge eq ne and or not slice neg exp select_n"
)
"""Operations that are recomputed for each reader rather than stored."""


class Value:
    """A value of the program, calls inlined.

    Attributes:
        aval: its traced abstract value.
        rows: number of its batch dims.
        size: bytes at a batch size of one.
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
        """Its dims, with the batch size ``rows`` in place of the unit."""
        dims = self.aval.shape
        return tuple(n / unit * rows if unit and n and n % unit == 0 else n for n in dims)


class Op(NamedTuple):
    """An operation."""

    name: str
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    params: Mapping[str, Any]
    tower: str
    """Tower that it belongs to; "" if to none."""
    values: tuple[Value, ...]
    """Those of ``ins`` that are not literals."""


def base(by: Mapping[Value, Op], v: Any) -> Any:
    """The value that ``v`` is a view of, through any number of views.

    ``by`` maps a value to the operation that creates it. Each result of a barrier is a view of its
    own operand.
    """
    while isinstance(v, Value) and v in by and by[v].name in VIEWS:
        v = by[v].ins[by[v].outs.index(v)]
    return v


def is_number(op: Op) -> bool:
    """Whether an operation broadcasts a scalar."""
    return op.name == "broadcast_in_dim" and all(v.aval.size == 1 for v in op.values)


def key(name: str, ins: tuple[Any, ...], params: Mapping[str, Any]) -> Any:
    """Key shared by equal operations, which compilers run once; ``None``: the operation always
    runs.
    """
    if name in (*BODIES, "optimization_barrier"):
        return None
    given = tuple(v if isinstance(v, Value) else (str(v.val), str(v.aval)) for v in ins)
    identity = (name, given, *((k, v) for k, v in params.items() if k not in ("name", "sharding")))
    try:
        hash(identity)
    except TypeError:
        return None
    return identity


def itemsize(dtype: Any) -> int:
    """Bytes of an element."""
    try:
        return int(np.dtype(dtype).itemsize)
    except TypeError:  # a PRNG key
        return 8


@functools.lru_cache(maxsize=4096)
def tower_of(scope: str) -> str:
    """Tower that an operation belongs to, by its name scopes."""
    parts = scope.split("/")
    return next((t for t in _TOWERS if f"({t})" in scope or t in parts), "")


def bodies(params: Mapping[str, Any]) -> list[Any]:
    """Jaxprs among an equation's parameters."""
    jaxprs = []
    for value in params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                jaxprs.append(x)
    return jaxprs
