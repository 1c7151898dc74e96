"""A plan's document (``document``) as text for people."""

from __future__ import annotations

import io
import shlex
from collections.abc import Collection, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from jaxvlm.planner.report.units import gib, seconds

__all__ = ["gib", "headline", "number", "parts", "seconds", "text", "tree", "verified"]

_BOUNDS = ("compute", "hbm", "exposed", "bubble")
_SHOWN = 12
_ORDER = {"memory": 0, "slower": 1, "batch": 2, "dims": 3}


def text(plan: dict[str, Any], width: int = 110) -> str:
    """The full report.

    Args:
        plan: see :mod:`jaxvlm.planner.report.document`.
        width: columns.
    """
    out, written = console(width)
    out.print(headline(plan), soft_wrap=True, markup=False)
    for note in plan["notes"]:
        out.print(f"  assumed: {note}", markup=False)
    if plan["plans"]:
        out.print(_memory(plan))
        out.print(_time(plan))
        out.print("settings of the first for jaxvlm train:", markup=False)
        out.print(f"  {shlex.join(plan['plans'][0]['overrides'])}", soft_wrap=True, markup=False)
    elif plan["nearest"]:
        near = plan["nearest"]
        need = gib(near["memory"]["peak"])
        out.print(
            f"nothing fits: {near['text']} needs the least, "
            f"{need} of {gib(plan['machine']['usable'])}",
            markup=False,
        )
    else:
        out.print("no candidate can run on this machine:", markup=False)
    if plan["rejected"]:
        out.print(_rejected(plan))
    if plan["tree"]:
        out.print(tree(plan), markup=False)
    for row in plan["verified"]:
        for line in verified(row):
            out.print(line, markup=False, soft_wrap=True)
    return written.getvalue().rstrip()


def console(width: int) -> tuple[Console, io.StringIO]:
    """Return a console for plain text, and what it writes to."""
    written = io.StringIO()
    return Console(file=written, width=width, highlight=False), written


def table(
    heads: Sequence[str],
    title: str | None = None,
    left: Collection[str] = ("",),
    overflow: Literal["fold", "ellipsis"] = "ellipsis",
) -> Table:
    """Return an empty table whose columns are justified to the right but for those in ``left``."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in heads:
        result.add_column(name, justify="left" if name in left else "right", overflow=overflow)
    return result


def headline(plan: dict[str, Any]) -> str:
    """The request in one line."""
    machine, batch = plan["machine"], plan["batch"]
    shape = f" {machine['topology']}" if machine["topology"] else ""
    usable = f", {gib(machine['usable'])} usable each" if machine["usable"] else ""
    trained = [f"LoRA of rank {plan['lora_rank']}"] if plan["lora_rank"] else []
    trained += [f"frozen: {', '.join(plan['frozen'])}"] if plan["frozen"] else []
    images = f", {batch['images']} images each" if batch["images"] else ""
    rows = f"{batch['rows']} sequences x {batch['length']} tokens{images}"
    if "documents" in batch:
        rows = f"{batch['rows']} queries, {batch['rows'] * batch['documents']} documents"
    return (
        f"{plan['model']} on {machine['devices']} x {machine['name']}{shape}{usable}; {rows}; "
        f"{plan['loss']}, {', '.join(trained) or 'all trained'}; {plan['compared']} candidates "
        "compared"
    )


def number(value: float | None, form: str) -> str:
    """A formatted figure; ``-`` if it is unknown."""
    return "-" if value is None else format(value, form)


def about(memory: dict[str, Any]) -> str:
    """Prefix of a candidate's memory: "about " if it is by formula."""
    return "" if memory["from"] == "trace" else "about "


def parts(plan: dict[str, Any]) -> dict[str, float]:
    """A candidate's memory in few categories: states, and what a step needs in addition."""
    memory = plan["memory"]
    sizes = {name: float(size) for name, size in memory["states"].items()}
    saved = gradients = work = 0.0
    for name, size in memory["work"].items():
        if "saved" in name:
            saved += size
        elif "gradients" in name:
            gradients += size
        else:
            work += size
    return sizes | {"gradients": gradients, "saved": saved, "work": work}


def _memory(plan: dict[str, Any]) -> Table:
    large = max(one["memory"]["peak"] for one in plan["plans"]) >= 2**30
    unit, name = (2**30, "GiB") if large else (2**20, "MiB")
    columns = list(parts(plan["plans"][0]))
    for other in plan["plans"][1:]:
        columns += [name for name in parts(other) if name not in columns]
    rows = table(("", *columns, "peak"), title=f"memory of a device, {name}")
    for i, one in enumerate(plan["plans"], 1):
        own = parts(one)
        peak = f"{about(one['memory'])}{one['memory']['peak'] / unit:,.1f}"
        cells = [f"{own.get(name, 0) / unit:,.1f}" for name in columns]
        rows.add_row(f"{i} {one['text']}", *cells, peak)
    return rows


def _time(plan: dict[str, Any]) -> Table:
    heads = ("compute", "memory", "waiting", "bubble", "step", "tokens/s", "images/s", "MFU")
    priced = plan["plans"][0]["epoch"] is not None
    more = ("epoch, h", "cost") if priced else ()
    rows = table(("", *heads, "bound", *more), title="time of a step")
    for i, one in enumerate(plan["plans"], 1):
        time = one["time"]
        cells = [seconds(time[name]) for name in (*_BOUNDS, "total")]
        cells += [number(one["tokens_per_s"], ",.0f"), number(one["images_per_s"], ",.1f")]
        cells += [number(one["mfu"], ".1%"), time["bound"] or "-"]
        if priced:
            cells += [number(one["epoch"]["hours"], ",.2f"), number(one["epoch"]["cost"], ",.2f")]
        rows.add_row(f"{i} {one['family']}", *cells)
    return rows


def _rejected(plan: dict[str, Any]) -> Table:
    rows = table(("", ""), title="why not the others")
    rows.columns[1].overflow = "fold"

    def order(one: dict[str, Any]) -> tuple[int, int]:
        return one["family"].count("+"), _ORDER.get(one["why"], 9)

    rejected = sorted(plan["rejected"], key=order)
    for one in rejected[:_SHOWN]:
        rows.add_row(one["family"], one["text"])
    if len(rejected) > _SHOWN:
        rows.add_row("...", f"and {len(rejected) - _SHOWN} more (--json has all)")
    return rows


def tree(plan: dict[str, Any]) -> str:
    """The decision tree, one line per branch."""
    usable, lines = plan["machine"]["usable"], ["decision tree"]
    for i, branch in enumerate(plan["tree"]):
        lines.append(f"{'  ' * i}{branch['asks']}")
        if "peak" not in branch:
            lines.append(f"{'  ' * i}└ {branch['name']}: {branch['text']}")
            continue
        limit = f" of {gib(usable)}" if usable else ""
        lines.append(
            f"{'  ' * i}└ {branch['name']}: {answer(branch)}: {needs(branch, limit)} "
            f"({branch['text']})"
        )
    return "\n".join(lines)


def answer(branch: dict[str, Any]) -> str:
    """Whether a branch of the tree fits: yes, no or not known."""
    return {True: "yes", False: "no", None: "not known"}[branch["fits"]]


def needs(branch: dict[str, Any], limit: str = "") -> str:
    """A branch's memory and, if it may fit, its step time."""
    text = about(branch) + gib(branch["peak"]) + limit
    if branch["fits"] is not False and branch["seconds"]:
        text += f", {seconds(branch['seconds'])}, MFU {number(branch['mfu'], '.0%')}"
    return text


def verified(row: dict[str, Any]) -> list[str]:
    """Lines that compare the compiler's figures for a candidate with the plan's."""
    if "why" in row:
        return [f"verify: {row['text']}: {row['why']}"]
    predicted, real = row["predicted"], row["compiled"]["peak"]
    lines = [
        f"verify: {row['text']}: the compiler's peak is {gib(real)}, planned {gib(predicted)} "
        f"({predicted / real - 1:+.1%}); compiled in {row['seconds']:.0f} s of CPU"
    ]
    for name, size in row["collectives"].items():
        lines.append(f"  sends {name}: {gib(size)} a device")
    return lines
