"""Read CSV and TSV so that no record swallows another and no quotation mark is lost.

In CSV, a cell may stand in quotation marks (RFC 4180). In TSV, quotation marks are text (IANA's
text/tab-separated-values) unless ``data.tsv_quoting`` says that the file was written with them.
"""

from __future__ import annotations

import csv
import io
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxvlm.config import json_text
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.sources import compressed

_SWALLOWED = "a quotation mark opens a cell that goes on over lines that look like records"
_PRINTED_LIST = re.compile(r"[\[{]\s*['\"\[{(]")
_MAX_CELL = 2**31 - 1  # the csv module refuses cells of more than 128 KiB otherwise


def read(
    path: pathlib.Path,
    tsv_quoting: bool = False,
    is_text: Callable[[str], bool] = lambda column: False,
) -> Iterator[tuple[str, dict[str, Any]] | Problem]:
    """Read a file whose first line names the columns.

    Args:
        path: path of the file; ``.tsv`` has tabs between cells, any other name commas.
        tsv_quoting: reads quotation marks around a TSV's cells as CSV's.
        is_text: whether a column is text, also where a cell looks like JSON.

    Yields:
        ``("file:line", {column: text, or list or object where the cell is JSON of one})``, where
        an empty cell is a missing field; and a Problem for each record that can't be read.

    Raises:
        DataError: the file as a whole can't be used.
    """
    data = compressed.read(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from None
    del data
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    is_tsv = compressed.kind_of(path) == ".tsv"
    names: list[str] = []
    for number, cells in _rows(text, "\t" if is_tsv else ",", not is_tsv or tsv_quoting):
        where = f"{path.name}:{number}"
        if not names:
            if isinstance(cells, str):
                raise DataError(f"{path}:{number}: {cells}")
            names = [cell.strip() for cell in cells]
            if len(set(names)) != len(names) or "" in names:
                raise DataError(f"{path}: the first line must name each column, once")
        elif isinstance(cells, str):
            yield Problem(where, cells)
        elif len(cells) != len(names):
            more = "more" if len(cells) > len(names) else "fewer"
            detail = f"{len(cells)} cells, {len(names)} columns"
            yield Problem(where, f"{more} cells than columns", detail)
        else:
            try:
                fields = {
                    name: cell if is_text(name) else _value(cell)
                    for name, cell in zip(names, cells)
                    if cell != ""
                }
            except ValueError as error:
                yield Problem(where, str(error))
                continue
            yield where, fields


def _rows(text: str, delimiter: str, quoted: bool) -> Iterator[tuple[int, list[str] | str]]:
    """Yield (number of the first line, cells) of each record; cells are a reason where it is bad.

    After a record whose quotation marks can't be right, reading goes on at its second line, so that
    a stray mark costs one record.
    """
    lines = io.StringIO(text, newline="").readlines()
    columns = 0
    start = 0
    csv.field_size_limit(_MAX_CELL)
    while start < len(lines):
        if not lines[start].strip("\r\n"):
            start += 1
            continue
        if not quoted:
            cells: list[str] | str = lines[start].rstrip("\r\n").split(delimiter)
            used = 1
        else:
            rest = (lines[i] for i in range(start, len(lines)))
            reader = csv.reader(rest, delimiter=delimiter, strict=True)
            try:
                cells = next(reader)
                used = reader.line_num
            except csv.Error as error:
                cells, used = f"not CSV: {error}", 1
            if used > 1 and all(
                len(line.rstrip("\r\n").split(delimiter)) == columns
                for line in lines[start : start + used]
            ):
                cells, used = _SWALLOWED, 1
        columns = columns or len(cells)
        yield start + 1, cells
        start += used


def _value(cell: str) -> Any:
    """Return a cell's text, or the list or object that it is the JSON of.

    Raises:
        ValueError: the cell is a list as Python or NumPy print it, which has several readings.
    """
    text = cell.strip()
    if (text[:1], text[-1:]) not in (("[", "]"), ("{", "}")):
        return cell
    try:
        return json_text.parse(text)
    except ValueError:
        pass
    if _PRINTED_LIST.match(text):
        raise ValueError('a cell with a list that is not JSON; write it as ["a", "b"]')
    return cell
