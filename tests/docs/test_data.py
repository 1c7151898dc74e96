"""docs/data.md: its examples are read, and its table of reasons leaves none out."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.sources.member_names import as_video

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_are_read(text, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8")
    (record,), problems = conversation_formats.read(str(path))
    assert not problems
    first = as_video("jump.mp4") if "videos" in text else "cat.png"
    assert record.images[0] == str(tmp_path / first)
    assert record.turns[0].content.count("<image>") == len(record.images)


def test_every_reason_is_in_the_table():
    table = PAGE.replace("'from' / 'role'", "'from'").replace("a turn without 'role'", "")
    for name in (
        "sources/conversation_formats",
        "sources/layouts",
        "sources/visuals",
        "conversations/tokenize",
        "conversations/packing",
    ):
        source = (ROOT / "jaxvlm" / "data" / f"{name}.py").read_text(encoding="utf-8")
        plain = re.findall(r'(?:BadItem\(|Problem\(\w+(?:\.\w+)?, )"([^"]+)"', source)
        for reason in set(plain) - {"a turn without 'role'"}:
            assert reason.removeprefix("the chat template ") in table, (name, reason)


def test_what_packing_takes_for_a_record_was_measured():
    path = ROOT / "benchmarks" / "results" / "packed_sets.json"
    few, many = json.loads(path.read_text())["packing"]
    mib = many["anonymous_peak_mib"] - few["anonymous_peak_mib"]
    each = mib * 2**20 / (many["records"] - few["records"])
    assert f"about {each / 1000:.1f} kB for\n  a record of a few sentences" in PAGE


def test_what_packed_pairs_take_was_measured():
    rows = json.loads((ROOT / "benchmarks/results/packed_pairs.json").read_text())["rows"]
    page = " ".join((ROOT / "docs" / "embedding_data.md").read_text(encoding="utf-8").split())
    (file, few), (many,) = (
        [row for row in rows if row["pairs"] == count] for count in (10**6, 10**7)
    )
    assert (
        f"after {file['first_batch_s']:.0f} s from a file, which holds "
        f"{file['anonymous_mib']:,.0f} MiB, and after {few['first_batch_s']:.1f} s from a set, "
        f"which holds {few['anonymous_mib']:.0f} MiB; of ten million, after "
        f"{many['first_batch_s']:.0f} s from a set, which holds {many['anonymous_mib']:.0f} MiB"
    ) in page
    set_rate, file_rate = (round(row["pairs_per_cpu_s"] / 1000) for row in (few, file))
    assert f"{set_rate} thousand pairs a second from the set, and of {file_rate} thousand" in page
