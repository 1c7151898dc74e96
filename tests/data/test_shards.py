"""Conversations in tar and MDS shards, compressed files, CSV and data: URIs."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile

import numpy as np
import pytest
import zstandard

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import members
from jaxvlm.data.sources.conversation_formats import Turn, read
from tests.data import mds_files
from tests.data.table_files import asked, png


def test_a_tars_image_stays_where_another_field_has_its_name(tmp_path):
    rows = [
        {"id": "k0.png", "question": "q", "answer": "a"},
        {"metadata": {"file": "k1.png"}, "question": "q", "answer": "k1.png"},
        {"image": "k2.png", "question": "q", "answer": "a"},
        {"messages": [
            {"role": "user", "content": [{"type": "image", "path": "k3.png"}]},
            {"role": "assistant", "content": "a"}]},
    ]  # fmt: skip
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for i, row in enumerate(rows):
            for name, data in ((f"k{i}.png", png(i)), (f"k{i}.json", json.dumps(row).encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    records, problems = read(str(tmp_path / "t.tar"))
    assert not problems
    assert [members.read(path) for r in records for path in r.images] == [png(i) for i in range(4)]


@pytest.mark.parametrize("name", ["t.parquet.gz", "t.arrow.zst", "t.mds.gz"])
def test_tables_are_not_compressed_as_a_whole(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=r"not a file of records; give one of \.json"):
        read(str(tmp_path / name))


@pytest.mark.parametrize("url", ["gs://bucket/t.parquet", "https://example.com/t.jsonl"])
def test_a_url_is_refused_with_what_helps(url):
    with pytest.raises(DataError, match=r"copy them to this machine, or mount them"):
        read(url)


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
