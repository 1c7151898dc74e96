"""Parses the JSON of a user's file within limits, so that one kind of error says what is wrong."""

from __future__ import annotations

import json
import pathlib
from typing import Any

MAX_DEPTH = 64
"""Lists and objects inside each other; what is deeper would end in a RecursionError somewhere."""
MAX_DIGITS = 300
"""Digits of a whole number; a longer one has no float."""


def parse(text: str | bytes) -> Any:
    """Parse a JSON text.

    Args:
        text: the text, or its bytes in UTF-8; a byte order mark is passed over.

    Raises:
        ValueError: it is not UTF-8, not JSON, nested too deep, has a number that is too long, or an
            object has a key twice with different values. A ``UnicodeDecodeError`` for what is not
            UTF-8.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        value = json.loads(
            text.removeprefix("\ufeff"), parse_int=_integer, object_pairs_hook=_object
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # Few texts have so many brackets; counting them is faster than looking at the values.
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def read(path: pathlib.Path) -> Any:
    """Parse a regular file, as :func:`parse` does.

    Raises:
        OSError: it can't be read; ``FileNotFoundError`` also where it is a pipe, a device or a
            folder, which could be read without end.
        ValueError: as of :func:`parse`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, or not a regular file")
    return parse(path.read_bytes())


_TOO_DEEP = f"lists or objects more than {MAX_DEPTH} deep"


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values, of which json.loads alone would keep the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        for key, one in pairs:
            if repr(one) != repr(value[key]):  # 1 and true are equal
                raise ValueError(f"the key {key!r} twice, with different values")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inside += one.values()
            elif isinstance(one, list):
                inside += one
        if not inside:
            return False
        level = [one for one in inside if isinstance(one, dict | list)]
    return bool(level)
