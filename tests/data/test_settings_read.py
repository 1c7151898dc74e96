"""A setting of how data are read changes what is read of a format, or is refused by name."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import re
import tarfile

import pytest
from array_record.python import array_record_module

from jaxvlm.cli.main import run as cli
from jaxvlm.config import (
    Config,
    ConfigError,
    DataConfig,
    Extension,
    SourceConfig,
    formats_of,
    refuse_unread_by,
)
from jaxvlm.config.unread import READ_BY, READING
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.data.sources import conversation_formats, pair_formats, tables
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.trainer import checks
from tests.data import mds_files

SET = {
    "image_root": "elsewhere",
    "fetched": "kept",
    "ignored_fields": ("note",),
    "literal_markers": ("<img>",),
    "column_mapping": (("asked", "query"),),
    "tsv_quoting": True,
}
"""Values that :func:`pairs` or :func:`chats` would be read otherwise by."""
CONVERSATIONS = (*tables.READERS, "easy-vqa", "dict", "Record")
PAIRS = (*tables.READERS, "dict", "Example")
GIVEN = {}


def pairs(asked="query"):
    """Pairs that each setting changes: an image, a field, a marker, a column, a quoted cell."""
    rows = [("what is it?", ""), ("is <img> text?", ""), ("what is it?", "x")]
    more = {"query_image": "a.png", "positive": '"yes"'}
    pairs = [{asked: text, **more, "note": note} for text, note in rows]
    return [*pairs, pairs[0] | {"query_image": "http://a.org/b.png"}]


def chats(asked="query"):
    """Conversations that each setting changes."""
    return [
        {asked: row[asked], "image": row["query_image"], "response": '"yes"', "note": row["note"]}
        for row in pairs(asked)
    ]


def write(folder, kind, rows):
    """A file of records; returns its name."""
    path = folder / f"data{kind}"
    if kind in (".json", ".jsonl"):
        path.write_text(json.dumps(rows) if kind == ".json" else "\n".join(map(json.dumps, rows)))
    elif kind == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    elif kind == ".tsv":
        path.write_text("".join("\t".join(x) + "\n" for x in (rows[0], *map(dict.values, rows))))
    elif kind in (".parquet", ".arrow"):
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = pyarrow.Table.from_pylist(rows)
        if kind == ".parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table)
    elif kind == ".mds":
        texts = [{name: str(value).encode() for name, value in row.items()} for row in rows]
        mds_files.write(path, texts, dict.fromkeys(rows[0], "str"))
    elif kind == ".array_record":
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for row in rows:
            writer.write(json.dumps(row).encode())
        writer.close()
    else:
        with tarfile.open(path, "w") as tar:
            for i, row in enumerate(rows):
                data = json.dumps(row).encode()
                info = tarfile.TarInfo(f"{i}.json")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return str(path)


def give(file):
    """A format of the user's own; the file's name says what it gives."""
    kind, asked = file.split(".")[0].split("-")
    texts = ("what is it?", "is <img> text?")
    return {
        "dict": pairs(asked),
        "chat": chats(asked),
        "Record": [
            Record("", (Turn("user", text), Turn("assistant", "y")), (image,))
            for text in texts
            for image in ("a.png", "http://a.org/b.png")
        ],
        "Example": [Example("e", Item("a"), Item("b", "a.png"))],
    }[kind]


def with_set(config, name):
    """``config`` with a setting's value of ``SET``."""
    return dataclasses.replace(config, **{name: SET[name]})


@pytest.fixture
def source(tmp_path, monkeypatch):
    """``source(format, reader, setting)`` -> (settings that name data of the format, its name)."""
    monkeypatch.chdir(tmp_path)
    turns = (Turn("user", "<image>a?"), Turn("assistant", "b"))
    one = [Record("easy-vqa:train/0", turns, ("/package/a.png",))]
    monkeypatch.setitem(conversation_formats.SOURCES, "easy-vqa:train", lambda: one)

    def make(kind, reader, name=""):
        asked = "asked" if name == "column_mapping" else "query"
        is_chat = reader is conversation_formats
        spec, own = "easy-vqa:train", Extension()
        if kind.startswith("."):
            spec = write(tmp_path, kind, chats(asked) if is_chat else pairs(asked))
        elif kind != "easy-vqa":
            spec = f"{'chat' if kind == 'dict' and is_chat else kind}-{asked}.db"
            own = Extension(target=f"{__file__}:give")
        return DataConfig(train=spec, format=own), spec

    return make


def refused(config, spec, reader, name):
    """Whether a run, or the reading of its data, names ``name`` as not read."""
    try:
        refuse_unread_by(config, formats_of(config, spec))
        reader.read(spec, config)
    except ConfigError as error:
        assert re.search(rf"config\.data\.{name}=.* is not read by", str(error)), error
        return True
    return False


@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize(
    ("reader", "kind"),
    [(conversation_formats, kind) for kind in CONVERSATIONS]
    + [(pair_formats, kind) for kind in PAIRS],
    ids=lambda x: x if isinstance(x, str) else x.__name__.rpartition(".")[2],
)
def test_a_setting_is_read_or_refused(source, reader, kind, name):
    config, spec = source(kind, reader, name)
    refuse_unread_by(config, formats_of(config, spec))
    changed = with_set(config, name)
    assert refused(changed, spec, reader, name) == (name not in READ_BY[kind])
    if name in READ_BY[kind]:
        assert reader.read(spec, changed) != reader.read(spec, config)


def leaves(group, path=""):
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Extension):
            yield from leaves(value, f"{path}{field.name}.")
        elif not isinstance(value, Extension):
            yield f"{path}{field.name}", value


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {"another": SourceConfig(train="another")}
    if isinstance(value, tuple):
        return tuple(map(another, value)) or ("another",)
    return value + 1 if isinstance(value, int | float) else f"another {value}"


@pytest.mark.parametrize("reader", [conversation_formats, pair_formats])
def test_no_other_setting_changes_what_is_read(source, reader):
    """So that the table of settings is whole."""
    assert set(SET) == set(READING)
    assert set(READ_BY) == set(CONVERSATIONS) | set(PAIRS)
    config, spec = source(".jsonl", reader)
    before = reader.read(spec, config)
    for name, value in leaves(config):
        if name in (*READING, "train", "eval"):
            continue
        *groups, field = name.split(".")
        group = functools.reduce(getattr, groups, config)
        group = dataclasses.replace(group, **{field: another(value)})
        changed = dataclasses.replace(config, **{groups[0]: group}) if groups else group
        assert reader.read(spec, changed) == before, name


def test_a_run_refuses_what_none_of_its_data_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()

    def check(train, evaluated, **settings):
        checks._check_config(Config(data=DataConfig(train, evaluated, **settings)))

    with pytest.raises(ConfigError, match=r"image_root='x' is not read by data of .* easy-vqa;"):
        check("easy-vqa:train", "easy-vqa:test", image_root="x")
    check("a.jsonl", "easy-vqa:test", image_root="x")
    with pytest.raises(ConfigError, match=r"image_root='y': no such folder"):
        check("a.tar", "", image_root="y")  # also where every image is in the tar
    with pytest.raises(
        ConfigError, match=r"data\.fetched='y': no such folder; `jaxvlm data fetch`"
    ):
        check("a.jsonl", "", fetched="y")
    check("easy-vqa:train", "a.jsonl", ignored_fields=("x",))
    for evaluated, taken in (("b.tsv", True), ("shards/*", True), ("b.csv", False), ("", False)):
        if taken:
            check("a.jsonl", evaluated, tsv_quoting=True)
            continue
        with pytest.raises(ConfigError, match=r"tsv_quoting=True is not read by data of"):
            check("a.jsonl", evaluated, tsv_quoting=True)


def test_commands_refuse_it_too(tmp_path, capsys):
    assert cli(["data", "check", "easy-vqa:test", "--image_root=x"]) == 2
    assert "image_root='x' is not read by data of the format easy-vqa" in capsys.readouterr().err
    out = f"--output={tmp_path / 'x.npy'}"
    for flag in ("--ignored_fields=a", "--literal_markers=<img>", "--data_format=built_in"):
        assert cli(["embed", "--checkpoint=x", "--text=a", out, flag]) == 2
        assert f"{flag.partition('=')[0]} is for --input=FILE" in capsys.readouterr().err
