"""Packed sets that were damaged: named by `data verify`, and never trained on."""

import io
import json
import pathlib
import tarfile

import numpy as np
import pytest
from PIL import Image

from jaxvlm.cli.main import run
from jaxvlm.data.errors import DataError
from jaxvlm.data.packed import packed_files
from jaxvlm.data.sources import members
from tests.data.stored_sets import SIZES, any_size, harmless, of_files, opened, packed
from tests.data.test_dataset import assert_equal, take


def test_every_changed_byte_is_found(album, word_tokenizer, tmp_path, capsys):
    folder = pathlib.Path(packed(of_files(album(), word_tokenizer, SIZES), tmp_path / "set"))
    assert run(["data", "verify", str(folder)]) == 0
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "packed.json"]
    assert len(files) > 30
    for number, path in enumerate(sorted(files)):
        whole = path.read_bytes()
        at = number * 7919 % max(len(whole), 1)
        for changed in (whole[:-1], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            path.write_bytes(changed)
            assert dict(packed_files.damaged(str(folder))).keys() == {str(path.relative_to(folder))}
        path.unlink()
        assert dict(packed_files.damaged(str(folder))) == {str(path.relative_to(folder)): "missing"}
        with pytest.raises(DataError, match=r"is missing, and .* bytes were packed"):
            opened(str(folder), word_tokenizer, SIZES)
        path.write_bytes(whole[:-1])
        with pytest.raises(DataError, match="bytes were packed"):
            opened(str(folder), word_tokenizer, SIZES)
        path.write_bytes(whole)
    index = folder / "packed.json"
    text = index.read_text()
    for changed in (text[:-9], text.replace('"records": ', '"records": 1'), "[]", "{}"):
        index.write_text(changed)
        assert run(["data", "verify", str(folder)]) == 2
        assert "packed.json is damaged" in capsys.readouterr().err
    document = json.loads(text)
    document["index"]["format"] = 99
    document["digest"] = packed_files.digest_of(document["index"])
    index.write_text(json.dumps(document))
    assert run(["data", "verify", str(folder)]) == 2
    assert "of format 99, and this jaxvlm reads 1" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [2, 8], ids=["", "more rows than sequences"])
def test_nothing_damaged_is_trained_on(ragged, qwen, word_tokenizer, tmp_path, rows):
    """A changed number in any array ends the run, or changes no batch."""
    sizes = any_size(qwen, word_tokenizer)
    more = {"batch_size": rows, "max_length": 96, "max_skip_fraction": 0.0}
    data = of_files([*ragged, *ragged[:4]], word_tokenizer, sizes, **more)
    folder = pathlib.Path(packed(data, tmp_path / "set"))
    whole = take(data.train(np.arange(rows)), 2 * data.steps_per_epoch)

    def batches():
        again = opened(str(folder), word_tokenizer, sizes, **more)
        given = take(again.train(np.arange(rows)), len(whole))
        for ours, theirs in zip(given, whole, strict=True):
            assert_equal(ours, theirs)

    # Ids are for messages, and the others are of records: batches are made of pieces.
    assert harmless(folder, tmp_path / "kept", batches) <= {
        "id", "id_start", "source", "length", "first", "last", "images_of_record",
        "images_of_record_start", "span_lead", "span_lead_start", "span_weight", "span_weight_end",
        "span_feature", "span_feature_end", "span_per_tile",
    }  # fmt: skip


def test_a_damaged_image_is_skipped_and_named(album, word_tokenizer, tmp_path):
    """Also one that still can be decoded, as another image."""
    data = of_files(album(20), word_tokenizer, SIZES)
    folder = packed(data, tmp_path / "set", 10**6)
    (shard,) = pathlib.Path(folder).glob("*.tar")
    with tarfile.open(shard) as tar:
        first = tar.getmembers()[0]
    whole = shard.read_bytes()
    changed = io.BytesIO()
    Image.new("RGB", (24, 16), (1, 2, 3)).save(changed, "PNG")
    with shard.open("r+b") as file:
        file.seek(first.offset_data)
        file.write(changed.getvalue().ljust(first.size, b"\0")[: first.size])
    assert shard.stat().st_size == len(whole)
    again = opened(folder, word_tokenizer, SIZES)
    take(again.train(np.arange(8)), again.steps_per_epoch)
    (reason,) = {problem.reason for problem in again.skipped}
    assert reason == "can't be read: its bytes are not those that were packed"
    lost = {problem.id for problem in again.skipped}
    i = next(
        i
        for i in range(len(again.corpus.paths))
        if f"::{first.offset_data}+" in again.corpus.paths[i]
    )
    assert lost and len(lost) < len(data.records)
    with pytest.raises(ValueError, match="not those that were packed"):
        members.read(again.corpus.paths[i])
    index = pathlib.Path(folder) / "packed.json"
    document = json.loads(index.read_text())
    document["index"]["made_for"]["data.on_bad_record"] = "refuse"  # as if it were packed so
    document["digest"] = packed_files.digest_of(document["index"])
    index.write_text(json.dumps(document))
    with pytest.raises(DataError, match="can't be used"):
        take(opened(folder, word_tokenizer, SIZES, on_bad_record="refuse").train(np.arange(8)), 20)
