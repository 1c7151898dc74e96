"""Collectives of a compiled program: the bytes sent between devices, read from its HLO text.

``cost_analysis`` counts no bytes on the interconnect, so the program itself is parsed: every
collective is counted, times the trip counts of the loops around it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "c64": 64, "c128": 128}
_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BETWEEN_SLICES = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
"""What libtpu makes of collectives between slices: a ``send`` to the host, and a ``recv``."""
_SLICE = 100_000
"""Factor of the slice, from 1, in libtpu's numbers of devices there."""
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_OP = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLS = re.compile(
    r"(?:body|condition|calls|to_apply|called_computations|branch_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count[^0-9]*"?n"?\D*(\d+)')


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind, over one set of mesh axes and of one element type."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes whose devices take part; () if the groups of devices follow no axis."""
    dtype: str
    count: int
    """Number of executions in one step."""
    wire_bytes: int
    """Bytes that a device sends in one step, by the ring algorithm."""


def read(text: str, mesh: Mapping[str, int], branches: bool = True) -> list[Collective]:
    """Collect the collectives of a compiled program.

    Args:
        text: ``compiled.as_text()``.
        mesh: axis -> devices, in the order of the mesh's dims.
        branches: count collectives in branches of conditionals too, each as if it ran.

    Returns:
        One entry per kind, axes and dtype, the one with most bytes first. A ring of
        collective-permutes is counted by what it sends.

    Raises:
        ValueError: a loop around a collective whose trip count is unknown, or replica groups in an
            unknown syntax.
    """
    bodies, entry = computations(text)
    chains: set[tuple[str, str]] = set()
    counts: collections.Counter[tuple[str, tuple[str, ...], str]] = collections.Counter()
    sent: dict[tuple[str, tuple[str, ...], str], float] = collections.defaultdict(float)
    for name, times in multiplicity(bodies, entry, branches).items():
        types = _types(bodies[name])
        for line in bodies[name]:
            if not kind_of(line) or (chain := _chain(line)) in chains:
                continue
            if chain is not None:
                chains.add(chain)
            fused = _is_sliced(bodies[name], line)
            kind, axes, sizes = _collective(line, mesh, fused, types)
            for dtype, size in sizes.items():
                counts[kind, axes, dtype] += times
                sent[kind, axes, dtype] += times * size
    result = [Collective(*key, counts[key], round(sent[key])) for key in counts if sent[key]]
    return sorted(result, key=lambda c: -c.wire_bytes)


def total(collectives: Iterable[Collective], axis: str = "", kind: str = "") -> int:
    """Sum of wire bytes of the collectives over ``axis`` ("": any) and of ``kind`` ("": any)."""
    chosen = (c for c in collectives if kind in ("", c.kind) and (not axis or axis in c.axes))
    return sum(c.wire_bytes for c in chosen)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation, and the entry computation's name."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for raw in text.splitlines():
        line = raw.strip()
        if line.endswith("{") and " = " not in line and (head := _COMPUTATION.match(line)):
            lines = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif " = " in line:
            lines.append(line)
    return bodies, entry


def multiplicity(bodies: Mapping[str, list[str]], entry: str, branches: bool) -> dict[str, int]:
    """Number of times that each computation runs in one call of the entry computation."""
    times: collections.Counter[str] = collections.Counter()
    has_collectives: dict[str, bool] = {}

    def sends(name: str) -> bool:
        if name not in has_collectives:
            lines = bodies.get(name, ())
            own = (kind_of(line) or any(map(sends, called_by(line))) for line in lines)
            has_collectives[name] = any(own)
        return has_collectives[name]

    def visit(name: str, factor: int) -> None:
        times[name] += factor
        for line in bodies[name]:
            op = _OP.match(line)
            if op is None or not (called := called_by(line)):
                continue
            if " conditional(" in line and not branches:
                continue
            inner = factor
            if " while(" in line:
                trips = trip_count(bodies, line)
                if not trips and any(map(sends, called)):
                    raise ValueError(f"{op[1]}: a loop with collectives and no known trip count")
                inner = factor * trips
            for one in called:
                if one in bodies and sends(one):
                    visit(one, inner)

    visit(entry, 1)
    return dict(times)


def trip_count(bodies: Mapping[str, list[str]], line: str) -> int:
    """Trip count of a loop that counts from 0 up to a constant; 0 is unknown.

    A scan counts in steps of one (s32). The unrolled ring that XLA for TPUs makes of a matmul and
    its all-gather counts in larger steps (u32).
    """
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = bodies.get(condition[1], []) if condition else []
    constants = [re.search(r" ([su]32)\[\]\S* constant\((\d+)\)", one) for one in lines]
    bounds = [c for c in constants if c]
    if len(bounds) != 1 or not any("direction=LT" in one for one in lines):
        return 0
    body = re.search(r"body=%?([\w.\-]+)", line)
    step = _step(bodies[body[1]], lines) if bounds[0][1] == "u32" and body else 1
    return -(-int(bounds[0][2]) // step) if step else 0


def _step(body: list[str], condition: list[str]) -> int:
    """Increment of a loop's counter in its body; 0 is unknown."""
    operations = {op[1]: op[2] for one in body if (op := _OP.match(one))}
    at = next((i[1] for one in condition if (i := re.search(r"\), index=(\d+)", one))), "")
    root = next((one for one in body if one.startswith("ROOT ")), "")
    given = re.findall(r"%([\w.\-]+)", root.partition(" tuple(")[2])
    if not at or int(at) >= len(given):
        return 0
    addends = operations.get(given[int(at)], "").partition(" add(")[2]
    sizes = [
        int(c[1])
        for name in re.findall(r"%([\w.\-]+)", addends.partition(")")[0])
        if (c := re.search(r" constant\((\d+)\)", operations.get(name, "")))
    ]
    return sizes[0] if len(sizes) == 1 else 0


def called_by(line: str) -> list[str]:
    """Names of the computations that an operation calls."""
    names: list[str] = []
    for group in _CALLS.findall(line):
        names += [name.strip().lstrip("%") for name in group.strip("{}").split(",")]
    return names


def kind_of(line: str) -> str:
    """Kind of the collective in a line; "" if there is none. The ``-done`` half of one is none."""
    op = re.search(r"[\]\})] ([\w\-]+)\(", line)
    if op and op[1] == "send" and (between := re.search(r'megascale_transfer_type="(\w+)"', line)):
        if between[1] not in _BETWEEN_SLICES:
            raise ValueError(f"a transfer between slices of an unknown kind: {line[:300]}")
        return _BETWEEN_SLICES[between[1]]
    if op is None or op[1].removesuffix("-start") not in _KINDS:
        return ""
    return op[1].removesuffix("-start")


def _chain(line: str) -> tuple[str, str] | None:
    """Identity shared by the pieces of a collective that a TPU overlaps with other work.

    The collective is repeated in the fusion that starts it, in those that it overlaps with, and in
    the last one.
    """
    chain = re.search(r'chain_id="(\d+)"', line)
    channel = re.search(r"channel_id=(\d+)", line)
    return (chain[1], channel[1] if channel else "") if chain else None


def _collective(
    line: str, mesh: Mapping[str, int], fused: bool, types: Mapping[str, str]
) -> tuple[str, tuple[str, ...], dict[str, float]]:
    """Kind, mesh axes, and bytes sent by a device, by dtype.

    Args:
        line: HLO line with a collective.
        mesh: axis -> devices.
        fused: the line is an all-reduce of which only a slice is used.
        types: name -> result shapes of the operations of the same computation.
    """
    kind = kind_of(line)
    given = re.split(r"[\]\})] [\w\-]+\(", line, maxsplit=1)[1]
    names = re.findall(r"%([\w.\-]+)", given.split("), ")[0])
    operands: dict[str, float] = collections.defaultdict(float)
    for name in names:
        for dtype, size in _bytes(types[name]).items():
            operands[dtype] += size
    if kind == "collective-permute":
        return kind, _axes_of_pairs(line, mesh), dict(operands)
    groups = _groups(line, math.prod(mesh.values()))
    size, axes = groups.shape[1], _axes(groups, mesh)
    if kind == "all-gather":  # each device sends its part to all others
        return kind, axes, {d: (size - 1) * n for d, n in operands.items()}
    kind = "reduce-scatter" if kind == "all-reduce" and fused else kind
    factor = (2 if kind == "all-reduce" else 1) * (size - 1) / size
    return kind, axes, {d: factor * n for d, n in operands.items()}


def _types(lines: list[str]) -> dict[str, str]:
    """Name -> result shapes, for each line of a computation."""
    types = {}
    for line in lines:
        if op := _OP.match(line):
            types[op[1]] = re.split(r" [\w\-]+\(", op[2], maxsplit=1)[0]
    return types


def _is_sliced(lines: list[str], line: str) -> bool:
    """Whether a fusion slices this all-reduce: how XLA for TPUs writes a reduce-scatter."""
    root, name = lines[-1] if lines else "", _OP.match(line)
    sliced = re.search(r" dynamic-slice\(%?([\w.\-]+)", root) if root.startswith("ROOT") else None
    return bool(sliced and name and sliced[1] == name[1])


def _bytes(text: str) -> dict[str, float]:
    """Bytes by dtype of all shapes in a piece of HLO text."""
    sizes: collections.Counter[str] = collections.Counter()
    for dtype, dims in _SHAPE.findall(text):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype) or (int(digits[0]) if digits else 0)
        count = math.prod(int(d) for d in dims.split(",") if d)
        if bits:
            sizes[dtype] += count * bits // 8
    return {dtype: float(size) for dtype, size in sizes.items()}


def _groups(line: str, devices: int) -> np.ndarray:
    """i64[groups, size] of replica_groups in any of its three syntaxes, or of slices."""
    if " send(" in line:
        return _groups_of_slices(line, devices)
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line)
    if iota:
        return _iota(iota[2]).reshape([int(n) for n in iota[1].split(",")])
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if listed:
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return np.asarray([[int(i) for i in group.split(",")] for group in groups])
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? ?\{([^}]*)\}", line
    )
    if named:
        order = _iota(named[2]) if named[2] else np.arange(devices)
        return order[_groups_of_mesh(named[1], named[3])]
    if "replica_groups={}" in line or "replica_groups" not in line:
        return np.arange(devices)[None]  # all of them
    raise ValueError(f"replica_groups in an unknown syntax: {line[:300]}")


def _groups_of_slices(line: str, devices: int) -> np.ndarray:
    """Groups, or pairs, of what is sent between slices: ``{1,2}x{0:7}`` or lists of devices."""
    target = re.search(r"megascale_target=(\"[^\"]*\"|\{.*?\}\})", line)
    if target is None:
        raise ValueError(f"slices in an unknown syntax: {line[:300]}")
    if every := re.fullmatch(r'"\{([\d,]+)\}x\{0:(\d+)\}"', target[1]):
        slices = np.asarray([int(n) for n in every[1].split(",")])
        ids = slices * _SLICE + np.arange(int(every[2]) + 1)[:, None]
    else:
        listed = re.findall(r"\{([\d,>-]+)\}", target[1])
        ids = np.asarray([[int(n) for n in re.findall(r"\d+", group)] for group in listed])
    # Slices lie along a mesh's first axes, so that each holds neighbours of the flat mesh.
    own = devices // int(ids.max() // _SLICE)
    if len(np.unique(ids % _SLICE)) != own:
        raise ValueError(f"a transfer between some of the slices: {line[:300]}")
    return (ids // _SLICE - 1) * own + ids % _SLICE


def _iota(text: str) -> np.ndarray:
    """i64[n] of an iota list: ``[2,4]T(1,0)`` is 0..7 as a 2 x 4 matrix, read column by column."""
    dims, turned = (re.findall(r"\d+", part) for part in (*text.split("T"), "")[:2])
    ids = np.arange(math.prod(map(int, dims))).reshape([int(n) for n in dims])
    return (ids.transpose([int(i) for i in turned]) if turned else ids).reshape(-1)


def _groups_of_mesh(mesh: str, over: str) -> np.ndarray:
    """Groups along axes of a mesh that the program names; ``'a':(2)4`` is a part of an axis."""
    names: list[str] = []
    dims: list[int] = []
    parts: dict[str, list[tuple[int, int]]] = {}
    for name, size in re.findall(r"'([^']+)'=(\d+)", mesh):
        names.append(name)
        dims.append(int(size))
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over):
        axis_size = dims[names.index(name)]
        parts.setdefault(name, []).append((int(before or 1), int(size or axis_size)))
    shape: list[int] = []
    chosen: list[int] = []
    for name, axis_size in zip(names, dims):
        at = 1  # split the axis where its parts begin and end
        for before, size in sorted(parts.get(name, [])):
            if before > at:
                shape.append(before // at)
            chosen.append(len(shape))
            shape.append(size)
            at = before * size
        if axis_size > at:
            shape.append(axis_size // at)
    others = [i for i in range(len(shape)) if i not in chosen]
    ids = np.arange(math.prod(shape)).reshape(shape).transpose(*others, *chosen)
    return ids.reshape(-1, math.prod(shape[i] for i in chosen))


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the devices of a group differ."""
    where = np.stack(np.unravel_index(groups[0], tuple(mesh.values())))
    moved = [len(set(row)) for row in where.tolist()]
    axes = tuple(a for a, n in zip(mesh, moved) if n > 1)
    return axes if math.prod(n for n in moved if n > 1) == groups.shape[1] else ()


def _axes_of_pairs(line: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    if " send(" in line:
        ids = _groups_of_slices(line, math.prod(mesh.values()))
    else:
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}?", line)
        if pairs is None:
            return ()
        ids = np.asarray([int(i) for i in re.findall(r"\d+", pairs[0])]).reshape(-1, 2)
    where = np.stack(np.unravel_index(ids, tuple(mesh.values())))  # [axes, pairs, 2]
    return tuple(a for a, row in zip(mesh, where) if (row[:, 0] != row[:, 1]).any())
