"""Many records lie in a temporary file, and are what they would be in memory."""

import gc
import json
import pathlib
import resource
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jaxvlm.config import DataConfig, Extension
from jaxvlm.data import validate
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.errors import DataError
from jaxvlm.data.images import image_files
from jaxvlm.data.sources import conversation_formats, spool
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.data.tokenizer import chat_tokenizer

TEXT = st.text(st.characters(codec="utf-8"))
NAMES = st.binary().map(lambda x: x.decode("utf-8", "surrogateescape"))
TURNS = st.builds(Turn, st.sampled_from(["user", "assistant"]), TEXT, st.booleans(), TEXT, TEXT)
RECORDS = st.builds(
    Record,
    TEXT,
    st.lists(TURNS).map(tuple),
    st.lists(NAMES).map(tuple),
    st.dictionaries(TEXT, TEXT),
)


@given(st.lists(RECORDS, max_size=9), st.integers(0, 9))
def test_what_is_stored_comes_back(records, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "IN_MEMORY", limit)
        kept = conversation_formats.record_spool()
        for record in records:
            kept.add(record)
        found = kept.items()
    assert isinstance(found, list) == (len(records) <= limit)
    del kept  # and its file
    assert list(found) == records and len(found) == len(records)
    assert found[1:-1] == records[1:-1] and found[::-2] == records[::-2]
    for index in (-len(records) - 1, len(records)):
        with pytest.raises(IndexError):
            found[index]
    assert [found[-1 - i] for i in range(len(records))] == records[::-1]


def write(folder, bad=False):
    """40 conversations of two answers about 7 images, some equal."""
    for i in range(7):
        Image.new("RGB", (16, 16), (i, 9, 9)).save(folder / f"{i}.png")
    lines = []
    for i in range(40):
        turns = [
            f"<image>\nwhich {i % 11}?",
            f"it is {i % 5}",
            "sure?",
            "yes" * (not bad or i != 9),
        ]
        roles = ["human", "gpt"] * 2
        said = [{"from": role, "value": text} for role, text in zip(roles, turns, strict=True)]
        lines.append(json.dumps({"id": f"r{i}", "image": f"{i % 7}.png", "conversations": said}))
    lines.insert(5, "{" if bad else "")
    (folder / "d.jsonl").write_text("\n".join(lines))
    return str(folder / "d.jsonl")


def batches(path, turns):
    config = DataConfig(train=path, batch_size=4, max_length=48, loss_turns=turns)
    records, _ = conversation_formats.read(path, config)
    words = chat_tokenizer.build(tokenize.texts(records))
    data = load_dataset(config, words, image_size=16, num_patches=1)
    found = data.train(np.arange(4))
    names = [data.records[i].id for i in data.usable()]
    return [next(found) for _ in range(6)], data.fingerprint(), names


@pytest.mark.parametrize("turns", ["all", "last", "each"])
def test_batches_are_those_of_records_in_memory(tmp_path, monkeypatch, turns):
    path = write(tmp_path)
    before = batches(path, turns)
    monkeypatch.setattr(spool, "IN_MEMORY", 3)
    monkeypatch.setattr("jaxvlm.data.conversations.tokenize._TOKENIZE_BATCH", 4)
    after = batches(path, turns)
    assert not isinstance(conversation_formats.read(path)[0], list)
    assert after[1:] == before[1:]
    for (one, of_one), (two, of_two) in zip(before[0], after[0], strict=True):
        for x, y in zip(one, two, strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_equal(of_one, of_two)


def test_a_check_says_the_same(tmp_path, monkeypatch):
    path = write(tmp_path, bad=True)

    def report():
        config = DataConfig(train=path, on_bad_record="skip")
        return validate.validate(path, config, prepare=image_files.squares(16, "stretch")).to_dict()

    before = report()
    assert before["total"] == 41 and before["good"] == 39
    monkeypatch.setattr(spool, "IN_MEMORY", 3)
    assert report() == before


def descriptors():
    gc.collect()
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    path = write(tmp_path)
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(spool, "IN_MEMORY", 3)
    before, limits = descriptors(), resource.getrlimit(resource.RLIMIT_FSIZE)
    found = conversation_formats.read(path)[0]
    assert len(found) == 40 and not list(folder.iterdir())
    del found
    assert descriptors() == before
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(DataError, match=rf"{folder}: File too large.*set TMPDIR to a folder"):
            conversation_formats.read(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert descriptors() == before and not list(folder.iterdir())


@pytest.mark.parametrize("where", ["missing", "file"])
def test_a_tmpdir_that_can_not_be_used_is_said(tmp_path, monkeypatch, where):
    path = write(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(spool, "IN_MEMORY", 3)
    monkeypatch.setenv("TMPDIR", str(tmp_path / where))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(DataError, match=rf"{tmp_path}.*set TMPDIR to a folder"):
        conversation_formats.read(path)


def test_no_folder_for_temporary_files_is_said(tmp_path, monkeypatch):
    path = write(tmp_path)
    monkeypatch.setattr(spool, "IN_MEMORY", 3)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with pytest.raises(DataError, match=r"No usable temporary directory.*set TMPDIR"):
        conversation_formats.read(path)


@pytest.mark.parametrize("many", [False, True])
def test_records_of_a_users_format_are_the_same_however_many(tmp_path, monkeypatch, many):
    (tmp_path / "own.py").write_text(READER)
    if many:
        monkeypatch.setattr(spool, "IN_MEMORY", 1)
    config = DataConfig(format=Extension(target=f"{tmp_path / 'own.py'}:read"))
    records, problems = conversation_formats.read("x", config)
    asked = Turn("user", "a?")
    assert list(records) == [
        Record("7", (asked, Turn("assistant", "b")), (), {"kind": "c"}),
        Record("x[1]", (asked, Turn("assistant", "b", False), Turn("assistant", "c")), (), {}),
    ]
    assert [problem.reason for problem in problems] == ["tags that are not text"] * 2


READER = """
import types
import numpy as np
from jaxvlm.data.sources.conversation_formats import Record, Turn

def read(spec):
    said = (Turn("user", "a?"), Turn("assistant", "b"))
    yield Record(7, said, (), types.MappingProxyType({"kind": np.str_("c")}))
    yield Record("", (said[0], Turn("assistant", "b", np.bool_(False)), Turn("assistant", "c")), ())
    yield Record("number", said, (), {"level": np.int64(3)})
    yield Record("key", said, (), {None: "x"})
"""
