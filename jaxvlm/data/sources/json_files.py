"""Read JSON arrays, JSON objects and JSON lines; an invalid line becomes a problem."""

from __future__ import annotations

import pathlib
from typing import Any

from jaxvlm.config import json_text
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.sources import compressed


def read(path: pathlib.Path) -> tuple[list[tuple[str, Any]], list[Problem]]:
    """Read the items of a JSON array, a JSON object or JSON lines.

    Args:
        path: path of the file.

    Returns:
        ``[("file:line or index", raw item)]``, and a Problem for each invalid line.

    Raises:
        DataError: the file as a whole can't be read.
    """
    data = compressed.read(path).removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise DataError(f"{path}: the file is empty; give one with at least one record")
    lines = data.split(b"\n")
    if data.lstrip()[:1] == b"[" or _is_one_object(data, lines):
        try:
            parsed = json_text.parse(data)
        except UnicodeDecodeError as error:
            bad_line = data[: error.start].count(b"\n") + 1
            raise DataError(f"{path}:{bad_line}: not UTF-8; save the file as UTF-8") from None
        except ValueError as error:
            raise DataError(f"{path}: not JSON: {error}; fix the file there") from None
        parsed = parsed if isinstance(parsed, list) else [parsed]
        return [(f"{path.name}[{i}]", item) for i, item in enumerate(parsed)], []
    items: list[tuple[str, Any]] = []
    problems = []
    for number, line in enumerate(lines, 1):
        where = f"{path.name}:{number}"
        if not line.strip():
            continue
        try:
            items.append((where, json_text.parse(line)))
        except UnicodeDecodeError:
            problems.append(Problem(where, "not UTF-8"))
        except ValueError as error:
            problems.append(Problem(where, "not JSON", str(error)))
    if not items and problems:
        raise DataError(
            f"{path}: neither JSON nor JSON lines ({problems[0]});"
            " give LLaVA JSON, or messages as JSONL"
        )
    return items, problems


def _is_one_object(data: bytes, lines: list[bytes]) -> bool:
    """Whether the file is a single pretty-printed object rather than one object a line."""
    first = next(line for line in lines if line.strip())
    return data.lstrip()[:1] == b"{" and first.strip() == b"{"
