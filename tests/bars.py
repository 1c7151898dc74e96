"""What ``--bars=FILE`` does: watches every comparison of floats, and plants a fault in each.

FILE keeps of each comparison what it compares, its bar, and the largest share of the bar that was
used in each run: on which instruction set, with how many threads. A comparison that holds with a
fault of ten bars in it fails the run. ``python tests/bars.py`` writes docs/numerics.md's table.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
from collections.abc import Iterable

import numerics
import numpy as np
import pytest

TESTS = pathlib.Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "numerics.md"
BEGIN, END = "<!-- table: made by tests/bars.py -->", "<!-- end of the table -->"
COARSE = 1e-3
"""Bars from here on are no rounding's: a planner's share of error, five standard deviations."""
HELPERS = {"numerics.py", "bars.py", "builders.py"}
"""Files of comparisons that stand where they are called."""

_SEEN: list[tuple] = []


def watch() -> None:
    """Watch the comparisons of NumPy, pytest and ``numerics`` in this process."""
    scalar = type(pytest.approx(1.0))
    allclose, equals = np.testing.assert_allclose, scalar.__eq__

    def watched_allclose(actual, desired, rtol=1e-7, atol=0, *args, **kwargs):
        allclose(actual, desired, rtol, atol, *args, **kwargs)
        a, d = np.broadcast_arrays(numerics.plain(actual), numerics.plain(desired))
        bar = atol + rtol * np.abs(d)
        real = np.isfinite(a) & np.isfinite(d) & (bar > 0)
        share = (np.abs(a - d)[real] / bar[real]).max(initial=0.0)
        caught = a.size > 0
        if real.any():
            at, planted = np.flatnonzero(real)[0], a.copy()
            planted.flat[at] = d.flat[at] + numerics.FAULT * bar.flat[at]
            caught = _fails(allclose, planted, d, rtol, atol, *args, **kwargs)
        parts = [f"{rtol:g} of each"] * bool(rtol > 0) + [f"{atol:g}"] * bool(atol > 0)
        _note(actual, desired, " + ".join(parts) or "0", share, caught)

    def watched_equals(self, actual):
        same = equals(self, actual)
        numbers = int | float | np.number
        both = isinstance(actual, numbers) and isinstance(self.expected, numbers)
        if same and both and np.isfinite(self.expected):
            bar = float(self.tolerance)
            share = abs(float(actual) - float(self.expected)) / bar if bar else 0.0
            caught = not bar or not equals(self, float(self.expected) + numerics.FAULT * bar)
            parts = [] if self.rel is None else [f"{self.rel:g} of each"]
            parts += [] if self.abs is None else [f"{self.abs:g}"]
            _note(actual, self.expected, " or ".join(parts) or "1e-06 of each", share, caught)
        return same

    np.testing.assert_allclose, scalar.__eq__ = watched_allclose, watched_equals
    numerics.WATCHERS.append(_note)


def taken() -> list[tuple]:
    """What was seen since the last call, once each: (place, bar, types, share, caught)."""
    found: dict[tuple, tuple] = {}
    for *key, share, caught in _SEEN:
        most, always = found.get(tuple(key), (0.0, True))
        found[tuple(key)] = (max(share, most), caught and always)
    _SEEN.clear()
    return [(*key, *value) for key, value in found.items()]


def run_name() -> str:
    """The instruction set that the compiler may use, and the number of XLA's threads."""
    flag = re.search(r"xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    threads = os.environ.get("NPROC", "32")
    return (flag[1] if flag else "free") + (f", {threads} threads" if threads != "32" else "")


def write(path: pathlib.Path, seen: Iterable[tuple]) -> list[str]:
    """Add this run to the file.

    Args:
        path: of the JSON file.
        seen: what ``taken`` returned, of all tests.

    Returns:
        The comparisons that a planted fault passed.
    """
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    passed, run = set(), run_name()
    for place, bar, types, share, caught in seen:
        row = kept.setdefault(f"{place} | {bar}", {"types": [], "share": {}})
        row["types"] = sorted({*row["types"], types})
        row["share"][run] = max(row["share"].get(run, 0.0), float(f"{share:.2g}"))
        if not caught:
            passed.add(f"{place}: {bar}")
    path.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
    return sorted(passed)


def rests_on(bar: str, types: Iterable[str], shares: Iterable[float]) -> str:
    """What a bar rests on, in the page's words.

    Args:
        bar: as ``watch`` spells it.
        types: (found, expected) of all its comparisons.
        shares: the largest of each run.
    """
    size = max(float(x) for x in re.findall(r"[\d.]+(?:e-?\d+)?", bar))
    expected = {pair.split(", ")[1] for pair in types}
    if not any(shares):
        return "equal in every run"
    if size >= COARSE:
        return "a stated accuracy"
    if "float64" in expected or size < numerics.UNIT:
        return "float64"
    if "norm" in bar:
        return f"rounding, {numerics.terms_of(size, 2):,} additions"
    return f"rounding, {numerics.terms_of(size):,} additions"


def main(path: pathlib.Path) -> None:
    """Write the page's table from a file of ``--bars``."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    runs = sorted({run for row in rows.values() for run in row["share"]})
    lines = [["file", "test", "bar", "rests on", *runs], ["---"] * (4 + len(runs))]
    for key, row in rows.items():
        what = rests_on(key.split(" | ")[2], row["types"], row["share"].values())
        shares = (f"{row['share'][run]:.1%}" if run in row["share"] else "" for run in runs)
        lines.append([*key.split(" | "), what, *shares])
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    table = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def _note(found, expected, bar: str, share: float, caught: bool) -> None:
    types = f"{_type_of(found)}, {_type_of(expected)}"
    _SEEN.append((_place(), bar, types, float(share), bool(caught)))


def _type_of(x) -> str:
    """The type whose roundings the numbers carry: float64 that was made of float32 is float32."""
    x = np.asarray(x.detach() if hasattr(x, "detach") else x)
    if x.dtype != np.float64:
        return str(x.dtype)
    with np.errstate(over="ignore"):
        return "float32" if np.array_equal(x.astype(np.float32), x, equal_nan=True) else "float64"


def _place() -> str:
    """The test, or its helper, in which a comparison stands."""
    frame = sys._getframe(1)
    while frame is not None:
        path = pathlib.Path(frame.f_code.co_filename)
        ours = path.is_relative_to(TESTS)
        if (ours or path.name.startswith("test_")) and path.name not in HELPERS:
            where = path.relative_to(TESTS) if ours else path.name
            return f"{where} | {frame.f_code.co_qualname.split('.<locals>')[0]}"
        frame = frame.f_back
    return "?"


def _fails(check, *args, **kwargs) -> bool:
    try:
        check(*args, **kwargs)
    except AssertionError:
        return True
    return False


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
