"""A store on a disk that fails, under many writers, and killed: never a wrong row, never a stop."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from stored import assert_none_wrong, filled, key_of, row_of, same, segments

from jaxvlm.cache.store import maintenance, segment_files
from jaxvlm.checkpoint import run_record

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("where", ["fsync", "write", "replace"])
def test_a_full_disk_is_said_once_and_the_run_goes_on(opened, monkeypatch, where):
    filled(opened)
    store = opened()

    def full(*args):
        raise OSError(28, "No space left on device")

    if where == "write":
        monkeypatch.setattr(run_record, "open", full, raising=False)
    else:
        monkeypatch.setattr(os, where, full)
    for i in range(6, 12):
        store.put(key_of(i), row_of(i))
        if i == 8:
            store.flush()
            assert store.read_only
    store.flush()
    monkeypatch.undo()
    assert len(opened.said) == 1, opened.said
    assert "No space left on device" in opened.said[0] and "jaxvlm cache prune" in opened.said[0]
    assert assert_none_wrong(store, range(6)) == 6 and store.get(key_of(7)) is None
    assert store.counts().dropped == 6
    assert len(segments(store)) == 2 and not segment_files.list_folder(store.folder).temporary


CHILD = textwrap.dedent(
    """
    import sys, resource
    import numpy as np
    from stored import FACTS, Store, key_of, row_of
    store = Store(sys.argv[1], FACTS, on_warning=lambda text: print(text, flush=True), segment_mb=1)
    """
)


def child(tmp_path, code: str) -> subprocess.Popen:
    """A process that writes to the store."""
    argv = [sys.executable, "-c", CHILD + textwrap.dedent(code)]
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [*argv, str(tmp_path / "store")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def test_a_real_write_that_fails_in_the_midst(opened, tmp_path):
    code = """
    store.put(key_of(0), row_of(0))
    store.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    store.put(key_of(2), np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32))
    store.flush()
    store.put(key_of(4), row_of(4))
    store.close()
    assert store.read_only and store.get(key_of(0)) is not None
    """
    process = child(tmp_path, code)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert said.count("\n") == 1 and "File too large" in said
    store = opened()
    assert assert_none_wrong(store, range(6)) == 1
    assert not segment_files.list_folder(store.folder).temporary and not opened.said


def test_a_folder_that_can_not_be_made_or_written(opened, tmp_path, monkeypatch):
    (tmp_path / "store").write_text("a file")
    store = opened()
    store.put(key_of(0), row_of(0))
    store.flush()
    assert store.read_only and store.get(key_of(0)) is None
    assert len(opened.said) == 1 and "Not a directory" in opened.said[0]


def test_a_read_only_folder_is_read(opened, monkeypatch):
    filled(opened)
    real = open

    def frozen(path, mode="r", **more):
        if "x" in mode or "w" in mode:
            raise OSError(30, "Read-only file system")
        return real(path, mode, **more)

    def no(*args, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(segment_files, "open", frozen, raising=False)
    monkeypatch.setattr(segment_files.os, "utime", no)
    monkeypatch.setattr(segment_files.os, "replace", no)
    store = opened()
    assert assert_none_wrong(store, range(6)) == 6 and not opened.said  # nothing to warn of
    store.put(key_of(6), row_of(6))
    store.flush()
    store.put(key_of(7), row_of(7))
    assert len(opened.said) == 1 and "Read-only file system" in opened.said[0]
    assert store.read_only and store.counts().dropped == 2


def test_rows_that_come_too_fast_are_dropped_and_the_run_does_not_wait(opened, monkeypatch):
    go, real = threading.Event(), os.fsync
    store = opened(segment_mb=1)
    monkeypatch.setattr(os, "fsync", lambda handle: (go.wait(30), real(handle)))
    x = np.zeros((256, 1024), np.float32)  # a whole segment
    begin = time.monotonic()
    for i in range(8):
        store.put(key_of(i), x + i)
    assert time.monotonic() - begin < 10
    assert store.counts().dropped == 4
    assert len(opened.said) == 1 and "faster than the disk" in opened.said[0]
    go.set()
    store.flush()
    store.put(key_of(6), x + 6)
    store.close()
    there = [opened().get(key_of(i)) is not None for i in range(8)]
    assert there == [True, True, True, True, False, False, True, False]


def test_a_store_that_is_pruned_under_a_run(opened):
    filled(opened)
    store = opened()
    for path in [*segments(store), store.folder / segment_files.IDENTITY]:
        path.unlink()
    store.folder.rmdir()
    assert assert_none_wrong(store, range(6)) == 0
    store.put(key_of(0), row_of(0))
    store.close()
    assert len(opened.said) == 3  # two files are gone, and it can't be written


def test_threads_share_a_store(opened):
    store, wrong = opened(segment_mb=1), []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            i = rng.randrange(60)
            got = store.get(key_of(i))
            if got is not None and not same(got, i):
                wrong.append(i)
            store.put(key_of(i), row_of(i))
            if rng.random() < 0.05:
                store.flush()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    store.close()
    assert not wrong and not opened.said
    written = [key for path in segments(store) for key in segment_files.read_segment(path).rows]
    assert len(written) == len(set(written)) == store.counts().rows
    assert assert_none_wrong(opened(), range(60)) == len(written)


WRITES = """
for i in range({first}, 100000):
    store.put(key_of(i), row_of(i, {width}))
    if i % 5 == 4:
        store.flush()
        print(i, flush=True)
"""


def test_killed_at_any_moment(opened, tmp_path):
    """``kill -9`` of a process that writes without pause: what it reported is there and right."""
    rng, width = random.Random(), 30_000
    for first in (0, 1000, 2000, 3000):
        process = child(tmp_path, WRITES.format(first=first, width=width))
        lines = [process.stdout.readline() for _ in range(2)]
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        said = "".join(lines) + process.communicate(timeout=60)[0]
        last = int(said.rpartition("\n")[0].split()[-1])
        store = opened()
        assert assert_none_wrong(store, range(first, last + 1), width) == last + 1 - first
        assert_none_wrong(store, range(last + 1, last + 20), width)
    assert not opened.said
    assert not any(checked.bad for checked in maintenance.verify(tmp_path / "store"))


def test_two_processes_write_at_the_same_time(opened, tmp_path):
    code = """
    for i in range({}, {}):
        store.put(key_of(i), row_of(i))
        i % 7 or store.flush()
    store.close()
    """
    both = [child(tmp_path, code.format(0, 120)), child(tmp_path, code.format(80, 200))]
    for process in both:
        assert process.communicate(timeout=60)[0] == "" and process.returncode == 0
    store = opened()
    assert assert_none_wrong(store, range(200)) == 200
    assert store.counts().rows == 200 and not opened.said
