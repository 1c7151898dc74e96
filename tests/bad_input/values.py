# ruff: noqa: E501
"""Values that stand where something else is expected, and texts that are not quite JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

HUGE = 10**12
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2.5, HUGE, -HUGE, 10**40, 1e308, float("nan"), float("inf"), "", "x",
    "\ud800", "\x00", "é\u202e", "../../etc/passwd", "x" * 70_000, [], {}, [None], [[[]]], {"": None},
    {"a": {"b": [1]}}, [1, "2", None, {}], [0] * 5_000,
]  # fmt: skip
"""One of each kind of value."""

VALUES = st.one_of(
    st.sampled_from(ODD),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside ``value``, itself left out."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [p for key, inner in items for p in ((*at, key), *paths(inner, (*at, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of ``value`` with ``new`` at a path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def removed(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy of ``value`` without what is at a path."""
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = removed(copy[path[0]], path[1:])
    return copy


@st.composite
def mutated(draw: st.DrawFn, base: Any) -> Any:
    """``base`` with one to three values replaced, removed or added."""
    value = base
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        known = paths(value)
        if not known:
            break
        path = draw(st.sampled_from(known))
        if draw(st.integers(0, 9)) == 0:
            value = removed(value, path)
        else:
            value = replaced(value, path, draw(VALUES))
    return value


DEEP = ["[" * 980 + "]" * 980, "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, "[" * 70 + "]" * 70]
RAW = [
    *DEEP,
    "9" * 5_000,
    "1" + "0" * 400,
    "-" + "9" * 400,
    "1e999",
    "NaN",
    '"\\ud800"',
    "",
    "{",
    "tru",
]
"""JSON, or nearly, that no Python value becomes when it is written."""


def text_of(value: Any) -> str:
    """JSON with NaN and infinities as Python writes them."""
    return json.dumps(value)


@st.composite
def json_texts(draw: st.DrawFn, base: Any) -> bytes:
    """A JSON file like ``base`` that has something wrong in it."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from(RAW)).encode("utf-8", "surrogatepass")
    if kind == 1:  # a part of it is one of those texts
        path = draw(st.sampled_from(paths(base)))
        text = text_of(replaced(base, path, "@@@@"))
        return text.replace('"@@@@"', draw(st.sampled_from(RAW))).encode()
    if kind == 2:
        return damaged(draw, text_of(base).encode())
    return text_of(draw(mutated(base))).encode()


def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` cut off, with other bytes in it, or with something before it."""
    kind = draw(st.integers(0, 3))
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at + 1 :]
    if kind == 2:
        return draw(st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\n\n"])) + data
    return data[at:] + data[:at]
