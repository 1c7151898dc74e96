"""Two plans side by side."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxvlm.plan import report

_FIGURES = ("peak", "step", "tokens_per_s", "mfu", "hours", "cost")


def compared(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The best of each, and how often the second's figure is the first's.

    Args:
        first: a plan's document.
        second: another's.
    """
    sides = [_side(plan) for plan in (first, second)]
    ratios = {
        name: sides[1][name] / sides[0][name]
        for name in _FIGURES
        if sides[0].get(name) and sides[1].get(name)
    }
    return {"jaxvlm_compare": 1, "first": sides[0], "second": sides[1], "ratios": ratios}


def _side(plan: dict[str, Any]) -> dict[str, Any]:
    machine, batch = plan["machine"], plan["batch"]
    made: dict[str, Any] = {
        "model": plan["model"],
        "machine": f"{machine['devices']} x {machine['name']}",
        "batch": f"{batch['rows']} x {batch['length']}",
        "fits": bool(plan["plans"]),
    }
    best = plan["plans"][0] if plan["plans"] else plan["nearest"]
    if best is None:
        return made | {"way": "none"}
    made |= {"way": best["text"], "peak": best["memory"]["peak"]}
    made |= {"step": best["time"]["total"], "bound": best["time"]["bound"]}
    made |= {name: best[name] for name in ("tokens_per_s", "mfu")}
    if best["epoch"]:
        made |= best["epoch"]
    return {name: value for name, value in made.items() if value is not None}


def text(found: dict[str, Any], width: int = 110) -> str:
    """For people.

    Args:
        found: by :func:`compared`.
        width: columns.
    """
    written = io.StringIO()
    out = Console(file=written, width=width, highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("", "first", "second", "second / first"):
        table.add_column(name, justify="left" if not name else "right", overflow="fold")
    first, second = found["first"], found["second"]
    say = {"peak": report.gib, "step": report.seconds, "mfu": lambda x: f"{x:.1%}"}
    for name in (*first, *(name for name in second if name not in first)):
        cells = []
        for side in (first, second):
            value = side.get(name, "-")
            if isinstance(value, bool) or not isinstance(value, int | float):
                cells.append({True: "yes", False: "no"}.get(value, str(value)))
            else:
                cells.append(say.get(name, lambda x: f"{x:,.2f}")(value))
        ratio = found["ratios"].get(name)
        table.add_row(name.replace("_", " "), *cells, f"{ratio:.2f}" if ratio else "")
    out.print(table)
    return written.getvalue().rstrip()
