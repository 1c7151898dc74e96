"""Packed sets in stores: the batches of the files, whatever a store answers, or an error."""

import functools
import http.server
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import loopback_store
import numpy as np
import pytest
from loopback_store import answers, cut, flipped, late, longer, on_s3, short, unavailable

from jaxvlm.cli.main import run
from jaxvlm.data.errors import DataError
from jaxvlm.data.packed import packed_files
from jaxvlm.data.sources import downloads
from jaxvlm.data.sources.member_names import Member, digest_of
from jaxvlm.stores import store_requests
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder
from tests.data.stored_sets import SIZES, of_files, opened, packed
from tests.data.test_dataset import assert_equal, take

ALL = pytest.mark.parametrize("store", loopback_store.READ_KINDS, indirect=True)
STEPS = 12


@pytest.fixture(scope="module")
def store(request, tmp_path_factory):
    """Google's store, or the one that a test is parametrized by."""
    with loopback_store.of_kind(getattr(request, "param", "gs"), tmp_path_factory) as made:
        yield made


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Deadlines of seconds, a request for each image; gcsfs does not wait between its own tries."""
    loopback_store.hurry(monkeypatch, store_requests)
    monkeypatch.setattr(downloads, "PAUSES", (0.01,) * 3)
    monkeypatch.setattr(downloads, "_BLOCK", 1)


@pytest.fixture
def stored(request, store, album, word_tokenizer, tmp_path):
    """A set in the store: its URL, a copy on this machine, and its data set of files."""
    store.wrong.clear()
    data = of_files(album(20), word_tokenizer, SIZES)
    local = pathlib.Path(packed(data, tmp_path / "set"))
    name = re.sub(r"[^a-z0-9_]", "-", request.node.name.lower())
    if store.scheme == "http":
        url = f"{store.url}/{name}"
        shutil.copytree(local, store.folder / name)
    else:
        url = packed(data, f"{store.scheme}://runs/{name}")
    yield url, local, data
    store.wrong.clear()


def there(url, tokenizer, tmp_path, **more):
    return opened(url, tokenizer, SIZES, download_dir=str(tmp_path / "copies"), **more)


def assert_same(found, data, first=0, steps=STEPS):
    rows = np.arange(data.config.batch_size)
    given = take(data.train(rows, first), steps)
    for ours, theirs in zip(take(found.train(rows, first), steps), given, strict=True):
        assert_equal(ours, theirs)


@ALL
def test_batches_are_those_of_the_files(store, stored, word_tokenizer, tmp_path):
    """From any step; the second time nothing but ``packed.json`` and sizes is asked for."""
    url, _, data = stored
    found = there(url, word_tokenizer, tmp_path)
    assert found.fingerprint() == data.fingerprint()
    assert_same(found, data, 5)
    assert_same(found, data, 0, data.steps_per_epoch + 3)
    store.seen.clear()
    downloads._OPEN.clear()  # as in another process
    assert_same(there(url, word_tokenizer, tmp_path), data)
    arrays = [seen for seen in store.seen if seen.startswith("GET") and ".npy" in seen]
    assert len(arrays) == (store.scheme == "http")  # one byte, to see whether it gives parts
    parts = [s for s in store.seen if s.startswith("GET") and ".tar" in s and "alt=media" in s]
    assert not parts
    for path in map(data.corpus.paths.__getitem__, range(3)):
        assert os.path.exists(path)  # the files that were packed are left alone


WRONG = {"cut": cut, "flipped": flipped, "late": late, "short": short, "unavailable": unavailable}


@ALL
@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_for_a_while_changes_nothing(store, stored, word_tokenizer, tmp_path, how):
    url, _, data = stored
    rules = [
        answers(store.path(f"{url.rpartition('/')[2]}/{name}"), WRONG[how], 2, ("GET",))
        for name in ("packed.json", "tokens.npy", "span_ids.npy", "images-00000.tar")
    ]
    rules += [answers("images-00001.tar", WRONG[how], 3, ("GET",))]
    store.wrong += rules
    assert_same(there(url, word_tokenizer, tmp_path), data, 0, data.steps_per_epoch)
    used = [rule[0] for rule in rules]
    assert max(used) < 2 if how == "late" else max(used) == 0


@ALL
@pytest.mark.parametrize("block", [700, 2**18])
@pytest.mark.parametrize("how", [flipped, short])
def test_images_come_in_blocks(
    store, stored, word_tokenizer, tmp_path, monkeypatch, block, how, images_asked
):
    """Of several images each, whose ends lie anywhere; wrong ones are asked for again."""
    url, local, data = stored
    monkeypatch.setattr(downloads, "_BLOCK", block)
    store.wrong += [answers("images-00001.tar", how, 2, ("GET",))]
    found = there(url, word_tokenizer, tmp_path, image_cache_mb=0)
    before = images_asked()
    assert_same(found, data, 0, data.steps_per_epoch)
    tars = [path.stat().st_size for path in local.glob("*.tar")]
    blocks = sum(-(-size // block) for size in tars)
    assert images_asked() - before <= blocks + 8  # some more for what was wrong
    assert_same(found, data, data.steps_per_epoch, data.steps_per_epoch)
    assert images_asked() - before <= blocks + 8


@pytest.mark.parametrize("size", [3_000, 100_000, 160_000, 255_000, 300_000])
@pytest.mark.parametrize("shuffled", [False, True])
def test_no_byte_is_asked_for_twice(tmp_path, monkeypatch, size, shuffled):
    """Wherever the ends of blocks are in images."""
    monkeypatch.setattr(downloads, "_BLOCK", 2**18)
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 256, 4_000_000, np.uint8).tobytes()
    copies = downloads.Copies("http://a.org/set", tmp_path, {"i.tar": [len(whole), ""]})
    asked = []

    def part(name, first, count):
        asked.append(count)
        return whole[first : first + count]

    copies._part = part
    places = np.arange(512, len(whole) - size, size + 700)
    for first in (rng.permutation(places) if shuffled else places).tolist():
        data = whole[first : first + size]
        member = Member("http://a.org/set/i.tar", str(first), size, "x", digest_of(data).hex())
        assert copies.read("i.tar", member) == data
    assert sum(asked) <= len(whole)
    assert len(asked) <= min(len(places), -(-len(whole) // 2**18)) + (size >= 2**18) * len(places)


@pytest.fixture
def images_asked(monkeypatch):
    """How many parts of tars were asked for."""
    asked = []
    part = downloads.Copies._part

    def counted(self, *given):
        asked.append(given)
        return part(self, *given)

    monkeypatch.setattr(downloads.Copies, "_part", counted)
    return lambda: len(asked)


@ALL
def test_what_is_wrong_for_good_is_named(store, stored, word_tokenizer, tmp_path):
    url, _, data = stored
    rows = np.arange(8)

    def fails(part, change, error, match, methods=("GET", "HEAD")):
        shutil.rmtree(tmp_path / "copies", ignore_errors=True)
        downloads._OPEN.clear()
        store.wrong[:] = [answers(part, change, 10**6, methods)]
        with pytest.raises(error, match=match):
            found = there(url, word_tokenizer, tmp_path, max_skip_fraction=0.0)
            take(found.train(rows), data.steps_per_epoch)
        store.wrong.clear()

    if store.scheme == "http":  # the others know checksums of what they hold
        fails("which.npy", flipped, DataError, "which.npy has other bytes than those")
    else:
        fails("which.npy", flipped, StoreError, "the store has not done it for 1 s")
    fails("which.npy", unavailable, StoreError, "which.npy is .*: the store has not done it")
    fails("packed.json", flipped, (DataError, StoreError), "packed.json")
    tar = "images-00001.tar"
    if store.scheme == "http":
        fails(tar, flipped, DataError, "its bytes are not those that were packed", ("GET",))
    if store.scheme != "gs":  # whose sizes come by GET, too
        fails(tar, longer, StoreError, "more than the part that was asked for", ("GET",))
        fails(tar, short, StoreError, "tar is read: the store has not done it for 1 s", ("GET",))

    def forbidden(status, body):
        return 403, b""

    fails("which.npy", forbidden, StoreError, "the store refuses")
    assert_same(there(url, word_tokenizer, tmp_path), data)


def test_what_is_no_set_is_refused(store, stored, word_tokenizer, tmp_path, capsys):
    url, local, _ = stored
    with pytest.raises(DataError, match=r"has no packed.json: of stores, the sets that"):
        there(f"{url}-other", word_tokenizer, tmp_path)
    with pytest.raises(DataError, match="are supported"):
        there("ftp://runs/set", word_tokenizer, tmp_path)
    with pytest.raises(DataError, match="exists; name another folder"):
        packed(stored[2], url)
    RemoteFolder(url).remove("images-00001.tar")
    with pytest.raises(DataError, match=r"images-00001.tar is missing, and .* bytes were packed"):
        there(url, word_tokenizer, tmp_path)
    assert run(["data", "verify", url]) == 1
    assert "images-00001.tar: missing" in capsys.readouterr().out
    whole = (local / "images-00001.tar").read_bytes()
    RemoteFolder(url).write("images-00001.tar", whole + b"\0")
    with pytest.raises(DataError, match=r"has .* bytes, and .* bytes were packed"):
        there(url, word_tokenizer, tmp_path)
    RemoteFolder(url).write("images-00001.tar", b"\0" + whole[1:])
    assert run(["data", "verify", url]) == 1
    assert "images-00001.tar: other bytes" in capsys.readouterr().out
    RemoteFolder(url).write("images-00001.tar", whole)
    assert run(["data", "verify", url]) == 0


BAD = [
    *("../other.npy", "/tmp/other.npy", "a/../../b", "", "a\0b", "a?b", "a#b", "./a"),
]


@pytest.mark.parametrize("files", [[], 3, {"a": 1}, {"a": [-1, ""]}, *({x: [1, ""]} for x in BAD)])
def test_an_index_that_is_none_of_ours_is_refused(tmp_path, word_tokenizer, files):
    """Its digest says that it came as it was written, not by whom."""
    index = {"format": packed_files.FORMAT, "files": files}
    document = {"index": index, "digest": packed_files.digest_of(index)}
    (tmp_path / "packed.json").write_text(json.dumps(document))
    match = "packed.json is damaged" if files != [] else "is damaged|facts"
    with pytest.raises((DataError, KeyError), match=match):
        opened(str(tmp_path), word_tokenizer, SIZES)


def test_a_small_limit_of_copies(stored, word_tokenizer, tmp_path, monkeypatch):
    """Images that are removed are read again; the newest stay."""
    url, local, data = stored
    found = there(url, word_tokenizer, tmp_path, download_gb=12_000 / 2**30, image_cache_mb=0)
    assert_same(found, data, 0, 3 * data.steps_per_epoch)
    (folder,) = (tmp_path / "copies").iterdir()
    on_disk = sum(path.stat().st_blocks * 512 for path in folder.glob("*.tar"))
    whole = sum(path.stat().st_size for path in local.glob("*.tar"))
    assert 0 < on_disk <= 12_000 + 3_000 + 8 * 4096 < whole, (on_disk, whole)


def test_a_full_disk_is_said_once_and_stops_nothing(
    stored, word_tokenizer, tmp_path, monkeypatch, caplog
):
    url, _, data = stored

    def full(*args):
        raise OSError(28, "No space left on device")

    found = there(url, word_tokenizer, tmp_path, image_cache_mb=0)
    monkeypatch.setattr(os, "pwrite", full)
    assert_same(found, data)
    assert caplog.text.count("No space left on device; images of") == 1

    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage)
    downloads._OPEN.clear()
    with pytest.raises(DataError, match=r"has room for 0.0 GiB.*; set data.download_dir"):
        opened(url, word_tokenizer, SIZES, download_dir=str(tmp_path / "other"))


OPENING = """
import sys, numpy as np
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.tokenizer import chat_tokenizer
from tests.data.stored_sets import BASE, SIZES
import dataclasses
url, copies, tokenizer = sys.argv[1:]
config = dataclasses.replace(BASE, download_dir=copies)
data = load_dataset(config, chat_tokenizer.load(tokenizer), spec=url, **SIZES)
print("opened", flush=True)
batches = data.train(np.arange(8))
for _ in range(data.steps_per_epoch):
    next(batches)
print("read", flush=True)
"""


def test_kills_while_files_are_copied(store, stored, word_tokenizer, tmp_path):
    """Processes that share the copies are killed anywhere; the last one has the right batches."""
    url, local, data = stored
    store.wrong.append(answers(store.path(url.rpartition("/")[2])[:-1], slow, 10**6, ("GET",)))
    command = [sys.executable, "-c", OPENING, url, tmp_path / "copies", local / "tokenizer"]
    rng = random.Random(0)
    for _ in range(3):
        both = [subprocess.Popen(command, env=os.environ | store.env) for _ in range(2)]
        copies, begun = tmp_path / "copies", time.monotonic()
        while not copies.exists() and time.monotonic() < begun + 60:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 1.5))
        for process in both:
            process.kill()
            process.wait()
    store.wrong.clear()
    assert_same(there(url, word_tokenizer, tmp_path), data, 0, data.steps_per_epoch)


def slow(status, body):
    time.sleep(0.02)
    return status, body


@on_s3
def test_a_killed_pack_is_no_set(store, stored, word_tokenizer, tmp_path):
    data = stored[2]
    url = f"{stored[0]}-killed"
    store.wrong.append(answers("length.npy", unavailable, 10**6, ("POST", "PUT")))
    with pytest.raises(StoreError, match=r"length.npy is written: the store has not done it"):
        packed(data, url)
    assert not RemoteFolder(url).exists("packed.json")
    store.wrong.clear()
    packed(data, url)
    assert not [name for name in RemoteFolder(url).files() if name.startswith("packing-")]
    assert_same(there(url, word_tokenizer, tmp_path), data)


def test_a_server_that_gives_whole_files_alone_is_refused(album, word_tokenizer, tmp_path):
    """As Python's own does: a step would read gigabytes for each image."""
    packed(of_files(album(20), word_tokenizer, SIZES), tmp_path / "set")
    plain = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), plain) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(StoreError, match=r"ignores Range.*; use another one") as found:
            there(f"http://127.0.0.1:{server.server_port}/set", word_tokenizer, tmp_path)
        server.shutdown()
    assert not found.value.passes


@ALL
def test_files_that_a_store_has_lost(store, stored, word_tokenizer, tmp_path):
    """An array is missed at the start; images that are gone later are no images' fault."""
    url, _, data = stored
    found = there(url, word_tokenizer, tmp_path, image_cache_mb=0)

    def gone(status, body):
        return 404, b""

    for path in (tmp_path / "copies").rglob("*.tar"):
        path.unlink()
    store.wrong.append(answers("images-0000", gone, 10**6))
    with pytest.raises(StoreError, match=r"images-0000\d.tar is gone, and was there at the start"):
        take(found.train(np.arange(8)), data.steps_per_epoch)
    store.wrong[:] = [answers("which.npy", gone, 10**6)]
    downloads._OPEN.clear()
    with pytest.raises(DataError, match=r"span_which.npy is missing; copy the set again"):
        opened(url, word_tokenizer, SIZES, download_dir=str(tmp_path / "other"))


def test_two_pack_at_one_url(store, stored, tmp_path):
    url, data = f"{stored[0]}-two", stored[2]
    marks = [f"packing-{host}-{pid}.txt" for host, pid in (("far", 1), (socket.gethostname(), 1))]
    for mark in marks:
        RemoteFolder(url).write(mark, b"")
        with pytest.raises(DataError, match=f"another process.*; wait for it, or remove .*{mark}"):
            packed(data, url)
        RemoteFolder(url).remove(mark)
    RemoteFolder(url).write(f"packing-{socket.gethostname()}-{2**22 + 1}.txt", b"")  # of a dead one
    with (
        pytest.raises(DataError, match="exists; name another folder"),
        packed_files.new_folder(url) as folder,
    ):
        (folder / "packed.json").write_text("mine")
        RemoteFolder(url).write("packed.json", b"theirs")  # meanwhile
    assert RemoteFolder(url).read("packed.json") == b"theirs"
    assert list(RemoteFolder(url).files()) == ["packed.json"]


def test_an_image_that_the_store_has_wrongly_is_skipped_by_name(stored, word_tokenizer, tmp_path):
    url, local, _ = stored
    shard = bytearray((local / "images-00000.tar").read_bytes())
    shard[600] ^= 1
    RemoteFolder(url).write("images-00000.tar", bytes(shard))
    found = there(url, word_tokenizer, tmp_path, on_bad_record="skip")
    take(found.train(np.arange(8)), found.steps_per_epoch)
    assert {p.reason for p in found.skipped} == {
        "can't be read: its bytes are not those that were packed"
    }
    assert len({p.id.partition("/")[0] for p in found.skipped}) == 1


def test_names_of_files_of_this_machine(album, word_tokenizer, tmp_path):
    data = of_files(album(20), word_tokenizer, SIZES)
    url = f"file://{packed(data, f'file://{tmp_path}/set')}".replace("file://file://", "file://")
    assert_same(opened(url, word_tokenizer, SIZES), data)
    assert (tmp_path / "set" / "packed.json").is_file()
    assert run(["data", "verify", url]) == 0
    assert list(packed_files.damaged(url)) == []
