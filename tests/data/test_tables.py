"""Conversations in cells of tables say what files of JSON say, and images have the same bytes."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import pathlib
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import columnar, members, pair_formats
from jaxvlm.data.sources.conversation_formats import Turn, read
from jaxvlm.data.sources.member_names import parse
from jaxvlm.data.tokenizer import chat_tokenizer
from tests.data import mds_files
from tests.data.table_files import (
    KINDS,
    asked,
    cell,
    parquet,
    png,
    pyarrow,
    write_arrow,
    write_saved,
    write_tar,
    written,
)


@pytest.mark.parametrize("kind", KINDS)
def test_images_in_cells_are_the_bytes_that_were_written(tmp_path, kind):
    rows = [asked(images=[cell(10 * i, f"{i}.png")]) for i in range(8)]
    records, problems = read(written(tmp_path, rows, kind))
    assert not problems and len(records) == 8
    for i, record in enumerate(records):
        assert record.turns == (Turn("user", "<image>what is it?"), Turn("assistant", "red"))
        assert members.read(record.images[0]) == png(10 * i)
        name, size = members.name_and_size(record.images[0])
        assert name.startswith(f"{i}.png") and size == len(png(10 * i))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = [record.images[0] for record in records] * 20
        assert list(pool.map(members.read, paths)) == [png(10 * (i % 8)) for i in range(160)]


def test_a_stream_that_was_cut_off_is_no_shorter_one(tmp_path):
    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    path, ends = tmp_path / "t.arrow", []
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        for i in range(4):
            rows = [pyarrow.array([f"a{i}?"] * 5), pyarrow.array(["b"] * 5)]
            writer.write_batch(pyarrow.record_batch(rows, schema=schema))
            ends.append(file.tell())
    data = path.read_bytes()
    assert len(read(str(path))[0]) == 20
    for cut in (*ends, len(data) - 4, len(data) - 1, ends[-1] - 20, ends[0] - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(DataError, match=r"t\.arrow: (the stream has no end|can't be read as)"):
            read(str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_whose_parts_are_empty_is_empty(tmp_path, kind):
    empty = [None, {"bytes": b"", "path": None}, {"bytes": None, "path": None}]
    rows = [{"question": "a?", "answer": "b", "image": x} for x in (*empty, cell(1))]
    records, problems = read(written(tmp_path, rows, kind))
    assert not problems and [len(record.images) for record in records] == [0, 0, 0, 1]
    rows = [{"question": "a?", "answer": "b", "images": [x, cell(1)]} for x in empty]
    (tmp_path / "listed").mkdir()
    _, problems = read(written(tmp_path / "listed", rows, kind))
    assert len(problems) == 3  # a list's places are not passed over


@pytest.mark.parametrize("kind", KINDS)
def test_every_place_of_an_image(tmp_path, kind):
    part = [{"type": "image", "image": cell(3)}, {"type": "text", "text": "what is it?"}]
    shapes = {
        "one": asked(image=cell(3)),
        "bare": asked(image=png(3)),
        "listed": asked(images=[png(3)]),
        "in the content": {
            "messages": [
                {"role": "user", "content": part},
                {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
            ]
        },
        "of a name with signs": {
            "image+x: y/z": cell(3),
            "question": "what is it?",
            "answer": "red",
        },
        "rounds": {"images": [cell(3)], "texts": [{"user": "what is it?", "assistant": "red"}]},
    }
    for name, row in shapes.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        mapping = (("image+x: y/z", "image"),) if "signs" in name else ()
        (record,), problems = read(written(folder, [row], kind), DataConfig(column_mapping=mapping))
        assert not problems, (name, problems)
        assert record.turns == (Turn("user", "<image>what is it?"), Turn("assistant", "red")), name
        assert members.read(record.images[0]) == png(3), name


def test_rows_with_equal_bytes_share_one_image_also_over_files(tmp_path):
    for i in range(2):
        rows = [asked(f"q{n}", image=cell(n % 2)) for n in range(4)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{i}.parquet")
    records, _ = read(str(tmp_path / "*.parquet"))
    assert len(records) == 8 and len({record.images for record in records}) == 2
    assert len({record.id for record in records}) == 8


def test_several_images_without_placeholders_come_first_in_their_order(tmp_path):
    row = {"images": [cell(1), cell(2)], "texts": [{"user": "a", "assistant": "b"}]}
    (record,), _ = read(written(tmp_path, [row], ".parquet"))
    assert record.turns[0].content == "<image><image>a"
    assert [members.read(path) for path in record.images] == [png(1), png(2)]


def test_a_list_of_objects_that_is_stored_by_columns(tmp_path):
    turns = {"from": ["human", "gpt"], "value": ["hi", "yes"]}
    (record,), _ = read(written(tmp_path, [{"conversations": turns}], ".parquet"))
    assert [turn.content for turn in record.turns] == ["hi", "yes"]
    uneven = {"from": ["human", "gpt"], "value": ["hi"]}
    folder = tmp_path / "x"
    folder.mkdir()
    _, (problem,) = read(written(folder, [{"conversations": uneven}], ".parquet"))
    assert problem.reason == "the conversation is not a list"


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_a_table_that_changed_since_it_was_read_gives_no_other_image(tmp_path, kind):
    spec = written(tmp_path, [asked(image=cell(1))], kind)
    (record,), _ = read(spec)
    assert members.read(record.images[0]) == png(1)
    os.remove(spec)
    with pytest.raises(ValueError, match="is no regular file"):
        members.read(record.images[0])
    written(tmp_path, [asked(image={"bytes": png(1)[:-1], "path": None})], kind)
    with pytest.raises(ValueError, match="the table changed since it was indexed"):
        members.read(record.images[0])
    other = png(1)[:-1] + bytes([png(1)[-1] ^ 1])  # as many bytes, in the same place
    written(tmp_path, [asked(image={"bytes": other, "path": None})], kind)
    with pytest.raises(ValueError, match="the table changed since it was indexed"):
        members.read(record.images[0])
    (again,), _ = read(spec)
    assert members.name_and_size(again.images[0]) != members.name_and_size(record.images[0])
    written(tmp_path, [{"x": 1}], kind)
    with pytest.raises(ValueError, match="the table changed since it was indexed"):
        members.read(record.images[0])


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(max_size=40), st.integers(0, 10**6))
def test_a_name_in_a_record_reads_no_other_bytes(tmp_path, place, size):
    path = tmp_path / "t.parquet"
    if not path.exists():
        parquet.write_table(pyarrow.Table.from_pylist([asked(image=cell(1))]), path)
    name = f"{path}::{place}+{size}::x"
    if parse(name) is None:
        return
    with pytest.raises(ValueError):
        members.read(name)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda f: None, "without the state.json"),
        (lambda f: (f / "state.json").write_text("{"), "can't be read"),
        (lambda f: (f / "state.json").write_text('{"_data_files": 3}'), "can't be read"),
        (lambda f: (f / "state.json").write_text('{"_data_files": []}'), "contains no record"),
        (
            lambda f: (f / "state.json").write_text(
                '{"_data_files": [{"filename": "../x.arrow"}]}'
            ),
            "is no .arrow file there",
        ),
    ],
)
def test_a_folder_that_is_no_data_set_is_named(tmp_path, make, says):
    make(tmp_path)
    with pytest.raises(DataError, match=says):
        read(str(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_text_are_the_text_and_never_their_place(tmp_path, kind):
    rows = [{"question": "é?".encode(), "answer": b"yes", "image": cell(1)}]
    (record,), _ = read(written(tmp_path, rows, kind))
    assert record.turns == (Turn("user", "<image>é?"), Turn("assistant", "yes"))
    for i, bad in enumerate(({"answer": b"\xff\xfe"}, {"id": b"7"})):
        (tmp_path / str(i)).mkdir()
        _, (problem,) = read(written(tmp_path / str(i), [rows[0] | bad], kind))
        assert problem.reason in ("bytes that are not text in UTF-8", NO_ID), problem
    pairs = [{"query": b"a cat", "positive": b"cats", "negatives": [b"dogs"]}]
    (tmp_path / "pairs").mkdir()
    (example,), _ = pair_formats.read(written(tmp_path / "pairs", pairs, kind))
    assert (example.query.text, example.positive.text) == ("a cat", "cats")
    assert example.negatives[0].text == "dogs"


NO_ID = "an id that is neither text nor a number"


def test_a_name_from_any_folder(tmp_path, monkeypatch):
    """A pattern, a file, a folder, a tar and shards, each below the working directory."""
    monkeypatch.chdir(tmp_path)
    inside = tmp_path / "sub"
    inside.mkdir()
    specs = [written(inside, [asked(image=cell(1))], kind) for kind in KINDS]
    write_tar(inside / "t.tar", {"k.png": png(1), "k.txt": b"a cat"})
    (inside / "mds").mkdir()
    columns = {"question": "str", "answer": "str", "image": "png"}
    row = {"question": b"hi", "answer": b"yes", "image": png(1)}
    mds_files.write(inside / "mds" / "a.mds", [row], columns)
    names = [os.path.relpath(spec) for spec in specs]
    for spec in (
        *names,
        "sub/*.parquet",
        "sub/t.tar",
        "sub/mds",
        "../" + tmp_path.name + "/sub/mds",
    ):
        (record,), problems = read(spec)
        assert not problems and members.read(record.images[0]) == png(1), spec


def test_classes_are_their_names(tmp_path):
    """As Hugging Face's ClassLabel, whose names are in the file's metadata."""
    label = {"names": ["cat", "dog"], "_type": "ClassLabel"}
    of_list = {"feature": label, "_type": "List"}
    info = {"info": {"features": {"answer": label, "more": of_list}}}
    table = pyarrow.Table.from_pylist([{"question": "q", "answer": 1, "more": [0]}])
    table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    parquet.write_table(table, tmp_path / "t.parquet")
    (record,), _ = read(str(tmp_path / "t.parquet"), DataConfig(ignored_fields=("more",)))
    assert record.turns[1].content == "dog"
    rounds = {"feature": {"user": {"_type": "Value"}, "assistant": label}, "_type": "Sequence"}
    table = pyarrow.Table.from_pylist([{"texts": {"user": ["a", "b"], "assistant": [1, 0]}}])
    info = {"info": {"features": {"texts": rounds}}}  # stored by columns, until version 4
    table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    parquet.write_table(table, tmp_path / "old.parquet")
    (record,), _ = read(str(tmp_path / "old.parquet"))
    assert [turn.content for turn in record.turns] == ["a", "dog", "b", "cat"]


def test_a_group_is_read_once_by_threads_that_miss_it_together(tmp_path, monkeypatch):
    spec = written(tmp_path, [asked(image=cell(i)) for i in range(3)], ".parquet")
    records, _ = read(spec)
    reads, column, together = [], columnar._Table.column, threading.Barrier(8)

    def counted(self, group, name):
        reads.append(group)
        return column(self, group, name)

    opened = columnar._open
    monkeypatch.setattr(columnar._Table, "column", counted)
    monkeypatch.setattr(columnar, "_open", lambda *key: (together.wait(10), opened(*key))[1])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(members.read, [records[i % 3].images[0] for i in range(8)]))
    assert found == [png(i % 3) for i in range(8)] and len(reads) == 1


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path, kind):
    arrays = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array(["c"])]
    table = pyarrow.Table.from_arrays(arrays, names=["question", "question", "answer"])
    path = tmp_path / f"t{kind}"
    parquet.write_table(table, path) if kind == ".parquet" else write_arrow(path, table)
    with pytest.raises(DataError, match=f"t{kind}: two columns of the name 'question'; rename one"):
        read(str(path))


def test_endings_in_capitals(tmp_path):
    spec = written(tmp_path, [asked(image=cell(1))], ".parquet")
    os.rename(spec, tmp_path / "UP.PARQUET")
    (record,), _ = read(str(tmp_path / "UP.PARQUET"))
    assert members.read(record.images[0]) == png(1)


def test_times_that_python_has_not(tmp_path):
    columns = {
        "created_at": pyarrow.array([2**62, None], pyarrow.timestamp("ns")),
        "timestamp": pyarrow.array([2**62, 0], pyarrow.timestamp("us", tz="UTC")),
        "meta": pyarrow.array([1, 2], pyarrow.duration("ns")),
        "notes": pyarrow.array([1, 2], pyarrow.time64("ns")),
        "question": pyarrow.array(["a", "b"]),
        "answer": pyarrow.array(["c", "d"]),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    records, problems = read(str(tmp_path / "t.parquet"), DataConfig(ignored_fields=("notes",)))
    assert not problems and [r.turns[1].content for r in records] == ["c", "d"]


def test_a_row_that_is_not_utf8_is_named_alone(tmp_path):
    bad = pyarrow.array([b"yes", b"\xff\xfe", b"no"]).cast(pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"question": ["q"] * 3, "answer": bad})
    parquet.write_table(table, tmp_path / "t.parquet")
    records, (problem,) = read(str(tmp_path / "t.parquet"))
    assert [record.turns[1].content for record in records] == ["yes", "no"]
    assert problem.id == "t.parquet[1]" and problem.reason == "not UTF-8"


def test_rounds_stored_by_columns_and_a_file_of_feather(tmp_path):
    row = {"texts": {"user": ["a", "c"], "assistant": ["b", "d"]}, "image": cell(1)}
    table = pyarrow.Table.from_pylist([row])
    with pyarrow.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as file:
        file.write_table(table)
    (record,), _ = read(str(tmp_path / "t.arrow"))
    assert [turn.content for turn in record.turns] == ["<image>a", "b", "c", "d"]
    assert members.read(record.images[0]) == png(1)


def test_of_several_splits_one_has_to_be_given(tmp_path):
    table = pyarrow.Table.from_pylist([asked(image=cell(i)) for i in range(4)])
    for name in ("train", "test"):
        write_saved(tmp_path / name, table)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="has a folder for each split; give one: test, train"):
        read(str(tmp_path))
    assert len(read(str(tmp_path / "train"))[0]) == 4


def test_pairs_take_images_in_cells_too(tmp_path):
    rows = [
        {"query": "a cat", "positive_image": cell(1), "positive": None},
        {"query": "a dog", "positive_image": None, "positive": "dog"},
    ]
    examples, problems = pair_formats.read(written(tmp_path, rows, ".parquet"))
    assert not problems and members.read(examples[0].positive.image) == png(1)
    assert not examples[1].positive.image


def test_batches_of_a_table_are_those_of_the_files(tmp_path, write_json):
    """Bit for bit: tokens, pixels, the order, and which records share an image."""
    rows, files = [], []
    for i in range(30):
        name = f"{i % 10}.png"
        (tmp_path / name).write_bytes(png(20 * (i % 10)))
        files.append(asked(f"is it {i}?", "yes", images=[name], id=str(i)))
        rows.append(asked(f"is it {i}?", "yes", images=[cell(20 * (i % 10))], id=str(i)))
    config = DataConfig(max_length=64, batch_size=2, max_images_per_sequence=2)
    batches = []
    for spec in (write_json(files), *(written(tmp_path, rows, kind) for kind in KINDS)):
        tokenizer = chat_tokenizer.build([f"is it {i}? yes" for i in range(30)])
        data = load_dataset(config, tokenizer, image_size=8, num_patches=4, spec=spec)
        found = data.train(np.arange(2))
        batches.append([next(found)[0] for _ in range(8)])
    for other in batches[1:]:
        for one, two in zip(batches[0], other, strict=True):
            for x, y in zip(one, two, strict=True):
                assert (x is None) == (y is None)
                if x is not None:
                    np.testing.assert_array_equal(x, y)


OTHERS = pathlib.Path(__file__).with_name("written_by_others")


@pytest.mark.parametrize("name", ["saved", "table.parquet", "rounds.parquet", "shard.tar", "mds"])
def test_what_other_libraries_wrote_is_read_as_they_read_it(name):
    """Hugging Face's datasets, webdataset and MosaicML Streaming; make.py and make_mds.py there
    wrote the files, and what they read."""
    lists = [json.loads(path.read_text()) for path in sorted(OTHERS.glob("read*.json"))]
    expected = next(x[name] for x in lists if name in x)
    records, problems = read(str(OTHERS / name))
    assert not problems
    found = [
        ({"id": record.id} if name == "mds" else {})
        | {
            "turns": [[turn.role, turn.content] for turn in record.turns],
            "images": [hashlib.sha256(members.read(path)).hexdigest() for path in record.images],
        }
        for record in records
    ]
    assert found == expected
