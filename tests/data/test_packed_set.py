"""Packed sets: batches as from files, any split and step; damage and other settings are named."""

import os
import pathlib
import re
import shutil
import tarfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers

from jaxvlm.cli.main import run
from jaxvlm.config import Extension
from jaxvlm.data.conversations import packing
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.packed import checks
from jaxvlm.data.packed.mapped_arrays import Groups, Spans, Strings, flat
from jaxvlm.data.sources import members
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf.families import anyres, qwen_vl
from jaxvlm.types import Sources, Span
from tests.data.conftest import record
from tests.data.stored_sets import BASE, SIZES, any_size, of_files, opened, packed
from tests.data.test_dataset import assert_equal, take


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
def test_images_of_any_size(ragged, qwen, word_tokenizer, tmp_path, more):
    sizes = any_size(qwen, word_tokenizer)
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
        ({"tsv_quoting": True}, "data.tsv_quoting is not read"),
        ({"format": Extension(target="a:b")}, "data.format is not read"),
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
    digest = checks.tokenizer_digest(built)
    assert checks.tokenizer_digest(chat_tokenizer.load(tmp_path)) == digest
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
        assert checks.tokenizer_digest(read) != digest, change


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
        (["data", "verify", str(tmp_path)], "is no packed set"),
        (
            ["train", recipe, f"--config.data.eval={folder}", f"--workdir={tmp_path / 'run'}"],
            "config.data.eval=.* is packed",
        ),
    ):
        assert run(line) == 2, line
        assert re.search(said, capsys.readouterr().err), line
    assert not pathlib.Path("x").exists() and not pathlib.Path("x.partial").exists()
