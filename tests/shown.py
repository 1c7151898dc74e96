"""What tests show of each family: docs/families.md's table is made of those that pass."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "families.md"
BEGIN, END = "<!-- table: made by the tests -->", "<!-- end of the table -->"
FEATURES = (
    "import",
    "train",
    "LoRA",
    "generate",
    "embed",
    "export",
    "several pictures",
    "any resolution",
    "video",
)


def key(family: str, feature: str) -> str:
    """One cell of the table, as a test's property."""
    if feature not in FEATURES:
        raise ValueError(f"{feature!r} is no column of the table: {', '.join(FEATURES)}")
    return f"{family}: {feature}"


def table(shown: Iterable[str]) -> str:
    """Markdown: a row a family."""
    cells = {tuple(one.split(": ")) for one in shown}
    lines = [["family", *FEATURES], ["---"] * (1 + len(FEATURES))]
    for family in sorted({family for family, _ in cells}):
        lines.append([family, *("yes" if (family, f) in cells else "" for f in FEATURES)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def settle(how: str, shown: set[str], failed: set[str]) -> str:
    """Write the page's table, or compare with it.

    Args:
        how: ``write`` or ``check``.
        shown: cells of tests that passed.
        failed: cells of tests that did not.

    Returns:
        What is wrong; "" is nothing.
    """
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    new = table(shown - failed)
    if how == "write":
        PAGE.write_text(f"{before}{BEGIN}\n{new}\n{END}{after}", encoding="utf-8")
        return ""
    if old.strip() == new:
        return ""
    was, now = set(old.strip().splitlines()), set(new.splitlines())
    lines = [f"- {x}" for x in sorted(was - now)] + [f"+ {x}" for x in sorted(now - was)]
    return (
        f"{PAGE.name} does not say what the tests show; run the fast tests with --families=write:\n"
        + "\n".join(lines)
    )
