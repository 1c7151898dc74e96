"""Propagate the sharding of dims from a program's inputs through its operations.

This follows what a partitioner does, as far as sizes need it: free dims of a matmul stay sharded,
a contracted dim is summed over devices; elementwise operations, transposes, reshapes and
reductions pass the sharding on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxvlm.nn.grouped_matmul import BACKWARD, FORWARD
from jaxvlm.nn.kernels.grouped_tpu import OUTER

Dims = tuple[int, ...]
"""Number of shards of each dim; () is a replicated value."""
_GROUPED = {FORWARD: ((0, 0), (1, 2)), BACKWARD: ((0, 0), (1, 1)), OUTER: ((0, 1), (1, 1))}
"""For each dim of the result's last two: the kernel's operand, and that operand's dim, which it is
from.
"""


def propagated(
    name: str, params: Mapping[str, Any], ins: Sequence[Any], splits: Sequence[Dims], out: Any
) -> Dims:
    """Sharding of an operation's result.

    Args:
        name: primitive.
        params: parameters of its equation.
        ins: abstract values of its operands.
        splits: sharding of its operands.
        out: abstract value of the result.
    """
    if not any(splits) or not getattr(out, "shape", ()):
        return ()
    if name == "dot_general":
        return _matmul(params["dimension_numbers"], ins, splits)
    if name == "ragged_dot_general":
        return _grouped(params["ragged_dot_dimension_numbers"], ins, splits)
    if name == "pallas_call" and (kernel := params["name"]) in _GROUPED:
        own = [splits[i][d] if splits[i] else 1 for i, d in _GROUPED[kernel]]
        return _dims([*[1] * (len(out.shape) - 2), *own])
    first, shape = splits[0], out.shape
    if name == "transpose":
        return tuple(first[i] for i in params["permutation"]) if first else ()
    if name == "reshape":
        return reshaped(ins[0].shape, first, shape) if first else ()
    if name in ("squeeze", "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"):
        axes = params.get("axes", params.get("dimensions", ()))
        reduced = {a % len(first) for a in axes} if first else set()
        return _dims(n for i, n in enumerate(first) if i not in reduced)
    if name == "expand_dims":
        return reshaped(ins[0].shape, first, shape) if first else ()
    if name == "broadcast_in_dim":
        at = dict(zip(params["broadcast_dimensions"], first))
        return _dims(at.get(i, 1) if shape[i] > 1 else 1 for i in range(len(shape)))
    best = [1] * len(shape)
    for x, split in zip(ins, splits):
        if split and len(x.shape) == len(shape):
            for i, (size, n) in enumerate(zip(x.shape, split)):
                # Slicing, padding or concatenating a dim keeps it sharded if it stays divisible.
                if n > best[i] and (size == shape[i] or shape[i] % n == 0):
                    best[i] = n
    return _dims(best)


def of_out_spec(spec: Any, mesh: Any, out: Any) -> Dims:
    """Sharding of a result of a shard_map, by its out_spec."""
    names = [(n,) if isinstance(n, str) else n or () for n in spec]
    sizes = [math.prod(mesh.shape[axis] for axis in axes) for axes in names]
    return _dims([*sizes, *[1] * (len(out.shape) - len(sizes))])


def reshaped(old: Sequence[int], split: Dims, new: Sequence[int]) -> Dims:
    """Sharding after a reshape.

    Merged dims are sharded by the product; when a dim is split, the first part that is divisible
    takes the shards.
    """
    result = [1] * len(new)
    i = j = 0
    while i < len(old) or j < len(new):
        rows, columns, a, b = [], [], 1, 1
        while True:  # the next group of dims with equal products on both sides
            if a <= b and i < len(old):
                a, i = a * old[i], i + 1
                rows.append(i - 1)
            elif j < len(new):
                b, j = b * new[j], j + 1
                columns.append(j - 1)
            elif i < len(old):
                a, i = a * old[i], i + 1
                rows.append(i - 1)
            if (a == b and rows and columns) or (i == len(old) and j == len(new)):
                break
        left = math.prod(split[r] for r in rows)
        for c in columns:
            share = math.gcd(left, new[c])
            result[c], left = share, left // share
    return _dims(result)


def _matmul(numbers: Any, ins: Sequence[Any], splits: Sequence[Dims]) -> Dims:
    (left, right), (left_batch, right_batch) = numbers
    a, b = (s or (1,) * len(x.shape) for x, s in zip(ins, splits))
    both = [max(a[i], b[j]) for i, j in zip(left_batch, right_batch)]
    own = [n for i, n in enumerate(a) if i not in left and i not in left_batch]
    other = [n for i, n in enumerate(b) if i not in right and i not in right_batch]
    return _dims([*both, *own, *other])


def _grouped(numbers: Any, ins: Sequence[Any], splits: Sequence[Dims]) -> Dims:
    """Grouped matmul: the second operand, or the result, has one matrix per group."""
    (left, right), _ = numbers.dot_dimension_numbers
    a, b = (s or (1,) * len(x.shape) for x, s in zip(ins[:2], splits))
    groups = numbers.rhs_group_dimensions
    own = [n for i, n in enumerate(a) if i not in left]
    other = [n for i, n in enumerate(b) if i not in right and i not in groups]
    return _dims([*own, *other] if groups else [1, *own, *other])


def _dims(dims: Any) -> Dims:
    result = tuple(dims)
    return result if any(n > 1 for n in result) else ()
