"""Conversations in tar and MDS shards, compressed files, CSV and data: URIs."""

from __future__ import annotations

import base64
import gzip
import json
import tarfile

import numpy as np
import pytest
import zstandard

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import members, pair_formats
from jaxvlm.data.sources.conversation_formats import Turn, read
from jaxvlm.data.sources.member_names import Member, parse
from tests.data import mds_files
from tests.data.table_files import asked, png, write_tar


def test_a_tars_image_stays_where_another_field_has_its_name(tmp_path):
    rows = [
        {"id": "k0.png", "question": "q", "answer": "a"},
        {"metadata": {"file": "k1.png"}, "question": "q", "answer": "k1.png"},
        {"image": "k2.png", "question": "q", "answer": "a"},
        {"messages": [
            {"role": "user", "content": [{"type": "image", "path": "k3.png"}]},
            {"role": "assistant", "content": "a"}]},
    ]  # fmt: skip
    files = {}
    for i, row in enumerate(rows):
        files |= {f"k{i}.png": png(i), f"k{i}.json": json.dumps(row).encode()}
    write_tar(tmp_path / "t.tar", files)
    records, problems = read(str(tmp_path / "t.tar"))
    assert not problems
    assert [members.read(path) for r in records for path in r.images] == [png(i) for i in range(4)]


@pytest.mark.parametrize("name", ["t.parquet.gz", "t.arrow.zst", "t.mds.gz"])
def test_tables_are_not_compressed_as_a_whole(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=r"not a file of records; give one of \.json"):
        read(str(tmp_path / name))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/folder", "Copy other data to this machine, or mount them"),
        ("ftp://example.com/t.jsonl", "are supported; mount another one"),
        ("https:///t.jsonl", "name a folder in a bucket"),
    ],
)
def test_a_url_is_refused_with_what_helps(url, says):
    with pytest.raises(DataError, match=says):
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


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_file_that_was_cut_off_is_no_shorter_one(tmp_path, ending, parts):
    pack = gzip.compress if ending == ".gz" else zstandard.ZstdCompressor().compress
    lines = [json.dumps({"question": f"é {i}", "answer": "yes"}) + "\n" for i in range(400)]
    size = len(lines) // parts
    each = [pack("".join(lines[i : i + size]).encode()) for i in range(0, len(lines), size)]
    data, ends = b"".join(each), np.cumsum([0, *map(len, each)]).tolist()
    path = tmp_path / f"t.jsonl{ending}"
    path.write_bytes(data)
    assert len(read(str(path))[0]) == len(lines)
    for cut in (1, 4, len(data) // 2, ends[-2] + 1, len(data) - 5, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(DataError, match=r"t\.jsonl\..*: can't be decompressed"):
            read(str(path))
    path.write_bytes(data + b"more")
    with pytest.raises(DataError, match="can't be decompressed"):
        read(str(path))


def tar_of(count, folder):
    files = {}
    for i in range(count):
        files |= {f"{i}.json": json.dumps(asked(images=[f"{i}.png"])).encode(), f"{i}.png": png(i)}
    write_tar(folder / "t.tar", files)
    return folder / "t.tar"


@pytest.mark.parametrize(
    "change",
    [
        lambda data, head: data[:head] + b"\xff" + data[head + 1 :],  # a header's first byte
        lambda data, head: data[: head + 150] + b"9" + data[head + 151 :],  # its checksum
        lambda data, head: data[:head] + bytes(512) + data[head + 512 :],
        lambda data, head: data[:head] + bytes(1536) + data[head + 1536 :],  # a hole
        lambda data, head: data[:head],  # between two records
        lambda data, head: data[: head + 100],
        lambda data, head: data + data,
        lambda data, head: data + b"more",
        lambda data, head: data.rstrip(b"\0"),
    ],
)
@pytest.mark.parametrize("member", ["5.json", "5.png"])
def test_a_tar_that_is_not_whole_is_refused(tmp_path, change, member):
    path = tar_of(9, tmp_path)
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        head = tar.getmember(member).offset
    path.write_bytes(change(data, head))
    with pytest.raises(
        DataError, match=r"t\.tar: .*(tar has no end|neither a header|can't be read)"
    ):
        read(str(path))
    for size in (1024, 512, 40960):  # ends of any length are read
        path.write_bytes(data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512 + size))
        assert len(read(str(path))[0]) == 9


def test_a_frame_with_a_long_window_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    line = json.dumps({"question": "a?", "answer": "b"}).encode()
    (tmp_path / "t.jsonl.zst").write_bytes(writer.compress(line) + writer.flush())
    assert len(read(str(tmp_path / "t.jsonl.zst"))[0]) == 1


def test_a_tar_of_webdatasets(tmp_path):
    files = {
        "1.jpg": png(1), "1.txt": b"a cat",
        "2.png": png(2), "2.json": json.dumps(asked()).encode(),
        "a/3.json": json.dumps(asked(images=["a/3.first.png"])).encode(), "a/3.first.png": png(3),
    }  # fmt: skip
    write_tar(tmp_path / "t.tar", files)
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


def test_cells_of_text_that_look_like_json_stay_text(tmp_path):
    (tmp_path / "t.csv").write_text(
        'instruction,input,output\nIs it JSON?,{},"[1, 2]"\n"[x]",,"{""a"": 1}"\n'
    )
    records, problems = read(str(tmp_path / "t.csv"))
    assert not problems
    assert [[turn.content for turn in record.turns] for record in records] == [
        ["Is it JSON?\n{}", "[1, 2]"], ["[x]", '{"a": 1}'],
    ]  # fmt: skip
    (tmp_path / "m.csv").write_text('asked,told,turns\n"[1]","{}",\n')
    mapping = (("asked", "question"), ("told", "answer"))
    (record,), _ = read(str(tmp_path / "m.csv"), DataConfig(column_mapping=mapping))
    assert [turn.content for turn in record.turns] == ["[1]", "{}"]
    turns = json.dumps(asked("q", "a")["messages"]).replace('"', '""')
    (tmp_path / "l.csv").write_text(f'messages,image\n"{turns}",a.png\n')
    (record,), _ = read(str(tmp_path / "l.csv"))
    assert record.turns[0].content == "<image>q", "lists are still read"


@pytest.mark.parametrize(
    "empty", [{"caption": ""}, {"query": "", "response": "", "history": []}, {"question": ""}]
)
def test_empty_fields_of_other_formats_are_as_good_as_none(write_json, empty):
    (record,), problems = read(write_json([asked("q", "a", image="b.png", jpg="") | empty]))
    assert not problems and [turn.content for turn in record.turns] == ["<image>q", "a"]
    _, (problem,) = read(write_json([asked("q", "a", image="b.png", caption="a cat")]))
    assert problem.reason == "both 'messages' and 'caption'; which one is meant?"


def test_a_caption_answers_an_image(write_json):
    (record,), _ = read(write_json([{"caption": "a cat", "image": "a.png"}]))
    assert [turn.content for turn in record.turns] == ["<image>", "a cat"]
    _, (problem,) = read(write_json([{"caption": "a cat"}]))
    assert problem.reason == "a caption without an image"


@pytest.mark.parametrize("reader", [read, pair_formats.read])
def test_a_tars_columns_are_renamed_before_images_are_looked_for(tmp_path, reader):
    row = {"pic": "0.jpg", "asked": "a cat", "told": "yes", "caption": "a cat"}
    write_tar(tmp_path / "t.tar", {"0.json": json.dumps(row).encode(), "0.jpg": png(1)})
    mapping = (("pic", "image"), ("asked", "question"), ("told", "answer"))
    if reader is pair_formats.read:
        mapping = (("pic", "query_image"), ("asked", "query"), ("told", "positive"))
    config = DataConfig(column_mapping=mapping, ignored_fields=("caption",))
    (found,), problems = reader(str(tmp_path / "t.tar"), config)
    assert not problems
    image = found.images[0] if reader is read else found.query.image
    assert members.read(image) == png(1)


def test_a_tar_whose_json_repeats_its_text(tmp_path):
    """As img2dataset's."""
    row = {"caption": "a cat", "key": "0", "status": "success"}
    files = {"0.json": json.dumps(row).encode(), "0.jpg": png(1), "0.txt": b"a cat"}
    write_tar(tmp_path / "t.tar", files)
    (record,), problems = read(
        str(tmp_path / "t.tar"), DataConfig(ignored_fields=("key", "status"))
    )
    assert not problems and record.turns[1].content == "a cat"


def test_a_column_of_mds_that_is_ignored_need_not_be_readable(tmp_path):
    rows = [{"question": b"hi", "answer": b"yes", "more": b"?"}]
    columns = {"question": "str", "answer": "str", "more": "pkl"}
    mds_files.write(tmp_path / "a.mds", rows, columns)
    (record,), problems = read(str(tmp_path), DataConfig(ignored_fields=("more",)))
    assert not problems and record.turns[1].content == "yes"


def test_names_of_members():
    """Of runs that go on with a tar, and of a cell whose own path looks like a member's."""
    assert members.name_and_size("/d/s.tar::512+10::x.jpg") == ("s.tar::512+10::x.jpg", 10)
    assert members.name_and_size("/d/s.tar::512+10::a/x.jpg") == ("x.jpg", 10)
    cell = Member("/d/t.parquet", "0.1/image/bytes", 5, "x.tar::1+2::y", "ab12")
    assert parse(str(cell)) == cell
    assert parse("/d::e/t.parquet::0.1/image/bytes+5::x").file == "/d::e/t.parquet"
