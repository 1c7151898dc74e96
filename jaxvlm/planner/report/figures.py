"""A plan's figures as SVG without a plotting library, so that the page opens anywhere."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxvlm.planner.report import text_report, units

_WIDTH, _LEFT, _ROW = 720, 16, 46
PARTS = (
    "parameters", "frozen", "moments", "batch", "visual tokens", "gradients", "saved", "work",
)  # fmt: skip
TIMES = ("compute", "hbm", "exposed", "bubble")
_NAMES = {"hbm": "memory", "exposed": "waiting for links", "saved": "saved for the backward pass"}


def memory(plan: dict[str, Any]) -> str:
    """Bar chart of a device's memory, one bar per candidate."""
    shown = plan["plans"] or ([plan["nearest"]] if plan["nearest"] else [])
    rows = [(one["text"], text_report.parts(one)) for one in shown]
    usable = float(plan["machine"]["usable"] or 0)
    return _bars(rows, PARTS, units.gib, usable, "usable") if rows else ""


def times(plan: dict[str, Any]) -> str:
    """Bar chart of a step's time, one bar per candidate."""
    rows = [(one["text"], {k: one["time"][k] or 0.0 for k in TIMES}) for one in plan["plans"]]
    known = any(sum(parts.values()) for _, parts in rows)
    return _bars(rows, TIMES, units.seconds) if known else ""


def _bars(
    rows: Sequence[tuple[str, dict[str, float]]],
    order: Sequence[str],
    say: Callable[[float | int], str],
    line: float = 0.0,
    what: str = "",
) -> str:
    """Stacked bars with their names above, a legend, and a vertical line at a limit."""
    most = max([sum(parts.values()) for _, parts in rows] + [line]) or 1.0
    used = [name for name in order if any(parts.get(name) for _, parts in rows)]
    scale, top = (_WIDTH - 2 * _LEFT - 90) / most, 26 * math.ceil(len(used) / 4) + 8
    height = top + _ROW * len(rows) + 20
    out = [_open(height)]
    for i, name in enumerate(used):
        left, y = _LEFT + 172 * (i % 4), 8 + 22 * (i // 4)
        colour = f"c{order.index(name)}"
        out.append(f'<rect class="{colour}" x="{left}" y="{y}" width="12" height="12"/>')
        out.append(f'<text x="{left + 17}" y="{y + 11}">{_NAMES.get(name, name)}</text>')
    for i, (name, parts) in enumerate(rows):
        y, x = top + _ROW * i, float(_LEFT)
        out.append(f'<text x="{_LEFT}" y="{y + 12}">{i + 1} {html.escape(name)}</text>')
        for part in used:
            wide = scale * parts.get(part, 0.0)
            if wide:
                title = f"<title>{_NAMES.get(part, part)}: {say(parts[part])}</title>"
                out.append(
                    f'<rect class="c{order.index(part)}" x="{x:.1f}" y="{y + 17}" '
                    f'width="{wide:.1f}" height="18">{title}</rect>'
                )
            x += wide
        out.append(f'<text x="{x + 5:.1f}" y="{y + 31}">{say(sum(parts.values()))}</text>')
    if line:
        at = _LEFT + scale * line
        out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - 16}"/>')
        out.append(f'<text x="{at:.1f}" y="{height - 3}" class="end">{what} {say(line)}</text>')
    return "".join([*out, "</svg>"])


def curve(points: Sequence[dict[str, Any]]) -> str:
    """Log-log plot of tokens/s against devices, with a line for linear scaling."""
    real = [p for p in points if p["fits"] is not False and p.get("tokens_per_s")]
    if len(real) < 2:
        return ""
    low, high = real[0]["tokens_per_s"], real[-1]["tokens_per_s"]
    first, last = real[0]["devices"], real[-1]["devices"]
    top = max(high, low * last / first)
    height, bottom = 300, 262

    def x(devices: float | int) -> float:
        return 70 + (_WIDTH - 110) * math.log(devices / first) / math.log(last / first)

    def y(rate: float | int) -> float:
        return bottom - (bottom - 24) * math.log(rate / low) / (math.log(top / low) or 1.0)

    ideal = f'<line x1="{x(first):.1f}" y1="{y(low):.1f}" x2="{x(last):.1f}" '
    ideal += f'y2="{y(low * last / first):.1f}"/>'
    path = " ".join(f"{x(p['devices']):.1f},{y(p['tokens_per_s']):.1f}" for p in real)
    out = [_open(height), ideal, f'<polyline points="{path}"/>']
    for p in real:
        position = f'cx="{x(p["devices"]):.1f}" cy="{y(p["tokens_per_s"]):.1f}"'
        title = f"{p['devices']} devices: {p['tokens_per_s']:,.0f} tokens/s, MFU {p['mfu']:.0%}; "
        title = html.escape(title + p["text"])
        out.append(f'<circle {position} r="4"><title>{title}</title></circle>')
        out.append(f'<text class="mid" x="{x(p["devices"]):.1f}" y="{bottom + 20}">'
                   f'{p["devices"]:,}</text>')  # fmt: skip
    for rate in (low, high):
        out.append(f'<text x="4" y="{y(rate) + 4:.1f}">{short(rate)}</text>')
    out.append(f'<text class="mid" x="{_WIDTH / 2}" y="{height - 2}">devices</text>')
    out.append('<text x="4" y="12">tokens/s</text>')
    return "".join([*out, "</svg>"])


def short(number: float | int) -> str:
    """Number with a unit prefix: ``72k``, ``3.1M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _open(height: float | int) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">'
    )
