"""A file whose records belong to several parts of a data set, or to another than is meant."""

import json

import pytest
from PIL import Image

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import conversation_formats, pair_formats
from jaxvlm.inference import zero_shot

KINDS = ("conversations", "pairs", "classes")


def read(kind, spec, **data):
    reader = {
        "conversations": conversation_formats.read,
        "pairs": pair_formats.read,
        "classes": zero_shot.read,
    }[kind]
    return reader(str(spec), DataConfig(**{name: str(x) for name, x in data.items()}))


def write(kind, path, splits):
    """A file of a record for each of ``splits``; ``None``: without the field."""
    rows = []
    for i, split in enumerate(splits):
        turns = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}"}]
        row = {
            "conversations": {"messages": turns},
            "pairs": {"query": f"{i}?", "positive": f"{i}"},
            "classes": {"image": "a.png", "label": "red"},
        }[kind]
        rows.append(row | ({} if split is None else {"split": split}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Image.new("RGB", (4, 4)).save(path.parent / "a.png")
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("splits", "says"),
    [
        (["train"] * 3 + ["test"], r"several splits: 'train' \(3\), 'test' \(1\); keep those"),
        ([None, "train", "train", "validation", ""], r"'train' \(2\), 'validation' \(1\)"),
        ([1, 2, 2], r"'2' \(2\), '1' \(1\)"),
        (["a", "b", "c", "d", "e", "f"], r"'e' \(1\), \.\.\.; keep those"),
        ([["train"], {"x": 1}], r"\['train'\]"),
    ],
)
def test_a_file_of_several_splits_is_refused(kind, splits, says, tmp_path):
    path = write(kind, tmp_path / "data.jsonl", splits)
    with pytest.raises(DataError, match=says):
        read(kind, path)
    assert read_all(kind, path) == len(splits)


def read_all(kind, path):
    """The number of records that the documented way out reads."""
    config = DataConfig(train=str(path), ignored_fields=("split",))
    reader = {"conversations": conversation_formats, "pairs": pair_formats, "classes": zero_shot}
    return len(reader[kind].read(str(path), config)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["test", "Validation", "dev", " val "])
def test_training_on_what_is_for_evaluation_is_refused(kind, split, tmp_path):
    path = write(kind, tmp_path / "data.jsonl", [split] * 2)
    with pytest.raises(DataError, match=r"data\.train, but its split is '.*'.*ignored_fields"):
        read(kind, path, train=path)
    assert len(read(kind, path, train="other.jsonl", eval=path)[0]) == 2
    assert read_all(kind, path) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_evaluating_what_was_trained_on_is_refused(kind, tmp_path):
    path = write(kind, tmp_path / "data.jsonl", ["train"] * 2)
    with pytest.raises(DataError, match=r"is data\.eval, but its split is 'train'"):
        read(kind, path, train="other.jsonl", eval=path)
    for data in ({"train": path}, {"train": path, "eval": path}, {}):
        assert len(read(kind, path, **data)[0]) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["a", "2014", None, ""])
def test_one_split_of_any_other_name_is_read(kind, split, tmp_path):
    path = write(kind, tmp_path / "data.jsonl", [split, split, None])
    for data in ({"train": path}, {"train": "x", "eval": path}):
        assert len(read(kind, path, **data)[0]) == 3


def test_files_of_a_pattern_are_counted_together(tmp_path):
    for split in ("train", "test"):
        write("pairs", tmp_path / f"{split}.jsonl", [split] * 2)
    with pytest.raises(DataError, match=r"\*\.jsonl: records of several splits"):
        pair_formats.read(str(tmp_path / "*.jsonl"))
    assert len(pair_formats.read(str(tmp_path / "train.jsonl"))[0]) == 2
