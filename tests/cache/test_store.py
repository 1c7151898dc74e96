"""The store's promises: rows by key, their bits, and never a wrong one."""

from __future__ import annotations

import json
import os
import random
import time

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from stored import FACTS, assert_none_wrong, filled, key_of, row_of, same, segments

from jaxvlm.cache.store import codec, segment_files


def test_rows_are_there_at_once_and_in_the_next_run(opened):
    first = opened()
    assert first.get(key_of(1)) is None
    for i in range(5):
        first.put(key_of(i), row_of(i))
        assert same(first.get(key_of(i)), i)
    assert first.counts().rows == 5 and first.counts().bytes == 0
    first.flush()
    assert all(same(first.get(key_of(i)), i) for i in range(5))
    first.put(key_of(5), row_of(5))
    first.close()  # flushes
    again = opened()
    assert all(same(again.get(key_of(i)), i) for i in range(6))
    assert again.get(key_of(6)) is None
    counts = again.counts()
    assert counts.rows == counts.hits == 6 and counts.misses == 1
    assert counts.raw_bytes == sum(row_of(i).nbytes for i in range(6))
    assert counts.bytes == sum(path.stat().st_size for path in segments(again))
    assert not opened.said


def test_what_is_given_and_got_is_the_callers_own(opened):
    store, x = opened(), row_of(2)
    store.put(key_of(2), x)
    x[:] = 0
    got = store.get(key_of(2))
    got[:] = 0
    assert same(store.get(key_of(2)), 2)
    store.flush()
    store.get(key_of(2))[:] = 0
    assert same(store.get(key_of(2)), 2)


@pytest.mark.parametrize("name", codec.CODECS)
def test_a_row_has_the_same_bits_before_and_after_it_is_on_disk(opened, name):
    store = opened(name=name)
    x = np.random.default_rng(0).standard_normal((5, 200)).astype(np.float32)
    store.put(key_of(0), x)
    before = store.get(key_of(0))
    store.flush()
    after, later = store.get(key_of(0)), opened(name=name).get(key_of(0))
    assert before.tobytes() == after.tobytes() == later.tobytes()
    assert opened(name="int8" if name == "exact" else "exact").get(key_of(0)) is None


def test_a_row_that_is_there_is_not_written_again(opened):
    filled(opened)
    store = opened()
    for i in range(6):
        store.put(key_of(i), row_of(i))
    store.close()
    assert len(segments(store)) == 2 and store.counts().rows == 6


def test_segments_are_as_large_as_they_should_be(opened):
    store = opened(segment_mb=1)
    x = np.zeros((64, 1024), np.float32)  # a quarter of it
    for i in range(10):
        store.put(key_of(i), x + i)
        store.flush() if i % 4 == 3 else None
    store.close()
    assert [len(segment_files.read_segment(path).rows) for path in segments(store)] == [4, 4, 2]


def test_full_segments_are_written_without_being_asked(opened):
    store = opened(segment_mb=1)
    store.put(key_of(0), np.zeros((256, 1024), np.float32))
    deadline = time.monotonic() + 20
    while not store.counts().bytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_facts_that_differ_by_an_ulp_share_nothing(opened, tmp_path):
    filled(opened)
    ulp = FACTS | {"images": {"size": 224, "mean": float(np.nextafter(0.5, 1))}}
    other = opened(ulp)
    assert other.get(key_of(1)) is None and other.counts().rows == 0
    assert opened(dict(reversed(FACTS.items()))).counts().rows == 6  # order is no fact
    assert len(list((tmp_path / "store").iterdir())) == 2
    words = json.loads((other.folder / segment_files.IDENTITY).read_text())
    assert words["facts"] == ulp and words["codec"] == "exact"


def test_a_segment_of_another_identity_is_found_out(opened):
    (path, _), other = segments(filled(opened)), opened(FACTS | {"weights": "5b1e"})
    (other.folder / path.name).write_bytes(path.read_bytes())
    store = opened(FACTS | {"weights": "5b1e"})
    assert [store.get(key_of(i)) for i in range(6)] == [None] * 6
    assert len(opened.said) == 1 and store.counts().corrupt == 3


@pytest.mark.parametrize("bad", [{"a": {1, 2}}, {"a": float("nan")}, {"a": b"x"}])
def test_facts_that_json_can_not_say_are_refused(opened, bad):
    with pytest.raises(ValueError, match="JSON's values"):
        opened(bad)


def test_callers_mistakes_are_errors(opened):
    with pytest.raises(ValueError, match="known: exact, int8"):
        opened(name="zip")
    store = opened(name="int4")
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        store.put(b"abc", row_of(0))
    with pytest.raises(ValueError, match="float16"):
        store.put(key_of(0), np.ones((2, 2), np.float16))
    with pytest.raises(ValueError, match="even width"):
        store.put(key_of(0), np.ones((2, 3), np.float32))
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.put(key_of(0), row_of(0))


@pytest.mark.parametrize("name", ["exact", "int8"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_is_not_finite_is_never_kept(opened, name, dtype):
    store = opened(name=name)
    for i, bad in enumerate([np.nan, np.inf, -np.inf]):
        x = np.ones((2, 4), dtype)
        x[1, i] = bad
        store.put(key_of(i), x)
        assert store.get(key_of(i)) is None
    store.close()
    assert store.counts().refused == 3 and not segments(store)
    assert len(opened.said) == 1 and "not finite" in opened.said[0]


def test_a_byte_flipped_anywhere_gives_no_wrong_row(opened):
    path, _ = segments(filled(opened))
    whole, lost, rng = path.read_bytes(), [], random.Random(0)
    places = [*range(0, len(whole), 3), *(rng.randrange(len(whole)) for _ in range(100))]
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        before = len(opened.said)
        store = opened()
        lost.append(3 - assert_none_wrong(store, range(3)))
        said = opened.said[before:]
        assert len(said) == bool(lost[-1]), said
        assert all(str(path) in line and "jaxvlm cache prune" in line for line in said)
        assert assert_none_wrong(store, range(3, 6)) == 3  # the other file's
    assert {1, 3} <= set(lost)


@pytest.mark.parametrize("kind", ["empty", "zeros", "noise", "npz", "safetensors", "folder"])
def test_foreign_files_are_skipped_with_one_warning_each(opened, kind):
    store = filled(opened)
    path = store.folder / f"{'0' * 32}.safetensors"
    data = {
        "empty": b"",
        "zeros": bytes(4096),
        "noise": random.Random(0).randbytes(4096),
        "npz": b"PK\x03\x04" + bytes(100),
        "safetensors": safetensors.numpy.save({"w": np.ones(3)}, {"format": "pt"}),
    }
    path.write_bytes(data[kind]) if kind in data else path.mkdir()
    (store.folder / "notes.txt").write_text("not ours")
    (store.folder / ".nfs0001").write_text("nobody's")
    again = opened()
    assert assert_none_wrong(again, range(6)) == 6
    assert len(opened.said) == 2
    assert sum(str(path) in line for line in opened.said) == 1
    assert sum("notes.txt" in line and "ignored" in line for line in opened.said) == 1


def test_a_file_cut_anywhere_gives_no_wrong_row(opened):
    path, _ = segments(filled(opened))
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 11), len(whole) - 1]:
        path.write_bytes(whole[:length])
        before = len(opened.said)
        assert assert_none_wrong(opened(), range(6)) == 3
        assert len(opened.said) == before + 1
    path.write_bytes(whole + b"\0")
    assert assert_none_wrong(opened(), range(6)) == 3


def test_a_damaged_row_is_made_again_and_then_found(opened):
    store = filled(opened)
    path = segments(store)[0]
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    os.utime(path, (2e9, 2e9))  # so that it is read first
    store = opened()
    lost = [i for i in range(6) if store.get(key_of(i)) is None]
    assert len(lost) == 1 and store.counts().corrupt == 1
    store.put(key_of(lost[0]), row_of(lost[0]))
    assert assert_none_wrong(store, range(6)) == 6
    store.close()
    assert assert_none_wrong(opened(), range(6)) == 6


def test_a_damaged_identity_file_is_mended(opened):
    store = filled(opened)
    path = store.folder / segment_files.IDENTITY
    text = path.read_text()
    path.write_text(text[:-9])
    assert assert_none_wrong(opened(), range(6)) == 6
    assert path.read_text() == text


def test_segments_are_plain_safetensors_and_their_bytes_are_pinned(opened):
    store = opened(name="int8")
    store.put(key_of(7), np.asarray([[1.0, -2.0]], np.float32))
    store.close()
    assert store.identity.name == "6997fc87e4c351db95c57b20c07b4aba"
    (path,) = segments(store)
    ((name, row),) = safetensors.numpy.load(path.read_bytes()).items()
    assert name == key_of(7).hex()
    assert row.tobytes().hex() == "6a767674010100000100000002000000813c4081b6e648101316c633"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    about = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
    assert about == {
        "format": "jaxvlm visual tokens 1",
        "raw_bytes": "8",
        "checksum": "53714da8bdc00269",
    }
