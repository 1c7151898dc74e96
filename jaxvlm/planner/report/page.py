"""A plan as one HTML page that works offline, on a phone and in print."""

from __future__ import annotations

import html
import pathlib
import shlex
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.planner.report import figures, text_report

_CSS = """
:root{color-scheme:light dark;--ink:#1c1f24;--paper:#fff;--faint:#6b7280;--line:#d9dde3;
--yes:#1a7f4b;--no:#b3392f;--c0:#35618f;--c1:#8fa9c7;--c2:#6b4f94;--c3:#b9b9b9;--c4:#3f8f8a;
--c5:#c77d2e;--c6:#d9b44a;--c7:#a34d52}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--paper:#15181c;--faint:#9aa3ae;
--line:#343a42;--yes:#58c78d;--no:#ef7d72;--c0:#6f9fd0;--c1:#a9c0d9;--c2:#a68ad0;--c3:#777;
--c4:#62b8b2;--c5:#e09a4e;--c6:#e3c56a;--c7:#cf7a7f}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem;max-width:52rem;font:16px/1.5 system-ui,sans-serif;
color:var(--ink);background:var(--paper)}
h1{font-size:1.5rem;line-height:1.2;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.4rem 0}.faint{color:var(--faint);font-size:.9rem}
code,pre{font:.85rem/1.5 ui-monospace,monospace}pre{white-space:pre-wrap;word-break:break-word;
border:1px solid var(--line);border-radius:6px;padding:.7rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;min-width:100%}
th,td{text-align:right;padding:.3rem .55rem;border-bottom:1px solid var(--line);
vertical-align:top}th:first-child,td:first-child,td.left{text-align:left}
svg{width:100%;height:auto;display:block}svg text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}
svg line{stroke:var(--faint);stroke-dasharray:4 4}
svg polyline{fill:none;stroke:var(--c0);stroke-width:2}svg circle{fill:var(--c0)}
.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}.c3{fill:var(--c3)}.c4{fill:var(--c4)}
.c5{fill:var(--c5)}.c6{fill:var(--c6)}.c7{fill:var(--c7)}
ol.tree{list-style:none;padding:0;margin:0}ol.tree li{border-left:3px solid var(--line);
padding:.1rem 0 .7rem .9rem}ol.tree li.yes{border-color:var(--yes)}
ol.tree li.no{border-color:var(--no)}.yes b{color:var(--yes)}.no b{color:var(--no)}
@media print{:root{--ink:#000;--paper:#fff;--faint:#444;--line:#bbb;--c0:#35618f;--c1:#8fa9c7;
--c2:#6b4f94;--c3:#b9b9b9;--c4:#3f8f8a;--c5:#c77d2e;--c6:#d9b44a;--c7:#a34d52}
body{max-width:none;padding:0;font-size:11px}h2,figure,li,tr{break-inside:avoid}
h2{break-after:avoid}.wide{overflow:visible}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""


def page(plan: dict[str, Any]) -> str:
    """Render a plan as HTML.

    Args:
        plan: see :mod:`jaxvlm.planner.report.document`.
    """
    machine = plan["machine"]
    title = f"{plan['model']} on {machine['devices']} × {machine['name']}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="faint">{html.escape(text_report.headline(plan))}</p>',
        *(f'<p class="faint">Assumed: {html.escape(note)}.</p>' for note in plan["notes"]),
        _winner(plan),
        _figure("Memory of a device", figures.memory(plan)),
        _figure("Time of a step", figures.times(plan)),
        _table(plan),
        _figure("From one device to thousands", figures.curve(plan["scaling"])),
        _tree(plan),
        _rejected(plan),
        _verified(plan),
        '<p class="faint">Written by <code>jaxvlm plan</code>. Memory that is marked “about” is by '
        "formula, all other memory from the step’s own trace; that of one device to thousands is "
        "by formula; time is from a roofline model.</p>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_CSS}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def write(path: str, plan: dict[str, Any]) -> None:
    """Write the page to a file.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        pathlib.Path(path).write_text(page(plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html={path}: {error.strerror}") from None


def _figure(title: str, drawn: str) -> str:
    return f"<h2>{title}</h2><figure style='margin:0'>{drawn}</figure>" if drawn else ""


def _winner(plan: dict[str, Any]) -> str:
    if not plan["plans"]:
        near = plan["nearest"]
        text = "Nothing fits."
        if near:
            text += f" {near['text']} needs the least: {text_report.gib(near['memory']['peak'])}."
        return f'<p class="no"><b>{html.escape(text)}</b></p>'
    lines = html.escape(shlex.join(plan["plans"][0]["overrides"]))
    return f"<h2>The fastest that fits, as settings</h2><pre>{lines}</pre>"


def _table(plan: dict[str, Any]) -> str:
    if not plan["plans"]:
        return ""
    priced = plan["plans"][0]["epoch"] is not None
    heads = ["", "memory", "step", "bound", "tokens/s", "images/s", "MFU", "HFU"]
    heads += ["epoch, h", "cost"] if priced else []
    rows = []
    for i, one in enumerate(plan["plans"], 1):
        cells = [
            f"{i} {html.escape(one['text'])}",
            text_report.about(one["memory"]) + text_report.gib(one["memory"]["peak"]),
            text_report.seconds(one["time"]["total"]), one["time"]["bound"] or "-",
            text_report.number(one["tokens_per_s"], ",.0f"),
            text_report.number(one["images_per_s"], ",.1f"),
            text_report.number(one["mfu"], ".1%"), text_report.number(one["hfu"], ".1%"),
        ]  # fmt: skip
        if priced:
            cells += [text_report.number(one["epoch"][name], ",.2f") for name in ("hours", "cost")]
        rows.append(cells)
    return "<h2>The best</h2>" + _rows(heads, rows)


def _rows(heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _tree(plan: dict[str, Any]) -> str:
    items = []
    for branch in plan["tree"]:
        kind = {True: "yes", False: "no", None: ""}[branch["fits"]]
        text = html.escape(branch["text"])
        if "peak" in branch:
            text = f"{text_report.needs(branch)} <span class='faint'>({text})</span>"
        items.append(
            f'<li class="{kind}">{html.escape(branch["asks"])}<br>'
            f"<b>{branch['name']}: {text_report.answer(branch)}</b> {text}</li>"
        )
    return f"<h2>Decision tree</h2><ol class='tree'>{''.join(items)}</ol>" if items else ""


def _rejected(plan: dict[str, Any]) -> str:
    if not plan["rejected"]:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(one['family'])}</td><td class='left'>{html.escape(one['text'])}"
        "</td></tr>"
        for one in plan["rejected"]
    )
    return f'<h2>Why not the others</h2><div class="wide"><table>{rows}</table></div>'


def _verified(plan: dict[str, Any]) -> str:
    lines = [line for row in plan["verified"] for line in text_report.verified(row)]
    text = html.escape("\n".join(lines))
    return f"<h2>Compiled</h2><pre>{text}</pre>" if lines else ""
