"""docs/embedding_data.md: its examples are read, and the fields it names are those that are."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from jaxvlm.config import PairDataConfig
from jaxvlm.data.sources import pair_formats, tables

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "embedding_data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_are_read(text, tmp_path, caplog):
    path = tmp_path / "pairs.jsonl"
    path.write_text(text, encoding="utf-8")
    (example,), problems = pair_formats.read(str(path))
    assert not problems and not caplog.records
    items = (example.query, example.positive, *example.negatives)
    assert len({item.content for item in items}) == len(items)
    named = {item.image for item in items if item.image}
    assert named == {str(tmp_path / name) for name in set(re.findall(r"\w+\.png", text))}


def test_every_field_and_setting_is_on_the_page():
    known = pair_formats.FORMATS
    fields = {f for _, names in known.values() for f in names} | set(pair_formats.OWN_FIELDS)
    spelled = {"negative_image", "positive_images", "positive_image"}  # one or several
    settings = {field.name for field in dataclasses.fields(PairDataConfig)}
    for name in (fields - spelled) | settings | set(tables.READERS):
        assert re.search(rf"(?<![a-z_]){re.escape(name)}(?![a-z_])", PAGE), name
