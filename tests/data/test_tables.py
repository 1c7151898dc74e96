"""Conversations in tables, tars and compressed files say what files of JSON say."""

from __future__ import annotations

import base64
import concurrent.futures
import gzip
import hashlib
import io
import json
import os
import pathlib
import tarfile

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations.run_data import load_dataset
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import members, pair_formats
from jaxvlm.data.sources.conversation_formats import Turn, read
from jaxvlm.data.sources.member_names import parse
from jaxvlm.data.tokenizer import chat_tokenizer
from tests.data import mds_files

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402


def png(value: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 255 - value, value // 2)).save(data, "PNG")
    return data.getvalue()


def cell(value: int, name: str | None = None) -> dict:
    return {"bytes": png(value), "path": name}


def asked(question="what is it?", answer="red", **more):
    return {
        "messages": [
            {"role": "user", "content": f"<image>{question}"},
            {"role": "assistant", "content": answer},
        ],
        **more,
    }


def write_arrow(path, table):
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=3)


def write_saved(folder, table):
    """As ``datasets.Dataset.save_to_disk`` does, in two files."""
    folder.mkdir()
    half = len(table) // 2
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        write_arrow(folder / name, part)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names]})
    )
    (folder / "dataset_info.json").write_text("{}")


def written(folder, rows, kind):
    """The rows as a table of some kind; returns what ``data.train`` names it by."""
    table = pyarrow.Table.from_pylist(rows)
    path = folder / f"table{kind}"
    if kind == ".parquet":
        parquet.write_table(table, path, row_group_size=3)
    elif kind == ".arrow":
        write_arrow(path, table)
    else:
        write_saved(path, table)
    return str(path)


KINDS = [".parquet", ".arrow", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_images_in_cells_are_the_bytes_that_were_written(tmp_path, kind):
    rows = [asked(images=[cell(10 * i, f"{i}.png")]) for i in range(8)]
    records, problems = read(written(tmp_path, rows, kind))
    assert not problems and len(records) == 8
    for i, record in enumerate(records):
        assert record.turns == (Turn("user", "<image>what is it?"), Turn("assistant", "red"))
        assert members.read(record.images[0]) == png(10 * i)
        assert members.name_and_size(record.images[0]) == (f"{i}.png", len(png(10 * i)))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = [record.images[0] for record in records] * 20
        assert list(pool.map(members.read, paths)) == [png(10 * (i % 8)) for i in range(160)]


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


@pytest.mark.parametrize("url", ["gs://bucket/t.parquet", "https://example.com/t.jsonl"])
def test_a_url_is_refused_with_what_helps(url):
    with pytest.raises(DataError, match=r"copy them to this machine, or mount them"):
        read(url)


def test_of_several_splits_one_has_to_be_given(tmp_path):
    table = pyarrow.Table.from_pylist([asked(image=cell(i)) for i in range(4)])
    for name in ("train", "test"):
        write_saved(tmp_path / name, table)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="has a folder for each split; give one: test, train"):
        read(str(tmp_path))
    assert len(read(str(tmp_path / "train"))[0]) == 4


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t.jsonl.gz", "t.jsonl.zst", "t.csv.gz"])
def test_a_damaged_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x1f\x8bPAR1 not at all")
    with pytest.raises(DataError, match=rf"{name}: can't be (read|decompressed)"):
        read(str(tmp_path / name))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv"])
def test_compressed_files_are_those_inside(tmp_path, kind, ending):
    rows = [{"question": f"é {i}", "answer": "yes"} for i in range(5)]
    if kind == ".csv":
        text = "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows)
    else:
        text = json.dumps(rows) if kind == ".json" else "\n".join(map(json.dumps, rows)) + "\n"
    half = len(text) // 2  # two members, as `cat` joins them
    pack = gzip.compress if ending == ".gz" else zstandard.ZstdCompressor().compress
    (tmp_path / f"t{kind}").write_text(text)
    data = pack(text[:half].encode()) + pack(text[half:].encode())
    (tmp_path / f"t{kind}{ending}").write_bytes(data)
    plain, _ = read(str(tmp_path / f"t{kind}"))
    packed, problems = read(str(tmp_path / f"t{kind}{ending}"))
    assert not problems and [r.turns for r in packed] == [r.turns for r in plain]
    assert len(packed) == 5


def test_a_tar_of_webdatasets(tmp_path):
    def add(tar, name, data):
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))

    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        add(tar, "1.jpg", png(1))
        add(tar, "1.txt", b"a cat")
        add(tar, "2.png", png(2))
        add(tar, "2.json", json.dumps(asked()).encode())
        add(tar, "a/3.json", json.dumps(asked(images=["a/3.first.png"])).encode())
        add(tar, "a/3.first.png", png(3))
    records, problems = read(str(tmp_path / "t.tar"))
    assert not problems and [r.turns[-1].content for r in records] == ["a cat", "red", "red"]
    assert records[0].turns[0] == Turn("user", "<image>")
    assert [members.read(r.images[0]) for r in records] == [png(1), png(2), png(3)]


def test_columns_of_any_name(tmp_path):
    (tmp_path / "t.tsv").write_text("prompt\tlabel\tfile\nwhat?\tred\ta.png\n")
    mapping = (("prompt", "question"), ("label", "answer"), ("file", "image"))
    (record,), _ = read(str(tmp_path / "t.tsv"), DataConfig(column_mapping=mapping))
    assert record.turns == (Turn("user", "<image>what?"), Turn("assistant", "red"))
    assert record.images == (str(tmp_path / "a.png"),)
    with pytest.raises(DataError, match="names 'x', which no record has; the columns are file, la"):
        read(str(tmp_path / "t.tsv"), DataConfig(column_mapping=(("x", "question"),)))
    twice = DataConfig(column_mapping=(("prompt", "question"), ("label", "question")))
    _, (problem,) = read(str(tmp_path / "t.tsv"), twice)
    assert problem.reason == "two columns for 'question'"


def test_a_data_uri_is_an_image(write_json):
    uri = f"data:image/png;base64,{base64.b64encode(png(5)).decode()}"
    (record,), problems = read(write_json([asked(images=[{"url": uri}])]))
    assert not problems and members.read(record.images[0]) == png(5)
    part = {"type": "image_url", "image_url": {"url": uri}}
    turns = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [part]}]
    (record,), _ = read(write_json([{"messages": [*turns, {"role": "assistant", "content": "a"}]}]))
    assert [turn.role for turn in record.turns] == ["system", "user", "assistant"]
    for bad in ("data:image/png,x", "data:image/png;base64,***", "data:"):
        with pytest.raises(ValueError, match="not base64"):
            members.read(bad)


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
    config = DataConfig(max_length=64, batch_size=2, max_images_per_sequence=2, virtual_shards=4)
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


@pytest.mark.parametrize(
    ("encoding", "data", "read_as"),
    [
        ("str", "é".encode(), "é"),
        ("json", b"[1]", None),
        ("int", np.int64(-7).tobytes(), "-7"),
        ("uint16", np.uint16(7).tobytes(), "7"),
        ("str_int", b"12", "12"),
        ("str_decimal", b"1.50", "1.50"),
    ],
)
def test_encodings_of_mds(tmp_path, encoding, data, read_as):
    rows = [{"question": b"hi", "answer": data, "image": png(3)}]
    columns = {"question": "str", "answer": encoding, "image": "png"}
    mds_files.write(tmp_path / "shard.00000.mds", rows, columns)
    records, problems = read(str(tmp_path))
    assert [record.turns[1].content for record in records] == [read_as] * (read_as is not None)
    assert len(problems) == (read_as is None)
    for record in records:
        assert members.read(record.images[0]) == png(3)


@pytest.mark.parametrize("encoding", ["pkl", "pil", "ndarray:uint8:2", "unheard"])
def test_mds_runs_no_pickle_and_guesses_no_pixels(tmp_path, encoding):
    rows = [{"question": b"hi", "answer": b"yes", "image": b"cos\nsystem\n"}]
    columns = {"question": "str", "answer": "str", "image": encoding}
    mds_files.write(tmp_path / "a.mds", rows, columns)
    _, (problem,) = read(str(tmp_path))
    assert problem.reason.startswith("a column of MDS in an encoding that jaxvlm does not read")
    assert problem.detail == f"image: {encoding.partition(':')[0]}"


def test_damage_to_mds_is_named(tmp_path):
    columns = {"question": "str", "answer": "str"}
    path = tmp_path / "a.mds"
    mds_files.write(path, [{"question": b"hi", "answer": b"yes"}] * 3, columns)
    good = path.read_bytes()
    assert len(read(str(tmp_path))[0]) == 3
    for bad in (good[:-1], good[:3], b"", b"\xff" * len(good), good + b"x"):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=r"a\.mds: truncated or changed: not the \d+ bytes of"):
            read(str(tmp_path))
    at = good.index(b"hi")
    path.write_bytes(good[: at - 8] + b"\xff\0\0\0" + good[at - 4 :])  # the size of a column
    _, (problem,) = read(str(tmp_path))
    assert problem.reason == "a sample that is damaged" and problem.id == "a.mds[0]"
    path.rename(tmp_path / "a.mds.zstd")
    with pytest.raises(DataError, match=r"is compressed \(a\.mds\.zstd\); decompress it there"):
        read(str(tmp_path))
    (tmp_path / "a.mds.zstd").unlink()
    with pytest.raises(DataError, match=r"a\.mds that index.json names is missing"):
        read(str(tmp_path))
    for index in ("{", "{}", '{"version": 1, "shards": []}', '{"version": 2, "shards": [3]}'):
        (tmp_path / "index.json").write_text(index)
        with pytest.raises(DataError, match=r"index.json: (can't be read as MDS's|not of MDS)"):
            read(str(tmp_path))


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
