"""What tests show of each family: docs/families.md's table is made of those that pass."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Iterable, Sequence

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


def write_parity(path: pathlib.Path, found: Sequence[tuple]) -> None:
    """The errors of settings drawn at random, family by family, as JSON.

    Args:
        path: of the file.
        found: (family, seed, relative error of the logits, largest one, worst gradient leaf).
    """
    families = {}
    for family, _, logits, most, gradient in found:
        into = families.setdefault(family, {"configs": 0})
        into["configs"] += 1
        for name, value in (("logits", logits), ("logits_max_abs", most), ("gradient", gradient)):
            into[name] = max(into.get(name, 0.0), float(f"{value:.2e}"))
    packages = ("jax", "torch", "transformers", "numpy")
    result = {
        "what": "largest errors against transformers' torch model, float32, settings drawn at "
        "random: logits in relative L2, the worst gradient leaf by docs/design.md's measure",
        "command": "JAXVLM_DRAWS=10 python -m pytest -m long -k drawn --parity=FILE",
        "platform": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "families": dict(sorted(families.items())),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
