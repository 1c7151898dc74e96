"""Parses the JSON of a user's file within limits, so that one kind of error says what is wrong."""

from __future__ import annotations

import codecs
import json
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

MAX_DEPTH = 64
"""Lists and objects inside each other; what is deeper would end in a RecursionError somewhere."""
MAX_DIGITS = 300
"""Digits of a whole number; a longer one has no float."""


class NotUtf8(ValueError):
    """A text is not UTF-8.

    Args:
        line: number of the line in which it is not.
    """

    def __init__(self, line: int):
        super().__init__(f"not UTF-8 in line {line}")
        self.line = line


def parse(text: str | bytes) -> Any:
    """Parse a JSON text.

    Args:
        text: the text, or its bytes in UTF-8; a byte order mark is passed over.

    Raises:
        ValueError: it is not UTF-8, not JSON, nested too deep, has a number that is too long, or an
            object has a key twice with different values. :class:`NotUtf8` for what is not UTF-8.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise NotUtf8(1 + error.object[: error.start].count(b"\n")) from None
    try:
        value = _DECODER.decode(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # Few texts have so many brackets; counting them is faster than looking at the values.
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value, MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def array_items(chunks: Iterable[bytes]) -> Iterator[Any]:
    """Parse a JSON array one item at a time: what was taken needs no memory any more.

    Args:
        chunks: the parts of the text, in UTF-8; it begins with ``[``, perhaps after blanks.

    Raises:
        ValueError: the first that is met, as of :func:`parse` and with the place in the whole text,
            after the items before.
    """
    text = _Text(chunks)
    if text.next_char() != "[":
        raise text.error("Expecting value", text.at)
    text.at += 1
    if text.next_char() == "]":
        text.at += 1
    else:
        while True:
            yield text.item()
            if (char := text.next_char()) not in (",", "]"):
                raise text.error("Expecting ',' delimiter", text.at)
            text.at += 1
            if char == "]":
                break
            text.next_char()
    if text.next_char():
        raise text.error("Extra data", text.at)


class _Text:
    """A part of a text, from which the chunks that were read are dropped.

    Attributes:
        at: place of what comes next in the part.
    """

    def __init__(self, chunks: Iterable[bytes]):
        self._chunks, self._decoder = iter(chunks), codecs.getincrementaldecoder("utf-8")()
        self._part, self.at = "", 0
        self._chars = self._lines = 0
        """Of what was dropped."""
        self._line_start = 0
        """Place in the whole text of the first character of the line that the part begins in."""

    def _more(self, least: int = 1) -> bool:
        """Read at least so many characters more; whether there is anything."""
        dropped = self._part[: self.at]
        self._lines += dropped.count("\n")
        if "\n" in dropped:
            self._line_start = self._chars + dropped.rindex("\n") + 1
        self._chars += self.at
        parts, size = [self._part[self.at :]], 0
        while size < least:
            chunk = next(self._chunks, None)
            try:
                parts.append(self._decoder.decode(chunk or b"", final=chunk is None))
            except UnicodeDecodeError as error:
                before = self._lines + sum(part.count("\n") for part in parts)
                line = 1 + before + error.object[: error.start].count(b"\n")
                raise NotUtf8(line) from None
            size += len(parts[-1])
            if chunk is None:
                break
        self._part, self.at = "".join(parts), 0
        return size > 0

    def _skipped(self) -> int:
        place = _BLANKS.match(self._part, self.at)
        assert place is not None  # none is a match too
        return place.end()

    def next_char(self) -> str:
        """The next character that is no blank, at which it is then; "" at the end."""
        self.at = self._skipped()
        while self.at == len(self._part):
            if not self._more():
                return ""
            self.at = self._skipped()
        return self._part[self.at]

    def item(self) -> Any:
        """Parse the value that comes next."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._part, self.at)
            except RecursionError:
                raise ValueError(_TOO_DEEP) from None
            except json.JSONDecodeError as error:
                # At the part's end, or in a string that has no end yet, it may be cut off.
                cut = error.pos > len(self._part) - _CUT or error.msg.startswith("Unterminated")
                place, size = error.pos - self.at, len(self._part) - self.at
                if not cut or not self._more(size):
                    raise self.error(error.msg, self.at + place) from None
                continue
            except ValueError:
                if not (self._part[-1].isdigit() and self._more(len(self._part))):
                    raise
                continue  # a number that is too long, and not at its end
            size = end - self.at
            if len(self._part) - end < _CUT and self._more():
                continue  # the rest of a number, perhaps
            end = self.at + size  # the part is another one where there was no more
            brackets = self._part.count("[", self.at, end) + self._part.count("{", self.at, end)
            if brackets >= MAX_DEPTH and _is_deep(value, MAX_DEPTH - 1):
                raise ValueError(_TOO_DEEP)
            self.at = end
            return value

    def error(self, why: str, place: int) -> ValueError:
        """The error of a place in the part, as json.loads gives it of the whole text."""
        before = self._part[:place]
        line = 1 + self._lines + before.count("\n")
        start = self._chars + before.rindex("\n") + 1 if "\n" in before else self._line_start
        char = self._chars + place
        return ValueError(f"{why}: line {line} column {char - start + 1} (char {char})")


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


_DECODER = json.JSONDecoder(parse_int=_integer, object_pairs_hook=_object)
_BLANKS = re.compile(r"[ \t\n\r]*")
_CUT = 16
"""Characters of the longest word or escape that an error's place may lie before its end."""


def _is_deep(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
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
