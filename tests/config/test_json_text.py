"""JSON is read as json.loads reads it, within limits; arrays one item at a time."""

import json
import random

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxvlm.config import json_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=9)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=9,
)  # fmt: skip


def chunked(data, size):
    return (data[i : i + size] for i in range(0, len(data), size))


def whole(data):
    """What json.loads makes of all of it: the items, and the error."""
    try:
        return json_text.parse(data), ""
    except ValueError as error:
        return None, str(error)


def streamed(data, size):
    found = []
    try:
        for item in json_text.array_items(chunked(data, size)):
            found.append(item)
    except ValueError as error:
        return found, str(error)
    return found, ""


@hypothesis.given(
    st.lists(VALUES, max_size=6), st.integers(1, 40), st.sampled_from([None, 1, "\t"]),
    st.booleans(), st.sampled_from(["", " ", "\n \r\n"]),
)  # fmt: skip
def test_items_are_those_of_the_whole(items, size, indent, ascii_only, blank):
    data = (blank + json.dumps(items, indent=indent, ensure_ascii=ascii_only) + blank).encode(
        "utf-8", "surrogatepass"
    )
    assert streamed(data, size) == (items, "") or whole(data)[1].startswith("not UTF-8")


@hypothesis.given(
    st.lists(VALUES, min_size=1, max_size=5), st.integers(1, 40), st.sampled_from([None, 2]),
    st.integers(0, 2**30), st.sampled_from(["cut", "flip", "drop", "more"]),
)  # fmt: skip
@hypothesis.settings(max_examples=400)
def test_an_error_is_that_of_the_whole(items, size, indent, seed, how):
    """At the same line, column and place, after the items before it."""
    data = bytearray(json.dumps(items, indent=indent).encode())
    place = random.Random(seed).randrange(1, len(data))
    if how == "cut":
        del data[place:]
    elif how == "flip":
        data[place] ^= 1 << random.Random(seed + 1).randrange(8)
    elif how == "drop":
        del data[place]
    else:
        data += b"  \n{}"
    found, error = streamed(bytes(data), size)
    of_whole, expected = whole(bytes(data))
    if expected.startswith("Illegal trailing comma"):  # from Python 3.13 on
        expected = error
    assert error == expected
    if not error:
        assert found == of_whole


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_limits_are_those_of_the_whole(size):
    for depth in (62, *range(63, 68), 70, 100_000):
        data = b"[" * depth + b"]" * depth
        assert streamed(data, size)[1] == whole(data)[1], depth
    assert "more than 64 deep" in streamed(b"[" * 70 + b"]" * 70, size)[1]
    assert streamed(b"[" * 64 + b"]" * 64, size)[1] == ""
    for text, why in (
        (b'[1, {"a": 1, "a": 2}]', "the key 'a' twice"),
        (b"[1" + b"0" * 400 + b"]", "a number of 401 digits"),
        ("[1,\n\n'é'".encode("latin-1"), "not UTF-8 in line 3"),
        (b"[1,\n\xff]", "not UTF-8 in line 2"),
        (b"\x0b[1]]", "Expecting value: line 1 column 1 (char 0)"),
    ):
        assert why in streamed(text, size)[1] and why in whole(text)[1], text


def test_what_was_taken_is_dropped():
    """A long array is never all in memory, nor read before it is needed."""
    read = []

    def chunks():
        for i in range(1000):
            read.append(i)
            yield b"[" * (i == 0) + b",".join([b'{"a": "%s"}' % (b"x" * 90)] * 10) + b","
        yield b"0]"

    items = json_text.array_items(chunks())
    for _ in range(200):
        next(items)
    assert len(read) < 30


def test_an_early_error_reads_no_more():
    read = []

    def chunks():
        for i in range(1000):
            read.append(i)
            yield b'[{"a" 1}, ' + b" " * 1000

    with pytest.raises(ValueError, match=r"Expecting ':' delimiter: line 1 column 7 \(char 6\)"):
        list(json_text.array_items(chunks()))
    assert len(read) == 1
