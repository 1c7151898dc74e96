"""What a sweep is asked to run: grids, files of trials and ablations become rows of overrides.

An override is a path of a setting without ``config.``, and its value as the command line takes it.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError, json_text

BASE = "base"
"""Name of the run without any factor in an ablation."""
SEED = "seed"
_CLOSES = {"(": ")", "[": "]", "{": "}"}


class Row(NamedTuple):
    """One trial that is asked for."""

    factor: str
    """Name of the factor that an ablation changes; "" in other sweeps."""
    overrides: dict[str, str]
    """Path of a setting -> its value's text, those of grids first."""


def read_rows(grids: Sequence[str], trials: str = "", ablation: str = "") -> list[Row]:
    """Make the rows of a sweep: each of a file's rows with each combination of the grids' values.

    Args:
        grids: ``PATH=V,V,...``, of different paths.
        trials: JSON lines, an object of overrides each; "" is none.
        ablation: JSON file of factors, ``{"name": {PATH: value, ...}, ...}``; "" is none. Its rows
            are the run without any of them, and one for each factor.

    Raises:
        ConfigError: nothing is varied, a path is given twice, or a file can't be used.
    """
    if trials and ablation:
        raise ConfigError("--trials and --ablate both list trials; give one of them")
    axes = dict(_axes(grids))
    rows = [Row("", {})]
    if trials:
        rows = list(_trials(pathlib.Path(trials)))
    elif ablation:
        rows = list(_ablation(pathlib.Path(ablation)))
    elif not axes:
        raise ConfigError(
            "a sweep varies settings: --grid=optim.learning_rate=1e-4,3e-4, --trials=FILE or "
            "--ablate=FILE"
        )
    for row in rows:
        if both := sorted(set(row.overrides) & set(axes)):
            raise ConfigError(f"{both[0]} is in --grid and in {trials or ablation}; leave one out")
    return [
        Row(row.factor, dict(zip(axes, values, strict=True)) | row.overrides)
        for row in rows
        for values in itertools.product(*axes.values())
    ]


def as_text(value: Any) -> str:
    """The text by which the command line takes a value of JSON or of a config.

    Raises:
        ConfigError: null or an object, which are no settings' values.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, Mapping):
        raise ConfigError(
            f"{json.dumps(value)} is no value; name a group's settings one by one, as in "
            "'optim.learning_rate'"
        )
    return repr(_as_tuple(value))


def split_values(text: str) -> list[str]:
    """Split values at commas outside of quotes, parentheses, brackets and braces.

    A value that is in quotes as a whole is what is inside of them.

    Raises:
        ValueError: something is not closed, or a value is missing.
    """
    values, start, quote = [], 0, ""
    open_: list[str] = []
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and (open_ or place == start):  # elsewhere it is an apostrophe
            quote = letter
        elif letter in _CLOSES:
            open_.append(_CLOSES[letter])
        elif open_ and letter == open_[-1]:
            open_.pop()
        elif letter == "," and not open_:
            values.append(text[start:place])
            start = place + 1
    values.append(text[start:])
    if quote or open_:
        raise ValueError(f"{quote or open_[-1]} is missing")
    if not all(value.strip() for value in values):
        raise ValueError("a value is missing")
    return [_unquoted(value.strip()) for value in values]


def _unquoted(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] in "'\"" and value.find(value[0], 1) == len(value) - 1
    return value[1:-1] if is_quoted else value


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _axes(grids: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    seen = set()
    for grid in grids:
        given, equals, text = grid.partition("=")
        if not equals:
            raise ConfigError(f"--grid={grid}: give PATH=V,V, such as seed=0,1,2")
        path = _path(given, f"--grid={grid}")
        if path in seen:
            raise ConfigError(f"--grid: {path} is given twice; put all its values into one --grid")
        seen.add(path)
        try:
            yield path, split_values(text)
        except ValueError as error:
            raise ConfigError(f"--grid={grid}: {error}") from None


def _path(given: Any, where: str) -> str:
    path = str(given).strip().removeprefix("config.")
    if not re.fullmatch(r"\w+(\.\w+)*", path):
        raise ConfigError(
            f"{where}: {given!r} is no path of a setting, such as optim.learning_rate"
        )
    return path


def _overrides(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: give an object of paths and values, not {json.dumps(given)}")
    found: dict[str, str] = {}
    for name, value in given.items():
        path = _path(name, where)
        if path in found:
            raise ConfigError(f"{where}: {path} is given twice")
        try:
            found[path] = as_text(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {path}: {error}") from None
    return found


def _trials(path: pathlib.Path) -> Iterator[Row]:
    lines = _read(path).splitlines()
    if not any(line.strip() for line in lines):
        raise ConfigError(f"{path} lists no trials")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Row("", _overrides(_parsed(line, f"{path}:{number}"), f"{path}:{number}"))


def _ablation(path: pathlib.Path) -> Iterator[Row]:
    factors = _parsed(_read(path), str(path))
    if not isinstance(factors, dict) or not factors:
        raise ConfigError(f'{path}: give factors by name, {{"name": {{"path": value}}, …}}')
    if BASE in factors:
        raise ConfigError(f"{path}: {BASE!r} is the run without any factor; rename the factor")
    yield Row(BASE, {})
    for name, given in factors.items():
        if not given:
            raise ConfigError(f"{path}: {name!r} changes nothing, as the base run; leave it out")
        yield Row(name, _overrides(given, f"{path}: {name!r}"))


def _read(path: pathlib.Path) -> str:
    if not path.is_file():
        raise ConfigError(f"{path} is missing, or not a regular file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json_text.parse(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
