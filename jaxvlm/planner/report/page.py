"""A plan as one HTML page that works offline, on a phone and in print."""

from __future__ import annotations

import importlib.resources
import pathlib
import shlex
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.planner.report import figures, text_report


def page(plan: dict[str, Any]) -> str:
    """Return the page of a plan, the result of ``document.of``."""
    import jinja2  # takes time to import, which a plan without a page saves
    from markupsafe import Markup

    source = importlib.resources.files("jaxvlm.planner") / "report" / "page.html.jinja"
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    machine, best = plan["machine"], plan["plans"][:1]
    lines = [line for row in plan["verified"] for line in text_report.verified(row)]
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        plan=plan,
        report=text_report,
        title=f"{plan['model']} on {machine['devices']} × {machine['name']}",
        settings=shlex.join(best[0]["overrides"]) if best else "",
        memory=Markup(figures.memory(plan)),
        times=Markup(figures.times(plan)),
        curve=Markup(figures.curve(plan["scaling"])),
        verified="\n".join(lines),
    )


def write(path: str, plan: dict[str, Any]) -> None:
    """Write the page of a plan.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        pathlib.Path(path).write_text(page(plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html={path}: {error.strerror}") from None
