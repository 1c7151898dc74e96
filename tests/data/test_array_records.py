"""ArrayRecord files: as their own reader and TensorFlow's protos have them; damage is named."""

import io
import json
import pathlib
import shutil

import numpy as np
import pytest
from array_record.python import array_record_module
from PIL import Image

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import array_records, conversation_formats, members
from jaxvlm.data.sources.conversation_formats import read
from jaxvlm.data.sources.member_names import parse

OTHERS = pathlib.Path(__file__).with_name("written_by_others")
EXAMPLES = OTHERS / "examples.array_record-00000-of-00001"
PASSED = DataConfig(ignored_fields=("score", "counts"))


def write(path, rows, group=1):
    writer = array_record_module.ArrayRecordWriter(str(path), f"group_size:{group}")
    for row in rows:
        writer.write(row if isinstance(row, bytes) else json.dumps(row).encode())
    writer.close()
    return str(path)


def pixel(name):
    with Image.open(io.BytesIO(members.read(name))) as image:
        return int(np.asarray(image)[0, 0, 0])


def test_examples_of_tensorflow():
    records, problems = read(str(EXAMPLES), PASSED)
    assert not problems
    said = [[turn.content for turn in record.turns] for record in records]
    assert said == [
        ["<image>what?", "drei é"],
        ["<image>again?", "7"],
        ["<image> or <image>?", "both"],
        ["<image>hi", "yes"],
        ["none", "x"],
    ]
    assert [[pixel(x) for x in record.images] for record in records] == [[3], [3], [5, 6], [9], []]
    assert records[0].images == records[1].images  # equal bytes are one image
    assert records[0].id == f"{EXAMPLES.name}[0]"
    fields = list(array_records.records(EXAMPLES, {}))
    assert fields[4]["score"] == [0.5, -1.5] and fields[4]["counts"] == [2**40, -3]
    assert fields[1]["index"] == 4 and "note" not in fields[4]
    _, (problem,) = read(str(EXAMPLES))
    assert "a field of the record that jaxvlm does not read" in problem.reason
    assert problem.detail == "counts, score"


def test_json_records_are_what_its_own_reader_gives(tmp_path):
    rows = [
        {"id": f"r{i}", "question": f"{'long ' * (i % 7)}?", "answer": f"{i}"} for i in range(700)
    ]
    for group in (1, 64):
        path = write(tmp_path / f"a{group}.array_record", rows, group)
        records, problems = read(path)
        theirs = array_record_module.ArrayRecordReader(path).read_all()
        assert not problems and len(records) == len(theirs) == 700
        for record, data in zip(records, theirs, strict=True):
            wanted = json.loads(data)
            assert record.id == wanted["id"]
            assert [x.content for x in record.turns] == [wanted["question"], wanted["answer"]]


def test_shards_by_a_pattern(tmp_path):
    for i in range(3):
        shutil.copy(EXAMPLES, tmp_path / f"x.array_record-0000{i}-of-00003")
    records, _ = read(str(tmp_path / "x.array_record-*"), PASSED)
    assert len(records) == 15 and len({record.id for record in records}) == 15
    assert len({record.images for record in records}) == 4


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"", "a record that is neither JSON nor a tf.train.Example"),
        (b"\x80\x04pickle", "a record that is neither JSON nor a tf.train.Example"),
        (b"{not json", "not JSON"),
        (b"[1, 2]", "a record that is neither JSON nor a tf.train.Example"),
    ],
)
def test_records_that_are_refused(tmp_path, row, reason):
    good = {"question": "hi", "answer": "yes"}
    path = write(tmp_path / "a.array_record", [good, row, good])
    records, problems = read(path)
    assert len(records) == 2
    assert [(x.id, x.reason) for x in problems] == [("a.array_record[1]", reason)]


def test_damage_is_named(tmp_path):
    good = EXAMPLES.read_bytes()
    path = tmp_path / "a.array_record"
    cut = [b"", good[:100], good[: len(good) // 2], good[:-8], good[64:], good + bytes(64)]
    flipped = good[:300] + bytes([good[300] ^ 1]) + good[301:]
    for bad in (*cut, bytes(len(good)), flipped):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=r"a\.array_record: can't be read as ArrayRecord"):
            read(str(path), PASSED)


def test_an_image_of_a_changed_file_is_not_read(tmp_path):
    path = tmp_path / "a.array_record"
    shutil.copy(EXAMPLES, path)
    records, _ = read(str(path), PASSED)
    names = [x for record in records for x in record.images]
    write(path, [{"question": "hi", "answer": "yes"}] * 5)
    for name in names:
        with pytest.raises(ValueError, match="changed since it was indexed"):
            members.read(name)
    odd = parse(names[0])
    for place in ("99/image/0", "0/image/7", "0/nothing/0", "0", "x/image/0", "0/image/x"):
        with pytest.raises(ValueError, match="changed since it was indexed"):
            members.read(str(odd._replace(place=place, file=str(EXAMPLES))))


def test_a_text_that_looks_like_json_is_a_text(tmp_path):
    rows = [
        {"question": "where?", "answer": "[0.1, 0.2]"},
        {"question": '{"x": 1}', "answer": '["a cat"]'},
    ]
    path = tmp_path / "a.array_record"
    write(path, [example(row) for row in rows])
    records, problems = read(str(path))
    assert not problems
    assert [[turn.content for turn in record.turns] for record in records] == [
        [row["question"], row["answer"]] for row in rows
    ]
    config = DataConfig(column_mapping=(("where", "question"),))
    write(path, [example({"where": "[1]", "answer": "{}"})])
    (record,), _ = read(str(path), config)
    assert [turn.content for turn in record.turns] == ["[1]", "{}"]


def example(row):
    """A tf.train.Example of texts, encoded by hand."""

    def part(number, data):
        return bytes([number << 3 | 2, len(data)]) + data

    entries = b""
    for name, text in row.items():
        value = part(1, part(1, text.encode()))
        entries += part(1, part(1, name.encode()) + part(2, value))
    return part(1, entries)


def test_features_named_as_other_fields(tmp_path):
    config = DataConfig(column_mapping=(("question", "caption"),), ignored_fields=("answer",))
    records, _ = conversation_formats.read(str(EXAMPLES), config)
    assert records[0].turns[-1].content == "what?"
