"""Tokens behind a step: whose rows they are, what a tower's identity is, and how it ends."""

from __future__ import annotations

import json
import threading
import time

import jax
import numpy as np
import pytest

from jaxvlm.build import tokens as tokens_module
from jaxvlm.build.tokens import Keeper, Made, there_before, weights_digest
from jaxvlm.cache.files import Identity
from jaxvlm.cache.store import Store
from jaxvlm.cache.tiers import Tiers
from jaxvlm.config import ConfigError
from jaxvlm.types import Batch


def batch_of(rows, stored=False):
    """Rows of one picture each, whose key is its number in the global batch, from 1."""
    key = np.zeros((len(rows), 1, 4), np.uint32)
    key[:, 0, 0] = np.asarray(rows) + 1
    shape = (len(rows), 1)
    return Batch(
        None, None, None, None, image_start=np.zeros(shape, np.int32), image_key=key,
        is_stored=np.full(shape, stored),
    )  # fmt: skip


def key_of(row):
    return np.asarray([row + 1, 0, 0, 0], np.uint32).tobytes()


def tokens_of(rows):
    return jax.numpy.asarray(np.asarray(rows, np.float32)[:, None, None, None] + np.ones((1, 3, 2)))


def given(rows, encoded=True):
    """What a step gives of rows of one picture each."""
    return Made(tokens_of(rows), jax.numpy.full((len(rows), 1), encoded))


def owned(tokens):
    """``owned_rows`` of a process that has these rows."""
    encoded = dict.fromkeys(tokens, np.ones(1, bool))
    return lambda x: tokens if x.ndim == 4 else encoded


def test_rows_keep_their_own_tokens(monkeypatch):
    """Of a process whose rows do not follow each other."""
    rows = np.asarray([0, 1, 4, 5])
    here = {row: np.asarray(tokens_of([row]))[0] for row in rows.tolist()}
    monkeypatch.setattr("jaxvlm.build.tokens.owned_rows", owned(here))
    tiers = Tiers(None, 8, np.float32)
    keeper = Keeper(tiers, rows, pytest.fail)
    keeper.take(batch_of(rows), given(range(8)))
    keeper.close()
    for row in rows.tolist():
        np.testing.assert_array_equal(tiers.get(key_of(row)), row + np.ones((3, 2)))
    assert not tiers.has(key_of(2))


def test_documents_are_several_rows_of_an_example(monkeypatch):
    """Of a process whose examples do not follow each other, three documents each."""
    rows = np.asarray([0, 1, 4, 5])
    every = [3 * row + k for row in rows.tolist() for k in range(3)]
    here = {row: np.asarray(tokens_of([row]))[0] for row in every}
    monkeypatch.setattr("jaxvlm.build.tokens.owned_rows", owned(here))
    tiers = Tiers(None, 8, np.float32)
    keeper = Keeper(tiers, rows, pytest.fail)
    keeper.take(batch_of(every), given(range(18)))
    keeper.close()
    for row in every:
        np.testing.assert_array_equal(tiers.get(key_of(row)), row + np.ones((3, 2)))
    assert not tiers.has(key_of(6))


def test_rows_of_others_are_refused(monkeypatch):
    """Of a row that is not this process's nothing is kept, and that is said."""
    said = []
    here = {row: np.asarray(tokens_of([row]))[0] for row in range(4)}
    monkeypatch.setattr("jaxvlm.build.tokens.owned_rows", owned(here))
    tiers = Tiers(None, 8, np.float32)
    keeper = Keeper(tiers, np.asarray([0, 1]), said.append)
    keeper.take(batch_of([0, 1]), given(range(4)))
    keeper.close()
    assert not tiers.has(key_of(2)) and len(said) == 1 and "no longer kept" in said[0]


def test_it_ends_though_keeping_fails(monkeypatch):
    """With its queue full and a thread that failed, nobody waits."""
    tiers, said, begun = Tiers(None, 8, np.float32), [], threading.Event()

    def fail(*_):
        begun.wait(5)
        raise OSError("no")

    monkeypatch.setattr(tiers, "put", fail)
    keeper = Keeper(tiers, np.arange(2), said.append)
    for _ in range(8):
        keeper.take(batch_of([0, 1]), given([0, 1]))
    begun.set()
    ended = threading.Thread(target=keeper.close)
    ended.start()
    ended.join(10)
    assert not ended.is_alive() and said == ["visual tokens are no longer kept: OSError: no"]


def test_it_rests_when_keeping_has_failed(monkeypatch):
    """It does not look at the clock again and again for what it will not write."""
    monkeypatch.setattr(tokens_module, "_FLUSH_SECONDS", 0.01)
    tiers, said = Tiers(None, 8, np.float32), []
    monkeypatch.setattr(tiers, "put", lambda *_: 1 / 0)
    keeper = Keeper(tiers, np.arange(1), said.append)
    asked, get = [], keeper._queue.get
    monkeypatch.setattr(keeper._queue, "get", lambda **how: asked.append(how) or get(**how))
    keeper.take(batch_of([0]), given([0]))
    end = time.monotonic() + 30
    while not said and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(said) == 1 and asked[-1] == {"timeout": None}
    keeper.close()


def test_the_latest_used_are_in_memory():
    """What was pushed out is kept again when it is made again."""
    tiers = Tiers(None, 1, np.float32)
    big = np.ones((100, 1000), np.float32)  # two of them fit
    for row in (0, 1, 2):
        tiers.put(key_of(row), big)
    assert [tiers.has(key_of(row)) for row in range(3)] == [False, True, True]
    tiers.put(key_of(0), big)
    assert [tiers.has(key_of(row)) for row in range(3)] == [True, False, True]


def test_what_a_codec_changes_is_for_the_next_run(tmp_path):
    """Put once, and not read before the store is opened again."""
    for run, found in enumerate((False, True)):
        store = Store(tmp_path, {"of": "a tower"}, "int8")
        tiers = Tiers(store, 8, np.float32)
        assert (tiers.get(key_of(0)) is not None) == found
        keeper = Keeper(tiers, np.arange(1), pytest.fail)
        for _ in range(3):
            keeper.take(batch_of([0]), given([0]))
        keeper.close()
        assert (tiers.get(key_of(0)) is not None) == found
        assert store.counts().rows == 1 and tiers.is_new(key_of(0)) == (run == 0)


def test_what_was_kept_is_compared_once():
    tiers = Tiers(None, 8, np.float32)
    tiers.put(key_of(0), np.full((3, 2), 1.1, np.float32))
    keeper = Keeper(tiers, np.arange(1), pytest.fail)
    keeper.take(batch_of([0]), given([0]))
    keeper.close()
    assert keeper.change() == pytest.approx(0.1 / 1.1, rel=1e-3)
    assert keeper.change() == 0


def test_what_was_read_from_pages_is_not_compared():
    """It says nothing of what the tower makes; what is not kept yet is taken all the same."""
    tiers = Tiers(None, 8, np.float32)
    tiers.put(key_of(0), np.full((3, 2), 1.1, np.float32))
    keeper = Keeper(tiers, np.arange(2), pytest.fail)
    # What lies in a page is as far off as nothing that the tower makes.
    keeper.take(batch_of([0, 1]), given([7, 1], encoded=False))
    keeper.take(batch_of([0, 1]), given([0, 1]))
    keeper.close()
    assert keeper.change() == pytest.approx(0.1 / 1.1, rel=1e-3)
    np.testing.assert_array_equal(tiers.get(key_of(1)), np.full((3, 2), 2.0))


def test_the_disk_has_it_though_nothing_more_is_made(tmp_path, monkeypatch):
    """After a pass all is found, and no step gives the thread anything: it writes all the same."""
    monkeypatch.setattr(tokens_module, "_FLUSH_SECONDS", 0.5)
    store, made = Store(tmp_path, {"of": "a tower"}), jax.block_until_ready(given([0]))
    keeper = Keeper(Tiers(store, 0, np.float32), np.arange(1), pytest.fail)
    keeper.take(batch_of([0]), made)
    end = time.monotonic() + 30
    while not Store(tmp_path, {"of": "a tower"}).has(key_of(0)):
        assert time.monotonic() < end
        time.sleep(0.02)
    keeper.close()


def test_a_run_reads_what_was_there_before_it_began(tmp_path):
    """However often it is stopped; of each tower, and what is gone is said."""
    said, work = [], tmp_path / "run"
    work.mkdir()

    def opened(tower="a"):
        folder = tmp_path / Identity.of({"of": tower}, "int8").name
        only = there_before(work, folder, said.append)
        return Store(tmp_path, {"of": tower}, "int8", on_warning=pytest.fail, only=only)

    def put(row):
        with Store(tmp_path, {"of": "a"}, "int8") as store:
            store.put(key_of(row), np.ones((3, 2), np.float32))
        return store.folder

    put(0)
    for row in (1, 2):  # its own, before it is stopped
        tiers = Tiers(opened(), 8, np.float32)
        assert [tiers.has(key_of(i)) for i in range(3)] == [True, False, False]
        assert not tiers.is_new(key_of(0)) and tiers.is_new(key_of(1)) == (row == 2)
        folder = put(row)
    assert not said and not opened("b").has(key_of(0))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert not opened().has(key_of(0))
    assert len(said) == 1 and "1 of 1 files of tokens" in said[0]
    for damaged in ("{", "[]", json.dumps({folder.name: 5})):
        (work / "tokens.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"tokens\.json: can't be read"):
            opened()
    said.clear()
    put(3)
    (work / "tokens.json").unlink()
    (work / "checkpoints" / "4").mkdir(parents=True)
    assert opened().has(key_of(3)) and len(said) == 1 and "all are read" in said[0]


@pytest.mark.parametrize("what", ["ulp", "signs", "swap", "moved", "dtype"])
def test_another_tower_has_another_digest(what):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 6)).astype(np.float32)
    others = {"vision/a": w, "vision/b": rng.normal(size=3).astype(np.float32), "decoder/c": w}
    other = w.copy()
    if what == "ulp":
        other[1, 2] = np.nextafter(other[1, 2], np.float32(9))
    if what == "signs":
        other[0, :2] *= -1
    if what == "swap":
        other[[0, 1]] = other[[1, 0]]
    if what == "moved":
        other = w.reshape(6, 4)
    if what == "dtype":
        other = w.view(np.int32)

    def put(x):
        return {path: jax.numpy.asarray(v) for path, v in x.items()}

    first = weights_digest(put(others))
    assert first == weights_digest(put(others | {"decoder/c": w + 1}))
    assert first != weights_digest(put(others | {"vision/a": other}))
    assert weights_digest(put(others | {"vision/a": -w})) != first
