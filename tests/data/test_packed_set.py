"""Packed sets: batches as from files, any split and step; damage and other settings are named."""

import dataclasses
import io
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
from PIL import Image

from jaxvlm.cli.main import run
from jaxvlm.config import DataConfig
from jaxvlm.data.conversations import packed_set, packing
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.conversations.mapped_arrays import Groups, Spans, Strings, flat
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.images import image_files
from jaxvlm.data.sources import members
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf.families import anyres, qwen_vl
from jaxvlm.types import Sources, Span
from tests.data.conftest import record
from tests.data.test_dataset import assert_equal, take
from tests.data.test_patches import qwen, ragged, span_of  # noqa: F401

BASE = DataConfig(
    batch_size=8, max_length=64, max_images_per_sequence=3, max_skip_fraction=0.5, prefetch=1
)
SIZES = {"image_size": 8, "num_patches": 4}


def of_files(records, tokenizer, sizes, **more):
    config = dataclasses.replace(BASE, **more)
    return load_dataset(config, tokenizer, read=(records, []), **sizes)


def packed(data, folder, shard_bytes=2000):
    """What ``data pack`` writes of a data set."""
    with packed_set.new_folder(str(folder)) as partial:
        made = packed_set.made_for(data.config, data.settings, data.tokenizer)
        packed_set.write(partial, data.content, made, data.tokenizer, data.config, shard_bytes)
    return str(folder)


def opened(folder, tokenizer, sizes, **more):
    return load_dataset(dataclasses.replace(BASE, **more), tokenizer, spec=folder, **sizes)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"packing": False},
        {"share_images": False, "flip": True, "max_shift": 2},
        {"max_length": 24, "on_too_long": "skip"},
        {"loss_turns": "each"},
    ],
    ids=str,
)
def test_batches_are_those_of_the_files(album, word_tokenizer, tmp_path, more):
    """From one process, two and eight, from any step, at another batch size and seed."""
    records = [
        *album(20),
        record("long", [], "is it a circle " * 8),
        record("none", ["missing.png"]),
    ]
    data = of_files(records, word_tokenizer, SIZES, **more)
    folder = packed(data, tmp_path / "set")
    for name in {
        path for images in data.corpus.images for i in images for path in [data.corpus.paths[i]]
    }:
        os.remove(name)  # the set has them
    again = opened(folder, word_tokenizer, SIZES, **more)
    assert again.fingerprint() == data.fingerprint()
    assert len(list(pathlib.Path(folder).glob("images-*.tar"))) > 1
    copy = packed_copy(folder, tmp_path)
    whole = take(again.train(np.arange(8)), 12)
    for parts in ([range(2 * i, 2 * i + 2) for i in range(4)], [[i] for i in range(8)]):
        for rows in parts:
            own = opened(copy, word_tokenizer, SIZES, **more).train(np.asarray(rows), 5)
            for step, part in enumerate(take(own, 3), 5):
                assert_equal(
                    part, type(part)(*(v if v is None else v[list(rows)] for v in whole[step]))
                )


def packed_copy(folder, tmp_path):
    """A set may be moved."""
    return str(shutil.copytree(folder, tmp_path / "elsewhere" / "moved"))


def test_files_and_set_give_the_same_bits(album, word_tokenizer, tmp_path):
    records = album(20)
    data = of_files(records, word_tokenizer, SIZES)
    folder = packed(data, tmp_path / "set")
    for more in ({}, {"batch_size": 3}, {"batch_size": 20}, {"workers": 3}):
        for seed in (0, 5):
            files = of_files(records, word_tokenizer, SIZES | {"seed": seed}, **more)
            again = opened(folder, word_tokenizer, SIZES | {"seed": seed}, **more)
            rows = np.arange(files.config.batch_size)
            for ours, theirs in zip(
                take(again.train(rows, 3), 9), take(files.train(rows, 3), 9), strict=True
            ):
                assert_equal(ours, theirs)
            assert again.steps_per_epoch == files.steps_per_epoch
            assert again.sequence_shapes == files.sequence_shapes


@pytest.mark.parametrize("more", [{}, {"packing": False}, {"max_patches_per_sequence": 80}])
def test_images_of_any_size(ragged, qwen, word_tokenizer, tmp_path, more):  # noqa: F811
    images = image_files.ImageFormat(qwen.prepare, 0, span_of(word_tokenizer), False, qwen.patching)
    sizes = {"image_size": 0, "num_patches": images.of_file, "prepare": images.prepare}
    sizes["patching"] = images.patching
    more = {"batch_size": 2, "max_length": 96} | more
    data = of_files(ragged, word_tokenizer, sizes, **more)
    again = opened(packed(data, tmp_path / "set"), word_tokenizer, sizes, **more)
    rows = np.arange(2)
    for ours, theirs in zip(take(again.train(rows), 6), take(data.train(rows), 6), strict=True):
        assert_equal(ours, theirs)


def spans():
    """One of each kind: of one size, of tiles, of grids, of features anywhere, with a lead."""
    ids = np.asarray([7, 3, 3, 9], np.int32)
    tile, positions = np.asarray([0, 1, 1, 0], np.int32), np.arange(12, dtype=np.int32)
    feature = np.asarray([[-1, -1], [0, 3], [2, -1], [-1, -1]], np.int32)
    weight = np.linspace(0, 1, 8, dtype=np.float32).reshape(4, 2)
    other = Span(ids, tile, positions.reshape(3, 4), 9, Sources(feature, weight, 2, 4), "size: ")
    bare = other._replace(sources=Sources(feature[:, :1], None, 1, 4), lead="")
    return [
        Span.of(3, 5), Span.of_tiles([1, 3, 2, 3], 3, 4), qwen_vl.grid_span(3, (1, 2, 3)),
        other, bare, anyres.whole(3, 2), Span.of(3, 0),
    ]  # fmt: skip


def test_spans_come_back():
    made = spans()
    given = [made[i % len(made)] for i in (3, 0, 1, 2, 3, 4, 5, 6, 0)]
    arrays = Spans.arrays(given)
    assert len(arrays["span_advance"]) == len(made)
    found = Spans(arrays.__getitem__)
    assert len(found) == len(given)
    for ours, theirs in zip(found, given, strict=True):
        for name in ("ids", "tile", "positions", "starts"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert (ours.advance, ours.lead) == (theirs.advance, theirs.lead)
        assert (ours.sources is None) == (theirs.sources is None)
        for x, y in zip(ours.sources or (), theirs.sources or (), strict=True):
            np.testing.assert_array_equal(x, y)


@hypothesis.given(
    st.lists(st.text() | st.just("caf\udce9.png")), st.lists(st.lists(st.integers(0, 2**40)))
)
def test_lists_come_back(texts, groups):
    arrays = flat("a", texts) | flat("b", groups)
    assert list(Strings(arrays["a_start"], arrays["a"].astype(np.uint8))) == texts
    assert list(Groups(arrays["b_start"], arrays["b"])) == [tuple(x) for x in groups]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_length": 65}, "data.max_length 64 -> 65"),
        ({"share_images": False}, "data.share_images True -> False"),
        ({"packing": False}, "data.packing True -> False"),
        ({"max_images_per_sequence": 2}, "data.max_images_per_sequence 3 -> 2"),
        ({"loss_turns": "last"}, "data.loss_turns 'all' -> 'last'"),
        ({"max_pixels": 10**6}, "data.max_pixels .* -> 1000000"),
        ({"on_too_long": "skip"}, "data.on_too_long 'refuse' -> 'skip'"),
        ({"image_root": "x"}, "data.image_root is not read"),
        ({"column_mapping": (("a", "b"),)}, "data.column_mapping is not read"),
    ],
    ids=str,
)
def test_other_settings_are_named(album, word_tokenizer, tmp_path, more, named):
    folder = packed(of_files(album(), word_tokenizer, SIZES), tmp_path / "set")
    with pytest.raises(DataError, match=named):
        opened(folder, word_tokenizer, SIZES, **more)


def test_another_model_is_named(album, word_tokenizer, tmp_path):
    folder = packed(of_files(album(), word_tokenizer, SIZES), tmp_path / "set")
    for sizes, named in (
        (SIZES | {"image_size": 16}, "image_size 8 -> 16"),
        (SIZES | {"visual_mask": "prefix"}, "visual_mask 'causal' -> 'prefix'"),
        (SIZES | {"num_patches": 9}, "image_tokens 4 -> 9"),
        (SIZES | {"num_patches": lambda path: 9}, "image_tokens 4 -> 0"),
    ):
        with pytest.raises(DataError, match=named):
            opened(folder, word_tokenizer, sizes)
    other = chat_tokenizer.build(["what color is the shape? red is it a circle blue"])
    with pytest.raises(DataError, match="tokenizer '"):
        opened(folder, other, SIZES)


@pytest.mark.parametrize("change", ["positions", "advance", "ids", "lead"])
def test_other_tokens_of_images_are_named(album, word_tokenizer, tmp_path, change):
    """Also where the first records have no image."""
    plain = Span.of(word_tokenizer.image_id, 4)
    sizes = {"image_size": 8, "num_patches": lambda path: plain}
    records = [*(record(f"t{i}", [], "is it") for i in range(20)), *album(20)]
    folder = packed(of_files(records, word_tokenizer, sizes), tmp_path / "set")
    opened(folder, word_tokenizer, sizes)
    value = {
        "positions": plain.positions + 1,
        "advance": 2,
        "ids": plain.ids[::-1] + 1,
        "lead": "x",
    }
    other = plain._replace(**{change: value[change]})
    with pytest.raises(DataError, match=r"has 4 tokens there, and in this model 4, or others"):
        opened(folder, word_tokenizer, sizes | {"num_patches": lambda path: other})


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_a_saved_tokenizer_is_the_same_one_and_a_changed_one_is_not(kind, tmp_path):
    built = chat_tokenizer.build(["what color is the shape? red", "é à 世界"], kind, 400)
    built.save(tmp_path)
    digest = packed_set.tokenizer_digest(built)
    assert packed_set.tokenizer_digest(chat_tokenizer.load(tmp_path)) == digest
    for change in ("template", "special", "style", "added", "normalizer"):
        read = chat_tokenizer.load(tmp_path)
        if change == "template":
            read.template += " "
        elif change == "special":
            read.special["bos_token"] = "<user>"
        elif change == "style":
            read.style = read.style._replace(**{read.style._fields[0]: "other"})
        elif change == "added":
            read.backend.add_special_tokens([tokenizers.AddedToken("<user>", rstrip=True)])
        else:
            read.backend.normalizer = tokenizers.normalizers.Lowercase()
            read.backend.normalizer = tokenizers.normalizers.NFD()
        assert packed_set.tokenizer_digest(read) != digest, change


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
            assert dict(packed_set.damaged(str(folder))).keys() == {str(path.relative_to(folder))}
        path.unlink()
        assert dict(packed_set.damaged(str(folder))) == {str(path.relative_to(folder)): "missing"}
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
    document["digest"] = packed_set._digest_of(document["index"])
    index.write_text(json.dumps(document))
    assert run(["data", "verify", str(folder)]) == 2
    assert "of format 99, and this jaxvlm reads 1" in capsys.readouterr().err


def test_nothing_damaged_is_trained_on(ragged, qwen, word_tokenizer, tmp_path):  # noqa: F811
    """A changed number in any array ends the run, or changes no batch."""
    images = image_files.ImageFormat(qwen.prepare, 0, span_of(word_tokenizer), False, qwen.patching)
    sizes = {"image_size": 0, "num_patches": images.of_file, "prepare": images.prepare}
    sizes["patching"] = images.patching
    more = {"batch_size": 2, "max_length": 96, "max_skip_fraction": 0.0}
    data = of_files([*ragged, *ragged[:4]], word_tokenizer, sizes, **more)
    folder = pathlib.Path(packed(data, tmp_path / "set"))
    whole = take(data.train(np.arange(2)), 2 * data.steps_per_epoch)
    named, every = set(), set()
    for path in sorted(folder.glob("*.npy")):
        every.add(path.stem)
        kept = path.read_bytes()
        size = len(np.load(path))
        for place in {0, size // 2, size - 1} if size else ():
            array = np.load(path, mmap_mode="r+")
            array[place] = not array[place] if array.dtype == bool else array[place] + 1
            array.flush()
            try:
                again = opened(str(folder), word_tokenizer, sizes, **more)
                for ours, theirs in zip(take(again.train(np.arange(2)), len(whole)), whole):
                    assert_equal(ours, theirs)
            except DataError as error:
                assert re.search("not as it was packed|tokens there, and in this", str(error))
                named.add(path.stem)
            del array  # what threads still have mapped stays as it was
            (tmp_path / "kept").write_bytes(kept)
            os.replace(tmp_path / "kept", path)
    # Ids are for messages, and the others are of records: batches are made of pieces.
    assert every - named <= {
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
    document["digest"] = packed_set._digest_of(document["index"])
    index.write_text(json.dumps(document))
    with pytest.raises(DataError, match="can't be used"):
        take(opened(folder, word_tokenizer, SIZES, on_bad_record="refuse").train(np.arange(8)), 20)


def test_images_are_where_tar_finds_them(album, word_tokenizer, tmp_path):
    """Python's tarfile, which we did not write, lists and reads the same files."""
    data = of_files(album(20), word_tokenizer, SIZES)
    folder = packed(data, tmp_path / "set")
    paths = opened(folder, word_tokenizer, SIZES).corpus.paths
    inside = {}
    for shard in pathlib.Path(folder).glob("*.tar"):
        with tarfile.open(shard) as tar:
            inside |= {
                (shard.name, member.offset_data): tar.extractfile(member).read() for member in tar
            }
    assert len(inside) == len(paths) == len(data.corpus.paths)
    for ours, original in zip(paths, data.corpus.paths, strict=True):
        shard, place = (
            pathlib.Path(ours.split("::")[0]).name,
            int(ours.split("::")[1].split("+")[0]),
        )
        assert inside[shard, place] == pathlib.Path(original).read_bytes() == members.read(ours)


def test_problems_are_left_out(album, word_tokenizer, tmp_path):
    problem = Problem("x", "no image")
    records = album(20)
    data = load_dataset(BASE, word_tokenizer, read=(records, [problem]), **SIZES)
    again = opened(packed(data, tmp_path / "set"), word_tokenizer, SIZES)
    assert data.problems == [problem] == again.problems
    assert again.total == data.total == 1 + len(records) == 1 + len(again.records)
    assert [again.records[i].id for i in range(3)] == [record.id for record in records[:3]]


def test_few_sequences_for_a_batch(album, word_tokenizer, tmp_path):
    records = [record(i, [], "red") for i in range(9)]
    data = of_files(records, word_tokenizer, SIZES)
    folder = packed(data, tmp_path / "set")
    again = opened(folder, word_tokenizer, SIZES)
    assert len(packing.plan(data.pieces, data.config)) < 8
    for ours, theirs in zip(
        take(again.train(np.arange(8)), 5), take(data.train(np.arange(8)), 5), strict=True
    ):
        assert_equal(ours, theirs)
    with pytest.raises(DataError, match="lower it to 9"):
        opened(folder, word_tokenizer, SIZES, batch_size=10).check_batches()


def test_nothing_else_reads_a_set(album, word_tokenizer, tmp_path, capsys):
    folder = packed(of_files(album(), word_tokenizer, SIZES), tmp_path / "set")
    with pytest.raises(DataError, match="only training reads it"):
        opened(folder, word_tokenizer, SIZES).eval(np.arange(8), 8)
    recipe = "--config=configs/quickstart.py:smoke"
    for line, said in (
        (["data", "check", folder], "is packed, and holds what a run trains on"),
        (["data", "pack", recipe, f"--config.data.train={folder}", "--output=x"], "packed already"),
        (["data", "pack", recipe], "data pack needs --output"),
        (["data", "pack", "a.jsonl", "--output=x"], "data pack needs --config"),
        (["data", "check", f"{folder}/packed.json"], "name the folder of the packed set"),
        (["data", "verify", f"{folder}x"], "does not exist"),
        (["data", "pack", recipe, f"--output={folder}"], "exists; name another folder"),
        (["data", "pack", recipe, "--output=x", "--shard_mb=0"], "must be at least 1"),
        (
            [
                "data",
                "pack",
                "--config=configs/embedding.py",
                "--config.data.train=a.jsonl",
                "--output=x",
            ],
            "data pack is for",
        ),
        (["data", "verify", str(tmp_path)], "is no packed set"),
        (
            ["train", recipe, f"--config.data.eval={folder}", f"--workdir={tmp_path / 'run'}"],
            "config.data.eval=.* is packed",
        ),
    ):
        assert run(line) == 2, line
        assert re.search(said, capsys.readouterr().err), line
    assert not pathlib.Path("x").exists() and not pathlib.Path("x.partial").exists()


def test_a_failure_leaves_nothing(album, word_tokenizer, tmp_path, monkeypatch):
    data = of_files(album(), word_tokenizer, SIZES)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "tokens.npy")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match=r"tokens.npy can't be written: No space left on device"):
        packed(data, tmp_path / "set")
    assert list(tmp_path.glob("set*")) == []


def test_two_processes_pack_into_one_folder(tmp_path):
    """The first one is there; the other says so, and removes its own."""
    target = tmp_path / "set"
    with (
        pytest.raises(DataError, match="can't be written: Directory not empty"),
        packed_set.new_folder(str(target)) as folder,
    ):
        (folder / "mine").touch()
        target.mkdir()  # by another process
        (target / "theirs").touch()
    assert [path.name for path in target.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_what_is_not_ours_stays(tmp_path, monkeypatch):
    other = tmp_path / "elsewhere"
    host = socket.gethostname()
    (other / "precious").mkdir(parents=True)
    names = ["set.partial", "set.partial-notes", f"set.partial-otherhost-{2**22 + 1}"]
    for name in names:
        (tmp_path / name / "precious").mkdir(parents=True)
    (tmp_path / f"set.partial-{host}-{2**22 + 2}").symlink_to(other)
    (tmp_path / f"set.partial-{host}-{os.getpid()}0000000").mkdir()  # of a process that is gone
    with packed_set.new_folder(str(tmp_path / "set")):
        pass
    assert all((tmp_path / name / "precious").is_dir() for name in names)
    assert (other / "precious").is_dir()
    assert len(list(tmp_path.iterdir())) == len(names) + 3
    monkeypatch.setenv("HOME", str(tmp_path))
    for output in ("~/set", "~", "/", "."):
        with (
            pytest.raises(DataError, match="exists; name another folder"),
            packed_set.new_folder(output),
        ):
            pass


def test_images_that_change_while_they_are_packed(album, word_tokenizer, tmp_path, monkeypatch):
    data = of_files(album(20), word_tokenizer, SIZES)
    image = pathlib.Path(data.corpus.paths[3])
    whole = image.read_bytes()
    image.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="images changed while they were packed"):
        packed(data, tmp_path / "set")
    image.unlink()
    with pytest.raises(DataError, match=f"{image.name}: missing file; it could be read before"):
        packed(data, tmp_path / "set")
    assert not list(tmp_path.glob("set*"))


def test_killed_while_packing(album, word_tokenizer, tmp_path):
    """There is no set until it is whole; packing again gives the bytes of an undisturbed one."""
    data = of_files(album(20), word_tokenizer, SIZES)
    expected = pathlib.Path(packed(data, tmp_path / "whole"))
    script = f"""
import os, signal, sys
from jaxvlm.data.conversations import packed_set
with packed_set.new_folder({str(tmp_path / "set")!r}) as folder:
    (folder / "images-00000.tar").write_bytes(b"half")
    (folder / "tokenizer").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "set").exists() and len(list(tmp_path.glob("set.partial-*"))) == 1
    again = pathlib.Path(packed(data, tmp_path / "set"))
    files = sorted(path.relative_to(expected) for path in expected.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert all((again / name).read_bytes() == (expected / name).read_bytes() for name in files)
    assert not list(tmp_path.glob("set.partial-*"))
