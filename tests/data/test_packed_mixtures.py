"""Mixtures of packed sets, and of these and files: the batches of a mixture of the files."""

import dataclasses
import os
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxvlm.config import SourceConfig
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.conversations.joined import Items, Joined
from jaxvlm.data.errors import DataError
from jaxvlm.data.prefetch import resume_step
from tests.data.conftest import record
from tests.data.stored_sets import BASE, SIZES, any_size, of_files, packed
from tests.data.test_dataset import assert_equal, take


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    st.lists(st.lists(st.integers(-2, 9), max_size=6), min_size=1, max_size=4), st.data()
)
def test_joined_arrays_are_one_array(parts, data):
    arrays = [np.asarray(part, np.int32) for part in parts]
    added = [7 * i for i in range(len(parts))]
    whole = np.concatenate([np.where(x < 0, x, x + n) for x, n in zip(arrays, added)])
    joined = Joined(arrays, added)
    assert len(joined) == len(whole)
    np.testing.assert_array_equal(joined[:], whole)
    begin, end = (data.draw(st.integers(0, len(whole))) for _ in range(2))
    np.testing.assert_array_equal(joined[begin:end], whole[begin:end])
    assert joined[begin:end].dtype == whole.dtype
    if len(whole):
        places = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9))
        index = np.asarray(places, np.int64)
        np.testing.assert_array_equal(joined[index], whole[index])
        assert joined[begin % len(whole)] == whole[begin % len(whole)]
    for place in (-1, len(whole)):
        with pytest.raises(IndexError):
            joined[place]
    items = Items([list(part) for part in parts])
    assert list(items) == [x for part in parts for x in part]


def mixture(forms, tokenizer, sizes=SIZES, weights=(2.0, 1.0, 1.0), **more):
    """A data set of sources: records, or the folder of a packed set."""
    sources, read = {}, {}
    for name, form, weight in zip("abc", forms, weights, strict=False):
        is_set = isinstance(form, str)
        sources[name] = SourceConfig(train=form if is_set else "x.jsonl", weight=weight)
        read |= {} if is_set else {name: (form, [])}
    config = dataclasses.replace(BASE, mixture=sources, **{"batch_size": 4, **more})
    return load_dataset(config, tokenizer, read=read, **sizes)


@pytest.fixture
def two(album):
    """Records of two sources, of which the second's share images and have long ones."""
    records = album(12)
    return records[:20], [x._replace(id=f"own/{x.id}") for x in records[20:]]


@pytest.mark.parametrize("more", [{}, {"packing": False}, {"loss_turns": "each"}], ids=str)
def test_batches_are_those_of_the_files(two, word_tokenizer, tmp_path, more):
    files = mixture(two, word_tokenizer, **more)
    wanted = list(zip(files.train(np.arange(4)), range(14)))
    sets = [
        packed(of_files(own, word_tokenizer, SIZES, **more), tmp_path / f"{i}")
        for i, own in enumerate(two)
    ]
    for forms in (sets, [two[0], sets[1]], [sets[0], two[1]]):
        again = mixture(forms, word_tokenizer, **more)
        assert again.fingerprint() == files.fingerprint()
        assert again.steps_per_epoch == files.steps_per_epoch
        assert again.order.lines(9) == files.order.lines(9)
        for rows, start in ((range(4), 0), ([1, 3], 5)):
            part = again.train(np.asarray(rows), start)
            for (batch, meta), step in zip(part, range(start, 14)):
                (theirs, their_meta), _ = wanted[step]
                cut = [v if v is None else v[list(rows)] for v in theirs]
                assert_equal(batch, type(theirs)(*cut))
                if len(rows) == 4:
                    ids = [[x.records[i].id for i in m.record.tolist()] for x, m in (
                        (again, meta), (files, their_meta)
                    )]  # fmt: skip
                    assert ids[0] == ids[1] and ids[0][0][:2] in ("a/", "b/")
        saved = files.train(np.arange(4), 3).state()
        assert resume_step(saved, again.fingerprint()) == 3
    other = mixture([*sets[:1], two[1][:-1]], word_tokenizer, **more)
    assert other.fingerprint() != files.fingerprint()


def test_images_of_any_size(ragged, qwen, word_tokenizer, tmp_path):
    sizes = any_size(qwen, word_tokenizer)
    more = {"batch_size": 2, "max_length": 96}
    two = ragged[:9], ragged[9:]
    files = mixture(two, word_tokenizer, sizes, **more)
    sets = [
        packed(of_files(own, word_tokenizer, sizes, **more), tmp_path / f"{i}")
        for i, own in enumerate(two)
    ]
    again = mixture(sets, word_tokenizer, sizes, **more)
    assert again.sequence_shapes == files.sequence_shapes
    assert again.fingerprint() == files.fingerprint()
    rows = np.arange(2)
    for ours, theirs in zip(take(again.train(rows), 8), take(files.train(rows), 8), strict=True):
        assert_equal(ours, theirs)


def test_pages_of_cached_tokens_are_those_of_the_files(two, word_tokenizer, tmp_path):
    sets = [packed(of_files(own, word_tokenizer, SIZES), tmp_path / f"{i}") for i, own in
            enumerate(two)]  # fmt: skip
    files, again = mixture(two, word_tokenizer), mixture(sets, word_tokenizer)
    for data in (files, again):
        data.allocate_tokens(4)
    rows = np.arange(4)
    for ours, theirs in zip(take(again.train(rows), 6), take(files.train(rows), 6), strict=True):
        assert (ours.image_pages >= 0).any()
        assert_equal(ours, theirs)


def test_what_is_damaged_is_named_and_counts_for_its_source(two, word_tokenizer, tmp_path):
    sets = [packed(of_files(own, word_tokenizer, SIZES), tmp_path / f"{i}") for i, own in
            enumerate(two)]  # fmt: skip
    for tar in pathlib.Path(sets[1]).glob("images-*.tar"):
        tar.write_bytes(bytes(tar.stat().st_size))
    data = mixture(sets, word_tokenizer, on_bad_record="skip", max_skip_fraction=0.2)
    with pytest.raises(DataError, match=r"mixture\.b: .*can't be used.*jaxvlm data verify .*1`"):
        take(data.train(np.arange(4)), 30)
    assert data.skipped and all(x.id.startswith("b/own/") for x in data.skipped)
    tokens = pathlib.Path(sets[0]) / "tokens.npy"
    content = bytearray(tokens.read_bytes())
    content[-8] ^= 1
    tokens.write_bytes(content)
    alone = mixture([sets[0], two[1]], word_tokenizer)
    with pytest.raises(DataError, match=r"0: piece \d+ is not as it was packed"):
        take(alone.train(np.arange(4)), 30)


def test_what_was_left_out_counts_for_its_source(album, word_tokenizer, tmp_path):
    records = [*album(6), record("none", ["missing.png"])]
    whole = of_files(records, word_tokenizer, SIZES, on_bad_record="skip")
    data = mixture(
        [packed(whole, tmp_path / "set"), album(5)], word_tokenizer, on_bad_record="skip"
    )
    assert [x.id for x in data.problems] == ["a/none"] and data.total == len(records) + 19


def test_a_file_of_two_sources_is_one_image(album, word_tokenizer, tmp_path):
    """As with all of them in one file: a cache keeps its tokens once."""
    records = album(6)
    files = mixture([records, records[:9]], word_tokenizer)
    assert len(files.corpus.paths) == 6 and len(files.corpus.spans) == 6
    own = packed(of_files(records, word_tokenizer, SIZES), tmp_path / "set")
    both = mixture([records, records[:9], own], word_tokenizer)
    assert len(both.corpus.paths) == 12
    for i in range(len(files.corpus.first)):
        assert files.corpus.images[i] == both.corpus.images[i]
    assert files.usable() == list(range(len(files.records)))


def test_damaged_counts_of_tokens_do_not_move_a_schedule(two, word_tokenizer, tmp_path):
    sets = [packed(of_files(own, word_tokenizer, SIZES), tmp_path / f"{i}") for i, own in
            enumerate(two)]  # fmt: skip
    config = dataclasses.replace(
        BASE, batch_size=4, mixture={
            name: SourceConfig(train=path, tokens=300.0) for name, path in zip("ab", sets)
        },
    )  # fmt: skip
    before = load_dataset(config, word_tokenizer, **SIZES).order
    path = pathlib.Path(sets[0]) / "piece_num_tokens.npy"
    content = bytearray(path.read_bytes())
    content[-2] ^= 0x40
    path.write_bytes(content)
    after = load_dataset(config, word_tokenizer, **SIZES).order
    assert after.weights == before.weights and after.steps_per_epoch == before.steps_per_epoch


def test_sets_of_other_settings_are_named(two, word_tokenizer, tmp_path):
    set_ = packed(of_files(two[0], word_tokenizer, SIZES), tmp_path / "set")
    with pytest.raises(DataError, match=r"mixture\.a: .*set was packed for other settings: data"):
        mixture([set_, two[1]], word_tokenizer, max_length=40)
    os.remove(pathlib.Path(set_) / "first.npy")
    with pytest.raises(DataError, match=r"config\.data\.mixture\.a: .*first\.npy is missing"):
        mixture([set_, two[1]], word_tokenizer)
