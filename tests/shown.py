"""Features that tests show per model family; writes docs/families.md's table from passing tests."""

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
    "several images",
    "any resolution",
    "video",
)


def key(family: str, feature: str) -> str:
    """One cell of the table, as a test's property."""
    if feature not in FEATURES:
        raise ValueError(f"{feature!r} is no column of the table: {', '.join(FEATURES)}")
    return f"{family}: {feature}"


def table(shown: Iterable[str]) -> str:
    """Markdown table with a row per family."""
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
    result = {
        "what": "largest errors against transformers' torch model, float32, settings drawn at "
        "random: logits in relative L2, the worst gradient leaf by docs/design.md's measure",
        "command": "JAXVLM_DRAWS=10 python -m pytest -m long -k drawn --parity=FILE",
        **_versions("jax", "torch", "transformers", "numpy"),
        "families": dict(sorted(families.items())),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def matrix_of(path: pathlib.Path) -> dict[tuple, dict]:
    """(model, strategy, frozen, packed, microbatches) -> what a file of strategies found."""
    if not path.exists():
        return {}
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return {tuple(case): found for *case, found in cases}


def write_matrix(path: pathlib.Path, found: Iterable[Sequence]) -> None:
    """Strategies against one device, as JSON; what the file has is kept.

    Args:
        path: of the file.
        found: (model, strategy, frozen tower, packed rows, microbatches, errors or refusal).
    """
    cases = matrix_of(path) | {tuple(case): errors for *case, errors in found}
    errors = [errors for errors in cases.values() if "refused" not in errors]
    result = {
        "what": "every strategy with every model, tower frozen or not, rows packed or not, whole "
        "or in microbatches, on eight CPU devices against one, float32: relative error of the "
        "loss, and of the worst gradient leaf by docs/design.md's measure (both at most 1e-5; "
        "parameters after three steps are held to 1e-4 too)",
        "command": "JAXVLM_WHOLE_MATRIX=FILE python -m pytest -m 'long or not long' "
        "tests/parallel/test_strategies.py -k equals",
        **_versions("jax", "numpy"),
        "run": len(errors),
        "refused": len(cases) - len(errors),
        "worst": {
            name: float(f"{max((e[name] for e in errors), default=0.0):.1e}")
            for name in ("loss", "gradient")
        },
        "cases": [
            [*case, {n: e if n == "refused" else float(f"{e:.1e}") for n, e in errors.items()}]
            for case, errors in sorted(cases.items())
        ],
    }
    lines = json.dumps({**result, "cases": []}, indent=1)[: -len("[]\n}")]
    rows = ",\n  ".join(json.dumps(case) for case in result["cases"])
    path.write_text(f"{lines}[\n  {rows}\n ]\n}}\n", encoding="utf-8")


def _versions(*packages: str) -> dict[str, object]:
    return {
        "platform": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
