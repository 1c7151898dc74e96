"""Read JSON arrays, JSON objects and JSON lines; an invalid line becomes a problem."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jaxvlm.config import json_text
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.sources import compressed

_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
_CHUNK = 2**20


def read(path: pathlib.Path) -> Iterator[tuple[str, Any] | Problem]:
    """Read the items of a JSON array or of JSON lines, one at a time, or a JSON object.

    Args:
        path: path of the file.

    Yields:
        ``("file:line or index", raw item)`` of each, and a Problem for each invalid line.

    Raises:
        DataError: the file as a whole can't be read.
    """
    with compressed.opened(path) as file:
        blocks = iter(lambda: file.read(_CHUNK), b"")
        blank, head = _past_blanks(blocks)
        if not head:
            raise DataError(f"{path}: the file is empty; give one with at least one record")
        if head.startswith(b"["):
            yield from _array(path, itertools.chain([blank, head], blocks))
            return
        indent = blank.rpartition(b"\n")[2]
        blank, head = blank.removesuffix(indent), indent + head
        if not head.endswith(b"\n"):
            head += file.readline()
        # A single pretty-printed object rather than one object a line.
        if head.partition(b"\n")[0].strip() == b"{":
            yield from _object(path, blank + head + file.read())
        else:
            lines = re.findall(rb"[^\n]*\n|[^\n]+", head)
            yield from _lines(path, itertools.chain(lines, file), blank.count(b"\n") + 1)


def _past_blanks(blocks: Iterator[bytes]) -> tuple[bytes, bytes]:
    """The blanks that a file begins with, and the rest of the block in which they end."""
    blank, block = list[bytes](), next(blocks, b"").removeprefix(_BOM)
    while block and not block.lstrip(_BLANKS):
        blank.append(block)
        block = next(blocks, b"")
    rest = block.lstrip(_BLANKS)
    return b"".join([*blank, block[: len(block) - len(rest)]]), rest


def _array(path: pathlib.Path, chunks: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    with _errors_of(path):
        for i, item in enumerate(json_text.array_items(chunks)):
            yield f"{path.name}[{i}]", item


def _object(path: pathlib.Path, data: bytes) -> Iterator[tuple[str, Any]]:
    with _errors_of(path):
        item = json_text.parse(data)
    yield f"{path.name}[0]", item


@contextlib.contextmanager
def _errors_of(path: pathlib.Path) -> Iterator[None]:
    """Errors of a text, with its file."""
    try:
        yield
    except json_text.NotUtf8 as error:
        raise DataError(f"{path}:{error.line}: not UTF-8; save the file as UTF-8") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}; fix the file there") from None


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
        except json_text.NotUtf8:
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
