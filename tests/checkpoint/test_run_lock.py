"""One run at a time: in an object store, and in a folder that hosts share."""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxvlm.checkpoint import run_lock, run_record
from jaxvlm.config import ConfigError
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder


def no_locks(*_):
    raise OSError(37, "No locks available")


def test_a_second_run_is_refused_and_a_released_lock_is_free_at_once(url, brisk):
    first = run_lock.NumberedLock(RemoteFolder(url), url)
    with (
        first,
        pytest.raises(ConfigError, match=rf"another run is writing to it \(process {os.getpid()}"),
    ):
        run_lock.NumberedLock(RemoteFolder(url), url).__enter__()
    begun = time.monotonic()
    with run_lock.NumberedLock(RemoteFolder(url), url) as second:
        assert time.monotonic() - begun < 1
        second.check()


def test_ctrl_c_releases_a_lock_too(url):
    """In a notebook the process lives on, and the same cell may be run again."""
    with contextlib.suppress(KeyboardInterrupt), run_lock.NumberedLock(RemoteFolder(url), url):
        raise KeyboardInterrupt
    begun = time.monotonic()
    with run_lock.NumberedLock(RemoteFolder(url), url):
        assert time.monotonic() - begun < run_lock.STALE / 2


def test_a_lock_of_a_lost_machine_is_taken_over_and_its_run_stops(url, brisk, monkeypatch):
    monkeypatch.setattr(run_lock.platform, "node", lambda: "another machine")
    lost = run_lock.NumberedLock(RemoteFolder(url), url)
    monkeypatch.setattr(lost, "_renew", lambda: None)
    lost._thread = threading.Thread(target=lambda: None)
    lost.__enter__()
    monkeypatch.undo()
    monkeypatch.setattr(run_lock, "STALE", 1.5)
    begun = time.monotonic()
    with run_lock.NumberedLock(RemoteFolder(url), url) as second:
        assert 1.5 < time.monotonic() - begun < 10
        second.check()
        with pytest.raises(StoreError, match="another run has taken over"):
            lost.check()
        assert RemoteFolder(url).names(".locks") == ["000002"]


@pytest.mark.parametrize("where", ["object store", "folder"])
def test_a_killed_runs_lock_is_free_at_once_on_its_machine(store, url, where, tmp_path):
    made = (
        "RemoteFolder(sys.argv[1])"
        if where == "object store"
        else "run_lock.Folder(pathlib.Path(sys.argv[1]))"
    )
    program = f"""
import os, pathlib, signal, sys
from jaxvlm.checkpoint import run_lock
from jaxvlm.stores.object_store import RemoteFolder
run_lock.NumberedLock({made}, sys.argv[1]).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = url if where == "object store" else str(tmp_path)
    done = subprocess.run([sys.executable, "-c", program, folder], env=os.environ | store.env)
    assert done.returncode == -signal.SIGKILL
    files = RemoteFolder(url) if where == "object store" else run_lock.Folder(tmp_path)
    begun = time.monotonic()
    with run_lock.NumberedLock(files, folder):
        assert time.monotonic() - begun < 5


def test_one_of_many_runs_gets_the_lock(url, brisk):
    held = []

    def try_to(i):
        with (
            contextlib.suppress(ConfigError),
            run_lock.NumberedLock(RemoteFolder(url), url) as lock,
        ):
            held.append(i)
            time.sleep(1)
            lock.check()
            assert held[-1] == i
            held.append(-i)
            return True

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        won = [x for x in pool.map(try_to, range(1, 6)) if x]
    pairs = list(zip(held[::2], held[1::2], strict=True))
    assert won and all(a == -b for a, b in pairs)


def test_a_folder_that_hosts_share_is_locked_by_a_file(tmp_path, monkeypatch, brisk):
    with run_record.locked(tmp_path) as is_shared:
        assert is_shared is run_record._is_shared(tmp_path)
    monkeypatch.setattr(run_record.fcntl, "flock", no_locks)
    with run_record.locked(tmp_path) as is_shared, run_lock.of_folder(tmp_path):
        assert is_shared and (tmp_path / ".locks" / "000001").is_file()
        with pytest.raises(ConfigError, match="another run is writing"):
            run_lock.of_folder(tmp_path).__enter__()
    with run_lock.of_folder(tmp_path):
        pass


@pytest.mark.parametrize(
    "kind, is_shared",
    [("nfs4", True), ("fuse.gcsfuse", True), ("lustre", True), ("ext4", False), ("overlay", False)],
)
def test_file_systems_that_hosts_share_are_known(kind, is_shared, tmp_path, monkeypatch):
    lines = (
        "/dev/x / ext4 rw 0 0",
        f"h:/x {tmp_path} {kind} rw 0 0",
        f"p {tmp_path}/y proc rw 0 0",
    )
    monkeypatch.setattr(run_record.pathlib.Path, "read_text", lambda self: "\n".join(lines))
    assert run_record._is_shared(tmp_path / "run") is is_shared
    assert not run_record._is_shared(pathlib.Path("/elsewhere"))


def test_a_store_that_overwrites_what_is_to_be_created_is_refused(tmp_path):
    class Careless(run_lock.Folder):
        def create(self, name, data):
            (self.root / name).parent.mkdir(exist_ok=True)
            self.write(name, data)
            return True

    with pytest.raises(ConfigError, match="ignores the header If-None-Match"):
        run_lock.NumberedLock(Careless(tmp_path), "s3://b/run").__enter__()
