"""Tokens in host memory, saved and had again; and those of an image that a row shows twice."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxvlm.cache.cached_step import TrainableTokens
from jaxvlm.cache.host_cache import HostCache
from jaxvlm.cache.host_cache_files import HostEntries, HostTokens, prune, read, write
from jaxvlm.cache.store import segment_files
from jaxvlm.cache.store.rows import Store
from jaxvlm.cache.token_order import MORTON, ROW_MAJOR, TokenLayout, permutation
from jaxvlm.data.page_allocation import PageAllocation
from jaxvlm.types import PAGE, Age, Batch

RUN = 5
ROWS = 2
"""Of a batch, each of a row with four pages in host memory, and three on the devices."""


def allocation(beyond=4):
    made = PageAllocation.__new__(PageAllocation)
    made.count, made.beyond, made._turns = 3 * ROWS, beyond, 1
    images = {number: number for number in range(beyond)}
    made._outside, made._size = [images] * ROWS, lambda image: (1, PAGE)
    return made


def row(seed, tokens=PAGE, dtype=ml_dtypes.bfloat16):
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((tokens, 8)).astype(dtype)
    return HostTokens(rng.bytes(16), data, Age(seed, 2**30 - seed, 0.25 * seed, 1 / (seed + 3)))


def some(*places):
    """Rows at places, and another one for the first of them, a step later."""
    seen = {at: row(i) for i, at in enumerate(places)}
    return HostEntries(seen, {places[0]: row(99)})


def assert_same(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for at, value in theirs.items():
            assert mine[at].key == value.key and mine[at].age == value.age
            assert mine[at].tokens.dtype == value.tokens.dtype
            np.testing.assert_array_equal(mine[at].tokens, value.tokens)


def test_what_is_written_is_read(tmp_path):
    wanted = some((0, 0), (0, 3), (1, 2))
    for _ in range(2):  # in the place of what is there
        write(tmp_path / "a", wanted, RUN, pytest.fail)
    found, lost = read(tmp_path / "a", RUN, lambda at, length: True, pytest.fail)
    assert not lost
    assert_same(found, wanted)
    found, lost = read(tmp_path / "a", RUN, lambda at, length: at != (0, 0), pytest.fail)
    assert not lost and found.current.keys() == {(0, 3), (1, 2)} and not found.next
    write(tmp_path / "b", HostEntries({}, {}), RUN, pytest.fail)
    assert read(tmp_path / "b", RUN, lambda at, length: True, pytest.fail) == (
        HostEntries({}, {}),
        0,
    )


def test_more_than_a_disk_takes_at_once(tmp_path, monkeypatch):
    """As many bytes as a store, which does not wait, lets go of."""
    asked, write_segment, flush = threading.Event(), segment_files.write_segment, Store.flush

    def as_asked(*args):
        assert asked.wait(60)
        return write_segment(*args)

    def flushed(store):
        asked.set()
        flush(store)

    monkeypatch.setattr(segment_files, "write_segment", as_asked)
    monkeypatch.setattr(Store, "flush", flushed)
    one = np.ones((2**12, 2**6), np.float32)  # a MiB
    rows = HostEntries(
        {(0, i): HostTokens(bytes(16), one, Age(i, 0, 0.0, 0.0)) for i in range(300)}, {}
    )
    write(tmp_path, rows, RUN, pytest.fail)
    found, lost = read(tmp_path, RUN, lambda at, length: True, pytest.fail)
    assert not lost and found.current.keys() == rows.current.keys()


def test_of_another_run_at_the_same_step_nothing_is_taken(tmp_path):
    write(tmp_path, some((0, 0), (0, 1)), RUN, pytest.fail)
    said = []
    found, lost = read(tmp_path, RUN + 1, lambda at, length: True, said.append)
    assert (found, lost) == (HostEntries({}, {}), 3)


def test_an_index_damaged_anywhere_is_said_or_does_no_harm(tmp_path):
    wanted = some((0, 0), (0, 1))
    write(tmp_path, wanted, RUN, pytest.fail)
    path = tmp_path / "index.npz"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        try:
            found, lost = read(tmp_path, RUN, lambda at, length: True, pytest.fail)
        except ValueError:
            continue
        assert not lost
        assert_same(found, wanted)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.99])
def test_an_index_cut_anywhere_is_said(tmp_path, share):
    write(tmp_path, some((0, 0), (0, 1)), RUN, pytest.fail)
    path = tmp_path / "index.npz"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ValueError, match=r"(?i)no data|not a zip"):
        read(tmp_path, RUN, lambda at, length: True, pytest.fail)


def test_rows_that_are_damaged_are_counted(tmp_path):
    write(tmp_path, some((0, 0), (0, 1), (1, 1)), RUN, pytest.fail)
    (segment,) = tmp_path.rglob("*.safetensors")
    data = bytearray(segment.read_bytes())
    data[-20] ^= 1
    segment.write_bytes(data)
    said = []
    found, lost = read(tmp_path, RUN, lambda at, length: True, said.append)
    assert lost == 1 and len(found.current) + len(found.next) == 3
    assert said and "prune" not in said[0]  # its advice is for stores


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "a").write_text("a file")
    said = []
    write(tmp_path / "a" / "b", some((0, 0)), RUN, said.append)
    assert "the host cache is not saved completely" in said[-1]
    assert not any("prune" in line for line in said)


def test_rows_that_are_lost_on_the_way_are_said(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_files, "write_segment", full)
    said = []
    write(tmp_path, some((0, 0), (0, 1)), RUN, said.append)
    assert any("saved completely: 3 of 3 are recomputed" in line for line in said)


def test_what_no_checkpoint_goes_with_is_dropped(tmp_path):
    def left(step, kept):
        for name in ("4", "8", "12", "16", "20", "other"):
            (tmp_path / name).mkdir(exist_ok=True)
        prune(tmp_path, step, kept)
        return {path.name for path in tmp_path.iterdir()} - {"other"}

    assert left(20, [8, 12]) == {"8", "12", "16", "20"}  # those after 12 may be under way
    assert left(12, [4, 20]) == {"4", "8", "12", "20"}  # that of 20 could not be read
    assert left(4, []) == {"4"}
    prune(tmp_path / "none", 4, [])


def parts(folder, count):
    """What processes of a run wrote at step 3, a shard each."""
    for number in range(count):
        rows = some(*((number, page) for page in range(4)))
        write(folder / "3" / f"{number}-of-{count}", rows, RUN, pytest.fail)
    return {"run": RUN, "processes": count}


def test_fewer_processes_go_on(tmp_path):
    told = parts(tmp_path, 2)
    host = HostCache(allocation(), np.arange(ROWS), pytest.fail)
    host.load(tmp_path, 3, told)
    assert host._tokens.current.keys() == {(shard, page) for shard in range(2) for page in range(4)}
    assert host._tokens.next.keys() == {(0, 0), (1, 0)}
    one = HostCache(allocation(), np.asarray([1]), pytest.fail)
    one.load(tmp_path, 3, told)
    assert {at[0] for at in one._tokens.current} == {1}


def test_of_less_memory_less_is_taken(tmp_path):
    host = HostCache(allocation(beyond=2), np.arange(ROWS), pytest.fail)
    host.load(tmp_path, 3, parts(tmp_path, 2))
    assert {at[1] for at in host._tokens.current} == {0, 1}
    longer = allocation()
    longer._size = lambda image: (1, PAGE - 1)
    longer._outside = [{0: 0, 1: 2}] * ROWS  # pages of other images
    host = HostCache(longer, np.arange(ROWS), pytest.fail)
    host.load(tmp_path, 3, parts(tmp_path, 2))
    assert {at[1] for at in host._tokens.current} == {0, 2}


@pytest.mark.parametrize(
    ("pages", "places", "taken"), [(1, {0: 2, 1: 3}, {(1, 3)}), (2, {0: 0, 1: 2}, {(0, 2), (1, 2)})]
)
def test_longer_ones_than_a_place_are_not_taken(tmp_path, pages, places, taken):
    rows = HostEntries({(0, 2): row(0, PAGE + 1), (1, 2): row(1, 2 * PAGE), (1, 3): row(2, 1)}, {})
    write(tmp_path / "4" / "0-of-1", rows, RUN, pytest.fail)
    room = allocation()
    room._size, room._outside = lambda image: (1, pages * PAGE), [places] * ROWS
    host = HostCache(room, np.arange(ROWS), pytest.fail)
    host.load(tmp_path, 4, {"run": RUN, "processes": 1})
    assert host._tokens.current.keys() == taken


def test_what_is_gone_is_said(tmp_path):
    told, said = parts(tmp_path, 2), []
    (tmp_path / "3" / "1-of-2" / "index.npz").unlink()
    host = HostCache(allocation(), np.arange(ROWS), said.append)
    host.load(tmp_path, 3, None)
    assert not said and not host._tokens.current
    host.load(tmp_path, 3, told)
    assert len(said) == 1 and "of 1 of 2 processes, which can't be read (No such file" in said[0]
    assert {at[0] for at in host._tokens.current} == {0}


def shown(keys):
    """A batch of two images a row, both at the row's second page in host memory."""
    at = allocation().count + np.arange(ROWS)[:, None, None] * 4 + 1
    return Batch(
        *[None] * 4,
        image_start=np.zeros((ROWS, 2), np.int32),
        image_key=np.broadcast_to(np.asarray(keys, np.uint32)[:, None, None], (ROWS, 2, 4)),
        image_pages=np.broadcast_to(at, (ROWS, 2, 1)).astype(np.int32),
        stored=np.zeros((ROWS, 2, PAGE, 8), np.float32),
        is_stored=np.zeros((ROWS, 2), bool),
    )


def made(value, encoded, was_shown, version=0):
    tokens = jnp.full((ROWS, 2, PAGE, 8), value) + jnp.arange(2)[:, None, None]

    def every(x, kind):
        return jnp.broadcast_to(jnp.asarray(x, kind), (ROWS, 2))

    age = Age(every(version, int), every(9, int), every(0.5, float), every([0.25, 0.75], float))
    return TrainableTokens(tokens, every(encoded, bool), every(was_shown, bool), age)


@pytest.mark.parametrize("order", [[True, False], [False, True]])
def test_made_and_read_in_one_step(order):
    """What was made counts, wherever in the row."""
    host, batch = HostCache(allocation(), np.arange(ROWS), pytest.fail), shown([1, 2])
    host.write(batch, made(10.0, [True, False], [True, True]))
    host.write(batch, made(20.0, order, [True, True], version=1))
    host.write(batch, None)
    found = host.fill(batch)
    assert found.is_stored.all() and (found.stored_age.version == 1).all()
    assert (found.stored[:, :, 0, 0] == 20 + order.index(True)).all()
    assert (found.image_pages == -1).all()


def test_another_key_has_nothing_and_takes_the_place():
    """As after another image preparation: no more is cached than there is room for."""
    host = HostCache(allocation(), np.arange(ROWS), pytest.fail)
    for key in range(5):
        batch = shown([key, key + 1])
        assert not host.fill(batch).is_stored.any()
        host.write(batch, made(float(key), [True, False], [True, True]))
        host.write(batch, None)
        assert host.fill(batch).is_stored.all()
    assert len(host._tokens.current) == ROWS


def test_what_lies_in_another_order_is_put_in_this_one():
    side = 4
    batch = shown([1, 2])
    keys = {
        order: np.apply_along_axis(
            TokenLayout(order, ROW_MAJOR, side).cache_key, -1, batch.image_key
        )
        for order in (ROW_MAJOR, MORTON)
    }
    tokens = np.random.default_rng(0).standard_normal((side * side, 8)).astype(np.float32)
    found = {}
    for order in (ROW_MAJOR, MORTON):
        host = HostCache(
            allocation(), np.arange(ROWS), pytest.fail, TokenLayout(order, ROW_MAJOR, side)
        )
        for shard in range(ROWS):
            key = keys[ROW_MAJOR][shard, 0].tobytes()
            host._tokens.current[shard, 1] = HostTokens(key, tokens, Age(3, 9, 0.5, 0.25))
        found[order] = host.fill(
            batch._replace(
                stored=np.zeros((ROWS, 2, side * side, 8), np.float32), image_key=keys[order]
            )
        )
        assert found[order].is_stored.all() and (found[order].stored_age.version == 3).all()
    np.testing.assert_array_equal(found[ROW_MAJOR].stored[0, 0], tokens)
    index = permutation(MORTON, side, side)
    np.testing.assert_array_equal(found[MORTON].stored[1, 1], tokens[index])
    assert not np.array_equal(index, np.arange(len(index)))


def test_a_read_image_has_its_new_pull():
    host, batch = HostCache(allocation(), np.arange(ROWS), pytest.fail), shown([1, 2])
    host.write(batch, made(10.0, [True, False], [True, True]))
    host.write(batch, made(0.0, [False, False], [False, True], version=7))
    host.write(batch, None)
    age = host.fill(batch).stored_age
    assert (
        (age.grad_norm == 0.75).all() and (age.version == 0).all() and (age.refresh_at == 9).all()
    )


def test_tokens_are_those_of_a_jitted_step(tmp_path):
    """Saved while a step is under way, its tokens are there two steps later, as in the run."""
    host, batch = HostCache(allocation(), np.arange(ROWS), pytest.fail), shown([1, 2])
    host.write(batch, jax.jit(lambda: made(10.0, [True, False], [True, True]))())
    host.save(tmp_path, 1)
    host.close()
    again = HostCache(allocation(), np.arange(ROWS), pytest.fail)
    again.load(tmp_path, 1, host.checkpoint_record)
    for one in (host, again):
        assert not one.fill(batch).is_stored.any()
        one.write(batch, None)
        assert one.fill(batch).is_stored.all()
