"""Compare two saved plans."""

from __future__ import annotations

from typing import Any

from jaxvlm.planner.report import text_report

_FIGURES = ("peak", "step", "tokens_per_s", "mfu", "hours", "cost")


def compared(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The best candidate of each plan, and the ratios of their figures, second over first.

    Args:
        first: a plan's document.
        second: a plan's document.
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
    side: dict[str, Any] = {
        "model": plan["model"],
        "machine": f"{machine['devices']} x {machine['name']}",
        "batch": f"{batch['rows']} x {batch['length']}",
        "fits": bool(plan["plans"]),
    }
    best = plan["plans"][0] if plan["plans"] else plan["nearest"]
    if best is None:
        return side | {"candidate": "none"}
    side |= {"candidate": best["text"], "peak": best["memory"]["peak"]}
    side |= {"step": best["time"]["total"], "bound": best["time"]["bound"]}
    side |= {name: best[name] for name in ("tokens_per_s", "mfu")}
    if best["epoch"]:
        side |= best["epoch"]
    return {name: value for name, value in side.items() if value is not None}


def text(comparison: dict[str, Any], width: int = 110) -> str:
    """The comparison as a table for people.

    Args:
        comparison: from :func:`compared`.
        width: columns.
    """
    out, written = text_report.console(width)
    table = text_report.table(("", "first", "second", "second / first"), overflow="fold")
    first, second = comparison["first"], comparison["second"]
    say = {"peak": text_report.gib, "step": text_report.seconds, "mfu": lambda x: f"{x:.1%}"}
    for name in (*first, *(name for name in second if name not in first)):
        cells = []
        for side in (first, second):
            value = side.get(name, "-")
            if isinstance(value, bool) or not isinstance(value, int | float):
                cells.append({True: "yes", False: "no"}.get(value, str(value)))
            else:
                cells.append(say.get(name, lambda x: f"{x:,.2f}")(value))
        ratio = comparison["ratios"].get(name)
        table.add_row(name.replace("_", " "), *cells, f"{ratio:.2f}" if ratio else "")
    out.print(table)
    return written.getvalue().rstrip()
