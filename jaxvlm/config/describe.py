"""Describes every setting by path, type, default and help, read from the source of the dataclasses.

python -m jaxvlm.config.describe > docs/settings.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

from jaxvlm.config.mixture import SourceConfig
from jaxvlm.config.train import Config

SUBJECTS = (
    "train",
    "model",
    "data",
    "mixture",
    "parallel",
    "cache",
    "optim",
    "outer",
    "federate",
    "embed",
    "extension",
)
"""Modules of the dataclasses, in the order of the page."""
_DEFAULTS = Config()
_GROUPS = {"config.data.mixture": SourceConfig}
"""Settings that have groups under names of the user's own -> the dataclass of each."""
_ALLOWED = re.compile(r"\s*Allowed values: (.*)\.$")
_INTRODUCTION = """\
# Settings

Every setting of a training run, by subject. A recipe sets them
(`dataclasses.replace(config, steps=100)` on a `jaxvlm.Config`, or `config.steps = 100` on a
ConfigDict), and the command line overrides them (`--config.steps=100`). Paths start with `config.`;
`jaxvlm train --config=FILE --print_config` prints the values of a run.

The page is generated from the docstrings in `jaxvlm/config/`; change them there, then run
`python -m jaxvlm.config.describe > docs/settings.md`.
"""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a group."""

    path: str
    """Path as on the command line, e.g. ``config.optim.learning_rate``."""
    type: str
    """Type as annotated."""
    default: Any
    help: str
    """Help in one line, without the allowed values."""
    allowed: tuple[Any, ...]
    """Allowed values of the setting, or of each item of a tuple; () where any value of the type may
    be used."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A dataclass of settings at one path."""

    path: str
    schema: type
    default: Any
    settings: tuple[Setting, ...]
    """Settings of the group itself, without those of groups inside."""
    purpose: str = ""
    """Help of the group itself, from the dataclass that it is a field of."""


def attribute_docstrings(schema: type) -> dict[str, str]:
    """Read the string literal under each field of a class.

    Args:
        schema: class whose source can be read.

    Returns:
        Field name -> docstring in one line, for the fields that have one; inherited ones first.
    """
    node = ast.parse(inspect.cleandoc(inspect.getsource(schema))).body[0]
    docs: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, schema.__bases__):
        docs |= attribute_docstrings(base)
    body = node.body if isinstance(node, ast.ClassDef) else []
    for field, following in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[field.target.id] = " ".join(str(following.value.value).split())
    return docs


def groups(default: Any = _DEFAULTS, path: str = "config", purpose: str = "") -> Iterator[Group]:
    """Describe a dataclass of settings and those inside it, from the outside in.

    Args:
        default: instance with the defaults.
        path: path of ``default``.
        purpose: help of ``path`` itself.
    """
    docs, own, inside = attribute_docstrings(type(default)), [], []
    for field in dataclasses.fields(default):
        value, at = getattr(default, field.name), f"{path}.{field.name}"
        if dataclasses.is_dataclass(value):
            inside.append((value, at, docs.get(field.name, "")))
            continue
        if named := _GROUPS.get(at):
            inside.append((named(), f"{at}.NAME", docs.get(field.name, "")))
        help_text, allowed = docs.get(field.name, ""), ()
        if found := _ALLOWED.search(help_text):
            help_text, allowed = help_text[: found.start()], ast.literal_eval(f"({found[1]},)")
        own.append(Setting(at, str(field.type), value, help_text, allowed))
    yield Group(path, type(default), default, tuple(own), purpose)
    for value, at, purpose in inside:
        yield from groups(value, at, purpose)


def page() -> str:
    """The page of every setting in Markdown."""
    lines = [_INTRODUCTION]
    by_schema: dict[type, list[Group]] = {}
    for group in groups():
        by_schema.setdefault(group.schema, []).append(group)
    for subject in SUBJECTS:
        module = f"{Config.__module__.rpartition('.')[0]}.{subject}"
        title = (sys.modules[module].__doc__ or "").strip().splitlines()[0]
        lines += [f"## {title.removesuffix('.')}", ""]
        for schema, places in by_schema.items():
            if schema.__module__ == module:
                lines += _section(schema, places)
    return "\n".join(lines).rstrip() + "\n"


def _section(schema: type, places: list[Group]) -> list[str]:
    """A heading, the class's docstring and a table for the groups of one class."""
    first, *others = places
    lines = [f"### `{first.path}`", "", _markdown(inspect.cleandoc(schema.__doc__ or "")), ""]
    if not first.settings:
        return lines
    lines += ["| setting | type | default | allowed values | what it does |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for setting in first.settings:
        allowed = ", ".join(f"`{value!r}`" for value in setting.allowed)
        cells = (
            f"`{setting.path.rpartition('.')[2]}`",
            f"`{setting.type}`",
            f"`{setting.default!r}`",
            allowed,
            _markdown(setting.help),
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines.append("")
    for other in others:
        differ = [
            f"`{theirs.path.rpartition('.')[2]}` is `{theirs.default!r}`"
            for ours, theirs in zip(first.settings, other.settings)
            if ours.default != theirs.default
        ]
        but = f"; here the default of {', of '.join(differ)}" if differ else ""
        same = f"It has the fields of [`{first.path}`](#{first.path.replace('.', '')}){but}."
        lines += [f"### `{other.path}`", "", f"{_markdown(other.purpose)} {same}", ""]
    return lines


def _markdown(text: str) -> str:
    """Docstring text with single backticks, and with stars outside of code escaped."""
    parts = text.split("``")
    escaped = [part.replace("*", "\\*") for part in parts[::2]]
    parts[::2] = escaped
    return "`".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
