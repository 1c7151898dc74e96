"""The cache writer: whose sequences it takes, the encoder's identity, audits, and shutdown."""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import jax
import numpy as np
import pytest

from jaxvlm.cache import writer as tokens_module
from jaxvlm.cache.identity import changed_settings, segments_at_start, weights_digest
from jaxvlm.cache.store.rows import Store
from jaxvlm.cache.store.segment_files import Identity
from jaxvlm.cache.store.tiers import Tiers
from jaxvlm.cache.writer import CacheWriter, EncodedTokens
from jaxvlm.config import ConfigError, VisionConfig
from jaxvlm.types import Batch


def batch_of(rows, stored=False):
    """Rows of one image each, whose key is its number in the global batch, from 1."""
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
    """What a step gives of rows of one image each."""
    return EncodedTokens(tokens_of(rows), jax.numpy.full((len(rows), 1), encoded))


def owned(tokens):
    """``owned_rows`` of a process that has these rows."""
    encoded = dict.fromkeys(tokens, np.ones(1, bool))
    return lambda x: tokens if x.ndim == 4 else encoded


def test_rows_keep_their_own_tokens(monkeypatch):
    """Of a process whose rows do not follow each other."""
    rows = np.asarray([0, 1, 4, 5])
    here = {row: np.asarray(tokens_of([row]))[0] for row in rows.tolist()}
    monkeypatch.setattr("jaxvlm.cache.writer.owned_rows", owned(here))
    tiers = Tiers(None, 8, np.float32)
    writer = CacheWriter(tiers, rows, pytest.fail)
    writer.write(batch_of(rows), given(range(8)))
    writer.close()
    for row in rows.tolist():
        np.testing.assert_array_equal(tiers.get(key_of(row)), row + np.ones((3, 2)))
    assert not tiers.has(key_of(2))


def test_documents_are_several_rows_of_an_example(monkeypatch):
    """Of a process whose examples do not follow each other, three documents each."""
    rows = np.asarray([0, 1, 4, 5])
    every = [3 * row + k for row in rows.tolist() for k in range(3)]
    here = {row: np.asarray(tokens_of([row]))[0] for row in every}
    monkeypatch.setattr("jaxvlm.cache.writer.owned_rows", owned(here))
    tiers = Tiers(None, 8, np.float32)
    writer = CacheWriter(tiers, rows, pytest.fail)
    writer.write(batch_of(every), given(range(18)))
    writer.close()
    for row in every:
        np.testing.assert_array_equal(tiers.get(key_of(row)), row + np.ones((3, 2)))
    assert not tiers.has(key_of(6))


def test_rows_of_others_are_refused(monkeypatch):
    """Sequences of another process are not cached, and the log says so."""
    said = []
    here = {row: np.asarray(tokens_of([row]))[0] for row in range(4)}
    monkeypatch.setattr("jaxvlm.cache.writer.owned_rows", owned(here))
    tiers = Tiers(None, 8, np.float32)
    writer = CacheWriter(tiers, np.asarray([0, 1]), said.append)
    writer.write(batch_of([0, 1]), given(range(4)))
    writer.close()
    assert not tiers.has(key_of(2)) and len(said) == 1 and "no longer written" in said[0]


def test_it_ends_though_keeping_fails(monkeypatch):
    """With its queue full and a thread that failed, nobody waits."""
    tiers, said, begun = Tiers(None, 8, np.float32), [], threading.Event()

    def fail(*_):
        begun.wait(5)
        raise OSError("no")

    monkeypatch.setattr(tiers, "put", fail)
    writer = CacheWriter(tiers, np.arange(2), said.append)
    for _ in range(8):
        writer.write(batch_of([0, 1]), given([0, 1]))
    begun.set()
    ended = threading.Thread(target=writer.close)
    ended.start()
    ended.join(10)
    assert not ended.is_alive() and said == [
        "visual tokens are no longer written to the cache: OSError: no"
    ]


def test_it_rests_when_keeping_has_failed(monkeypatch):
    """It does not look at the clock again and again for what it will not write."""
    monkeypatch.setattr(tokens_module, "_FLUSH_SECONDS", 0.01)
    tiers, said = Tiers(None, 8, np.float32), []
    monkeypatch.setattr(tiers, "put", lambda *_: 1 / 0)
    writer = CacheWriter(tiers, np.arange(1), said.append)
    asked, get = [], writer._queue.get
    monkeypatch.setattr(writer._queue, "get", lambda **how: asked.append(how) or get(**how))
    writer.write(batch_of([0]), given([0]))
    end = time.monotonic() + 30
    while not said and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(said) == 1 and asked[-1] == {"timeout": None}
    writer.close()


def test_the_latest_used_are_in_memory():
    """Evicted tokens are cached again when they are recomputed."""
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
        writer = CacheWriter(tiers, np.arange(1), pytest.fail)
        for _ in range(3):
            writer.write(batch_of([0]), given([0]))
        writer.close()
        assert (tiers.get(key_of(0)) is not None) == found
        assert store.counts().rows == 1 and tiers.is_new(key_of(0)) == (run == 0)


def test_what_was_kept_is_compared_once():
    tiers = Tiers(None, 8, np.float32)
    tiers.put(key_of(0), np.full((3, 2), 1.1, np.float32))
    writer = CacheWriter(tiers, np.arange(1), pytest.fail)
    writer.write(batch_of([0]), given([0]))
    writer.close()
    assert writer.max_drift() == pytest.approx(0.1 / 1.1, rel=1e-3)
    assert writer.max_drift() == 0


def test_what_was_read_from_pages_is_not_compared():
    """Tokens read from pages audit nothing; those not yet cached are taken nevertheless."""
    tiers = Tiers(None, 8, np.float32)
    tiers.put(key_of(0), np.full((3, 2), 1.1, np.float32))
    writer = CacheWriter(tiers, np.arange(2), pytest.fail)
    # The page's tokens differ from anything that the encoder computes.
    writer.write(batch_of([0, 1]), given([7, 1], encoded=False))
    writer.write(batch_of([0, 1]), given([0, 1]))
    writer.close()
    assert writer.max_drift() == pytest.approx(0.1 / 1.1, rel=1e-3)
    np.testing.assert_array_equal(tiers.get(key_of(1)), np.full((3, 2), 2.0))


def test_the_disk_has_it_though_nothing_more_is_made(tmp_path, monkeypatch):
    """After a pass all images hit and no step gives the thread tokens; it flushes nevertheless."""
    monkeypatch.setattr(tokens_module, "_FLUSH_SECONDS", 0.5)
    store, made = Store(tmp_path, {"of": "a tower"}), jax.block_until_ready(given([0]))
    writer = CacheWriter(Tiers(store, 0, np.float32), np.arange(1), pytest.fail)
    writer.write(batch_of([0]), made)
    end = time.monotonic() + 30
    while not Store(tmp_path, {"of": "a tower"}).has(key_of(0)):
        assert time.monotonic() < end
        time.sleep(0.02)
    writer.close()


def test_a_run_reads_what_was_there_before_it_began(tmp_path):
    """However often it is stopped, for each encoder; missing files are logged."""
    said, work = [], tmp_path / "run"
    work.mkdir()

    def opened(tower="a"):
        folder = tmp_path / Identity.of({"of": tower}, "int8").name
        only = segments_at_start(work, folder, said.append)
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
    assert len(said) == 1 and "1 of 1 token files" in said[0]
    for damaged in ("{", "[]", json.dumps({folder.name: 5})):
        (work / "cache_segments.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"cache_segments\.json: can't be read"):
            opened()
    said.clear()
    put(3)
    (work / "cache_segments.json").unlink()
    (work / "checkpoints" / "4").mkdir(parents=True)
    assert opened().has(key_of(3)) and len(said) == 1 and "all are read" in said[0]


def test_a_default_is_no_part_of_an_identity():
    """A setting that is added with its default, or renamed, leaves every store valid."""
    facts = changed_settings(VisionConfig(width=96, remat="full", dropout=0.1))
    assert facts == {"width": 96}
    added = dataclasses.make_dataclass(
        "VisionConfig", [("new", int, 3)], bases=(VisionConfig,), frozen=True
    )
    assert changed_settings(added(width=96)) == facts
    fields = [(f.name, f.type, f) for f in dataclasses.fields(VisionConfig) if f.name != "depth"]
    renamed = dataclasses.make_dataclass("VisionConfig", [*fields, ("layers", int, 2)])
    assert changed_settings(renamed(width=96)) == facts
    assert changed_settings(added(width=96, new=4)) == facts | {"new": 4}
    assert changed_settings(VisionConfig(width=96, depth=3)) != facts


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
