"""JSON of any layout: arrays, one object, lines; what comes before them; compressed or not."""

import gzip
import itertools
import json

import pytest

from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import json_files

ROWS = [{"id": "a", "b": [1, 2], "c": "\u00e9"}, {"id": "b", "d": {}}]
LAYOUTS = {
    "array": lambda indent: (json.dumps(ROWS, indent=indent), ROWS),
    "object": lambda indent: (json.dumps(ROWS[0], indent=indent), ROWS[:1]),
    "lines": lambda indent: ("\n".join(map(json.dumps, ROWS)), ROWS),
    "empty array": lambda indent: ("[]", []),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_any_layout_is_read(layout, suffix, tmp_path):
    """With any indent, byte order mark, blanks before it and after it, and ends of lines."""
    for indent, mark, blank, end in itertools.product(
        (None, 0, 1, 2, "\t"), ("", "\ufeff"), ("", "\n", " \n\n ", "\n" * 5000), ("\n", "\r\n")
    ):
        text, rows = LAYOUTS[layout](indent)
        data = (mark + blank + text + blank).replace("\n", end).encode()
        path = tmp_path / f"data.json{suffix}"
        path.write_bytes(gzip.compress(data, 1) if suffix else data)
        found = list(json_files.read(path))
        assert [item for _, item in found] == rows, (indent, mark, blank, end)
        if layout == "lines":
            first = 1 + blank.count("\n")
            assert [where for where, _ in found] == [f"{path.name}:{first + i}" for i in range(2)]
        elif layout != "object" or indent is not None:  # else it is a line
            assert [where for where, _ in found] == [f"{path.name}[{i}]" for i in range(len(rows))]


def test_blanks_before_it_are_read_at_once(tmp_path, monkeypatch):
    """Not a byte at a time: a file of blanks alone is told as fast as it is read."""
    path = tmp_path / "data.json"
    path.write_bytes(b" \n" * 2**20 + b"[1]")
    monkeypatch.setattr(json_files, "_CHUNK", 1000)
    assert list(json_files.read(path)) == [("data.json[0]", 1)]
    path.write_bytes(b" \n" * 2**20)
    with pytest.raises(DataError, match="the file is empty"):
        list(json_files.read(path))


@pytest.mark.parametrize(
    "text, line",
    [
        ("\n\n[1,\n2 3]", "line 4 column 3"),
        ('\n  {"a": 1} x', "line 1 column 12"),
        ("\n{\n  1: 2}", "line 3 column 3"),
    ],
)
def test_an_error_is_at_its_line_in_the_file(text, line, tmp_path):
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"data.json: .*not JSON.*{line}"):
        list(json_files.read(path))
