"""Asynchronous collectives of a compiled program, and those that run while a matmul does."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping

from jaxvlm.planner.compiled.collectives import computations, kind_of, multiplicity

_MATMUL = re.compile(r" (?:convolution|dot)\(")
_MATMUL_CALL = re.compile(r'custom_call_target="(?:__cublas|__cudnn|__triton|triton|tpu_custom)')
_CALLED = re.compile(r"(?:calls|body)=%?([\w.\-]+)")
_NAME = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = ")
_CHAIN = re.compile(r'chain_id="(\d+)"')


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Collectives as often as one step runs them."""

    asynchronous: int
    """Pairs of a start and a done."""
    hidden: int
    """Those with a matmul between the two."""
    synchronous: int
    kinds: Mapping[str, int]
    """Asynchronous ones by kind."""


def pairs(text: str) -> Pairs:
    """Count the asynchronous collectives of a compiled program.

    Args:
        text: ``compiled.as_text()`` of a scheduled program: a computation's lines are in the order
            in which they run.

    Raises:
        ValueError: a loop around a collective whose trip count is unknown.
    """
    bodies, entry = computations(text)
    kinds: collections.Counter[str] = collections.Counter()
    hidden = synchronous = 0
    for name, times in multiplicity(bodies, entry, True).items():
        lines = bodies[name]
        for i, line in enumerate(lines):
            kind = kind_of(line)
            if not kind:
                continue
            if " send(" in line:  # between slices: done when what the others sent is received
                line, kind = _received(lines, line), "recv"
            elif f" {kind}-start(" not in line or '"is_sync":true' in line:
                synchronous += times
                continue
            kinds[kind_of(lines[i])] += times
            hidden += times * _hides(bodies, lines[i + 1 :], line, kind)
    return Pairs(sum(kinds.values()), hidden, synchronous, dict(kinds))


def _received(lines: list[str], send: str) -> str:
    """The line that receives what a collective between slices makes."""
    key = re.search(r"rendezvous=\"[^\"]*\"", send)
    found = next((one for one in lines if " recv(" in one and key and key[0] in one), "")
    if not found:
        raise ValueError(f"what is sent between slices is received elsewhere: {send[:300]}")
    return found


def _hides(bodies: Mapping[str, list[str]], after: list[str], start: str, kind: str) -> bool:
    """Whether one of the lines before a start's done is a matmul."""
    name = _NAME.match(start)
    assert name is not None
    for line in after:
        if f" {kind}-done(" in line and re.search(rf"%{re.escape(name[1])}\b(?![.\-])", line):
            return False
        if is_matmul(bodies, line):
            return True
    return False


def is_matmul(bodies: Mapping[str, list[str]], line: str) -> bool:
    """Whether a line multiplies matrices, itself or in a computation that it calls."""
    if _MATMUL.search(line) or _MATMUL_CALL.search(line):
        return True
    called = _CALLED.search(line)
    return called is not None and any(is_matmul(bodies, x) for x in bodies.get(called[1], ()))
