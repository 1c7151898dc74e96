"""FLOPs of matmuls and bytes of memory, operation by operation, of a compiled program.

XLA's own cost analysis has none for GPUs, and counts a loop's body once: the program's text is
read. An operation reads its operands from memory and writes its result; a fusion that slices an
operand reads the slice, and one that updates a slice writes it. Arrays in a TPU's fast memory
(``S(1)`` in their layout) are free. Matmuls of kernels are not in the text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxvlm.planner.compiled.collectives import called_by, computations, trip_count

_LINE = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_KERNEL = re.compile(r'op_name="[^"]*?(\w+)\)*/pallas_call')
_FREE = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id",
    "replica-id", "opt-barrier", "domain", "add-dependency",
}  # fmt: skip
_SENT = re.compile(r"^(all-|reduce-scatter|ragged-|collective-|send|recv)|-(done|update)$")
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape", "transpose", "convert", "copy")


class Op(NamedTuple):
    """An operation of the compiled program, on one device."""

    name: str
    """A Pallas kernel's name, another custom call's target, or HLO's word."""
    times: int
    """How often a step runs it."""
    flops: float
    """Of its matmuls; a multiply-add is 2. A kernel's are unknown: 0."""
    moved: float
    """Bytes of the device's memory that it reads and writes."""
    operands: tuple[tuple[int, ...], ...]
    """Their dims."""
    hidden: bool
    """It is a copy that runs beside other operations."""


class _Line(NamedTuple):
    name: str
    result: str
    opcode: str
    operands: list[str]
    rest: str  # from the first operand on


def read(text: str) -> list[Op]:
    """List the operations of a program that cost something.

    Args:
        text: ``compiled.as_text()``.

    Raises:
        ValueError: a loop of unknown trip count with a matmul or a kernel in it.
    """
    bodies, entry = computations(text)
    return list(_Program(bodies).run(entry, 1))


def custom_calls(ops: list[Op]) -> dict[str, int]:
    """Count the executions of a step's kernels and other custom calls, by name."""
    found: dict[str, int] = {}
    for op in ops:
        if op.name[:2] == "__" or op.name.startswith("flash_"):
            found[op.name] = found.get(op.name, 0) + op.times
    return dict(sorted(found.items()))


def arrays(text: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return dtype, dims and layout of each array in a piece of HLO text."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype == "pred" or re.search(r"\d", dtype):
            found.append((dtype, tuple(int(n) for n in dims.split(",") if n), layout))
    return found


def _size(array: tuple[str, tuple[int, ...], str], anywhere: bool = False) -> float:
    dtype, dims, layout = array
    if "S(" in layout and not anywhere:
        return 0.0
    bits = re.search(r"\d+", dtype)
    return math.prod(dims) * (int(bits[0]) if bits else 8) / 8


def _bytes(result: str) -> float:
    return sum(map(_size, arrays(result)))


class _Program:
    """Args: bodies: lines of each computation."""

    def __init__(self, bodies: Mapping[str, list[str]]):
        self.bodies = bodies
        self.parsed: dict[str, dict[str, _Line]] = {}

    def lines(self, name: str) -> dict[str, _Line]:
        """Lines of a computation by name; the last is its root."""
        if name not in self.parsed:
            found = (_LINE.match(line) for line in self.bodies[name])
            lines = [
                _Line(m[1], m[2], m[3], re.findall(r"%([\w.\-]+)", m[4].partition(")")[0]), m[4])
                for m in found
                if m
            ]
            root = next((x for x in self.bodies[name] if x.startswith("ROOT")), "")
            at = _LINE.match(root)
            lines.sort(key=lambda x: at is not None and x.name == at[1])
            self.parsed[name] = {x.name: x for x in lines}
        return self.parsed[name]

    def run(self, name: str, times: int) -> Iterator[Op]:
        """Operations of a computation that runs ``times`` times a step."""
        lines = self.lines(name)
        for line in lines.values():
            if line.opcode == "while":
                count = trip_count(self.bodies, f"{line.name} = {line.opcode}({line.rest}")
                body = re.search(r"body=%?([\w.\-]+)", line.rest)
                assert body is not None
                inside = list(self.run(body[1], times * (count or 1)))
                if not count and any(op.flops or op.name.startswith("flash_") for op in inside):
                    raise ValueError(f"{line.name}: a loop with matmuls and no known trip count")
                yield from inside
            elif line.opcode in ("call", "conditional", "async-start"):
                for one in called_by(line.rest):
                    if one in self.bodies:
                        yield from self.run(one, times)
            elif not self.is_free(line):
                yield self.op(lines, line, times)

    def is_free(self, line: _Line) -> bool:
        """Whether an operation does no work, or sends bytes, which are counted elsewhere."""
        reserved = self.name(line) == "AllocateBuffer"  # memory that is not written
        return line.opcode in _FREE or reserved or bool(_SENT.search(line.opcode))

    def op(self, lines: Mapping[str, _Line], line: _Line, times: int) -> Op:
        """One operation's costs."""
        operands = [lines[x] for x in line.operands if x in lines]
        dims = tuple(d for x in operands for _, d, _ in arrays(x.result)[:1])
        if line.opcode.endswith("-start"):
            made = max(arrays(line.result)[:2], key=lambda x: "S(" in x[2])
            moved = _size(made, anywhere=True) * (1 if "S(" in made[2] else 2)
            return Op(line.opcode, times, 0.0, moved, dims, True)
        moved = sum(self.read_by(lines, line, x.name) for x in operands if _bytes(x.result))
        return Op(
            self.name(line),
            times,
            self.flops(lines, line),
            moved + self.written(lines, line),
            dims,
            False,
        )

    def name(self, line: _Line) -> str:
        """What the operation is called in the result."""
        if line.opcode != "custom-call":
            return line.opcode
        target = re.search(r'custom_call_target="([^"]*)"', line.rest)
        kernel = _KERNEL.search(line.rest)
        return kernel[1] if kernel else target[1] if target else line.opcode

    def read_by(self, lines: Mapping[str, _Line], use: _Line, name: str) -> float:
        """Bytes of the array ``name`` that an operation reads."""
        whole = _bytes(lines[name].result)
        if use.opcode in _SLICES and use.operands[0] == name:
            return min(whole, sum(_size(x, True) for x in arrays(use.result)))
        if use.opcode == "dynamic-update-slice" and use.operands[0] == name:
            return 0.0
        if use.opcode == "fusion":
            inner = self.lines(called_by(use.rest)[0])
            numbers = [f"{i})" for i, x in enumerate(use.operands) if x == name]
            of = [x for x in inner.values() if x.opcode == "parameter"]
            of = [x for x in of if x.rest.startswith(tuple(numbers))]
            return min(whole, sum(self.reads(inner, x.name) for x in of))
        return whole

    def reads(self, lines: Mapping[str, _Line], name: str) -> float:
        """Bytes of the array ``name`` that a fused computation reads."""
        whole = sum(_size(x, True) for x in arrays(lines[name].result))
        total = 0.0
        for use in lines.values():
            if name not in use.operands:
                continue
            if use.opcode in _VIEWS:
                made = sum(_size(x, True) for x in arrays(use.result))
                total += self.reads(lines, use.name) * whole / made if made else 0.0
            else:
                total += self.read_by(lines, use, name)
        used = any(name in x.operands for x in lines.values())
        return min(whole, total) if used else whole

    def written(self, lines: Mapping[str, _Line], line: _Line) -> float:
        """Bytes that an operation writes."""
        made = arrays(line.result)
        if line.opcode == "custom-call" and "__cu" in line.rest:  # after the results: scratch space
            made = made[:1] + [x for x in made[1:] if x[0] not in ("s8", "u8")]
        limits = [_size(x) for x in made]
        if line.opcode != "fusion":
            updated = line.opcode == "dynamic-update-slice"
            return (
                min(sum(limits), _bytes(lines[line.operands[1]].result)) if updated else sum(limits)
            )
        inner = self.lines(called_by(line.rest)[0])
        root = list(inner.values())[-1]
        parts = [inner[x] for x in root.operands] if root.opcode == "tuple" else [root]
        return sum(min(a, self.made(inner, b)) for a, b in zip(limits, parts, strict=False))

    def made(self, lines: Mapping[str, _Line], line: _Line) -> float:
        """Bytes of a fused computation's result that are new."""
        if line.opcode == "dynamic-update-slice":
            return sum(_size(x, True) for x in arrays(lines[line.operands[1]].result))
        if line.opcode in _VIEWS and lines[line.operands[0]].opcode == "dynamic-update-slice":
            return self.made(lines, lines[line.operands[0]])
        if line.opcode == "parameter":
            return 0.0
        if line.opcode == "fusion":
            inner = self.lines(called_by(line.rest)[0])
            return self.made(inner, list(inner.values())[-1])
        return sum(_size(x, True) for x in arrays(line.result))

    def flops(self, lines: Mapping[str, _Line], line: _Line) -> float:
        """FLOPs of the matmuls in an operation."""
        if line.opcode == "fusion":
            inner = self.lines(called_by(line.rest)[0])
            return sum(self.flops(inner, x) for x in inner.values())
        shapes = [arrays(lines[x].result) for x in line.operands if x in lines]
        dims, made = [x[0][1] for x in shapes if x], arrays(line.result)
        if line.opcode == "dot":
            return 2.0 * math.prod(made[0][1]) * _contracted(dims[0], line.rest)
        if line.opcode == "convolution":
            return _of_convolution(dims[0], dims[1], made[0][1], line.rest)
        if "__cublas$" in line.rest and line.opcode == "custom-call":
            return 2.0 * math.prod(made[0][1]) * _contracted(dims[0], line.rest)
        return 0.0


def _contracted(left: tuple[int, ...], rest: str) -> int:
    """Size of the dims that a matmul sums over."""
    found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:]([\[{][^\]}]*[\]}])', rest)
    assert found is not None, rest[:300]
    numbers = json.loads(found[1].replace("{", "[").replace("}", "]"))
    return math.prod(left[int(i)] for i in numbers)


def _of_convolution(
    left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...], rest: str
) -> float:
    """FLOPs of a convolution, as which a TPU's compiler writes matmuls; padding is not counted."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    assert labels is not None, rest[:300]
    of_left, of_right, of_out = (
        dict(zip(labels[i], x)) for i, x in zip((1, 2, 3), (left, right, out))
    )
    window = re.search(r"window=\{([^}]*)\}", rest)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    count = 2.0 * of_out["b"] * of_out["f"] * of_right["i"]
    for axis in sorted(x for x in of_out if x.isdigit()):
        count *= _pairs(of_left[axis], of_right[axis], of_out[axis], fields, int(axis))
    return count


def _pairs(size: int, kernel: int, out: int, fields: Mapping[str, str], axis: int) -> int:
    """Pairs of an output and an element of the kernel, along an axis, that meet an input."""

    def field(name: str, default: str) -> str:
        return fields[name].split("x")[axis] if name in fields else default

    stride, before = int(field("stride", "1")), int(field("pad", "0_0").split("_")[0])
    dilated, spread = int(field("lhs_dilate", "1")), int(field("rhs_dilate", "1"))
    last = (size - 1) * dilated
    places = np.arange(out)[:, None] * stride + np.arange(kernel) * spread - before
    return int(np.sum((places >= 0) & (places <= last) & (places % dilated == 0)))
