"""Read JSON arrays, JSON objects and JSON lines; an invalid line becomes a problem."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from jaxvlm.config import json_text
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.sources import compressed

_BOM = b"\xef\xbb\xbf"


def read(path: pathlib.Path) -> Iterator[tuple[str, Any] | Problem]:
    """Read the items of a JSON array, a JSON object or JSON lines; of lines, one at a time.

    Args:
        path: path of the file.

    Yields:
        ``("file:line or index", raw item)`` of each, and a Problem for each invalid line.

    Raises:
        DataError: the file as a whole can't be read.
    """
    with compressed.opened(path) as file:
        blank, first = b"", file.readline().removeprefix(_BOM)
        while first and not first.strip():
            blank, first = blank + first, file.readline()
        if not first:
            raise DataError(f"{path}: the file is empty; give one with at least one record")
        # An array, or a single pretty-printed object rather than one object a line.
        if first.lstrip()[:1] == b"[" or first.strip() == b"{":
            yield from _whole(path, blank + first + file.read())
        else:
            yield from _lines(path, itertools.chain([first], file), blank.count(b"\n") + 1)


def _whole(path: pathlib.Path, data: bytes) -> Iterator[tuple[str, Any]]:
    try:
        parsed = json_text.parse(data)
    except UnicodeDecodeError as error:
        bad_line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{bad_line}: not UTF-8; save the file as UTF-8") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}; fix the file there") from None
    del data
    parsed = parsed if isinstance(parsed, list) else [parsed]
    for i in range(len(parsed)):
        item, parsed[i] = parsed[i], None  # what was taken needs no memory any more
        yield f"{path.name}[{i}]", item


def _lines(
    path: pathlib.Path, lines: Iterable[bytes], begin: int
) -> Iterator[tuple[str, Any] | Problem]:
    is_json, first = False, None
    for number, line in enumerate(lines, begin):
        where = f"{path.name}:{number}"
        if not line.strip():
            continue
        try:
            item = json_text.parse(line.removesuffix(b"\n"))
        except UnicodeDecodeError:
            problem = Problem(where, "not UTF-8")
        except ValueError as error:
            problem = Problem(where, "not JSON", str(error))
        else:
            is_json = True
            yield where, item
            continue
        first = first or problem
        yield problem
    if first and not is_json:
        raise DataError(
            f"{path}: neither JSON nor JSON lines ({first}); give LLaVA JSON, or messages as JSONL"
        )
