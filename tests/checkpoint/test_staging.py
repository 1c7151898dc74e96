"""Checkpoints that lie on the local disk on their way to and from an object store."""

import contextlib
import pathlib
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from loopback_store import on_s3
from remote_checkpoints import newest, saved, state

from jaxvlm.checkpoint import local_copies, restore, run_lock, run_record
from jaxvlm.checkpoint.checkpointer import Checkpointer
from jaxvlm.checkpoint.errors import CheckpointError
from jaxvlm.stores import object_store
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder


def newest_of(url, abstract):
    """Restores as a run does; a Checkpointer makes its own folder first."""
    result = restore.try_read(epath.Path(url) / "2", lambda table: dict(abstract))
    assert not isinstance(result, str), result


@on_s3
@pytest.mark.parametrize("where", ["fetch", "folder"])
def test_a_full_disk_here_is_no_damage_there(store, url, hasty, monkeypatch, where, tmp_path):
    saved(url, 1, 2)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if where == "fetch":
        fs = object_store._filesystem("s3")
        monkeypatch.setattr(fs, "get_file", full)
    else:
        monkeypatch.setattr(local_copies.tempfile, "mkstemp", full)
    abstract = jax.tree.map(jnp.zeros_like, state(0))
    with pytest.raises(StoreError, match=r"No space left on device[^/]*TMPDIR|TMPDIR=.*No space"):
        newest_of(url, abstract)
    monkeypatch.undo()
    assert run_record.committed_steps(epath.Path(url)) == [1, 2] and newest(url) == 2


@on_s3
def test_a_copy_of_a_checkpoint_that_was_written_to_a_disk_is_read(store, url, tmp_path):
    with Checkpointer(tmp_path / "local", 9, "", "max") as checkpointer:
        checkpointer.save(4, state(4), {})
    files = RemoteFolder(url)
    for path in (tmp_path / "local").rglob("*"):
        if path.is_file():
            files.upload(path, path.relative_to(tmp_path / "local").as_posix())
    files.write("4/commit_success.txt", b"")
    assert newest(url) == 4


@on_s3
def test_a_checkpoint_without_a_file_that_was_sent_is_not_complete(store, url):
    saved(url, 1)
    checkpointer = Checkpointer(url, 9, "", "max")
    upload, remote = RemoteFolder.upload, checkpointer._remote

    def loses(file, name):
        if not name.endswith("state/b/0"):
            upload(remote, file, name)

    remote.upload = loses
    checkpointer.save(2, state(2), {})
    with pytest.raises(StoreError, match=r"1 files that were sent are not there, such as 2/state"):
        checkpointer.close()
    assert not checkpointer._staging.folder.exists()
    assert newest(url) == 1 and RemoteFolder(url).names("") == ["1"], "the rest is removed"


@on_s3
def test_what_another_run_completed_meanwhile_deletes_nothing(store, url):
    saved(url, 1)
    with Checkpointer(url, 1, "", "max") as checkpointer:
        checkpointer.restore(jax.tree.map(jnp.zeros_like, state(0)))
        checkpointer.save(2, state(2), {})
        checkpointer.wait()
        RemoteFolder(url).write("7/commit_success.txt", b"")  # of a run that was taken over
    assert run_record.committed_steps(epath.Path(url)) == [2, 7]


@on_s3
@pytest.mark.parametrize(
    "made, why",
    [
        ({"a": jnp.ones(2), "a/0": jnp.ones(3)}, "a/0 would lie in the folder of a"),
        ({"a": jnp.ones((0, 3))}, "a has no elements"),
    ],
)
def test_arrays_that_can_not_be_files_are_refused_by_name(store, url, made, why):
    with (
        pytest.raises(ValueError, match=why),
        Checkpointer(url, 1, "", "max") as checkpointer,
    ):
        checkpointer.save(1, made, {})


def test_folders_of_processes_that_ended_are_removed_and_no_others(tmp_path):
    mine = local_copies.make("run", str(tmp_path))
    host = mine.name.rpartition("-")[0]
    kept = [f"{host}-1-x", "jaxvlm-run-another-host-x", "jaxvlm-other-x"]  # of hosts, of a kind
    for name in (f"{host}-left", *kept):
        (tmp_path / name / "in").mkdir(parents=True)
        (tmp_path / f"{name}.lock").touch()
    kept.append(f"{host}-new")  # a process that is about to make it
    (tmp_path / f"{host}-new").mkdir()
    second = local_copies.make("run", str(tmp_path))

    def folders():
        return {path.name for path in tmp_path.iterdir() if path.is_dir()}

    assert folders() == {mine.name, second.name, *kept}
    local_copies.remove(mine / "some" / "file")
    local_copies.remove(mine)
    assert not mine.exists() and second.exists()
    local_copies.remove_all()
    assert folders() == set(kept) and len(list(tmp_path.glob("*.lock"))) == 3


def test_a_removal_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    folder = local_copies.make("run", str(tmp_path))
    (folder / "file").touch()
    monkeypatch.setattr(local_copies.shutil, "rmtree", lambda path, ignore_errors: None)
    local_copies.remove(folder)  # a thread that still writes to it
    monkeypatch.undo()
    assert (folder / "file").exists()
    local_copies.remove(local_copies.make("run", str(tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", ["rename", "mkdir"])
def test_what_can_not_be_made_leaves_nothing(tmp_path, monkeypatch, fails):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, fails, full)
    with pytest.raises(OSError, match="No space"):
        local_copies.make("run", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_without_locks_nothing_of_others_is_removed(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(local_copies.fcntl, "flock", no_locks)
    first, second = (local_copies.make("run", str(tmp_path)) for _ in range(2))
    assert first.exists() and second.exists()
    local_copies.remove_all()
    assert not list(tmp_path.iterdir())


def test_a_child_removes_nothing_of_its_parent(tmp_path):
    code = (
        "import os, pathlib, sys; from jaxvlm.checkpoint import local_copies; "
        "made = local_copies.make('run', sys.argv[1]); child = os.fork(); "
        "sys.exit(0) if not child else os.waitpid(child, 0); print(made.is_dir())"
    )
    words = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    assert subprocess.check_output(words, text=True).strip() == "True"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how, is_left", [("kill", True), ("_exit", True), ("exit", False)])
def test_a_copy_lives_as_long_as_its_process_or_the_next_one(tmp_path, how, is_left):
    ends = {"kill": "os.kill(os.getpid(), 9)", "_exit": "os._exit(0)", "exit": "sys.exit(0)"}
    code = (
        "import os, sys; from jaxvlm.checkpoint import local_copies; "
        f"local_copies.make('run', sys.argv[1]); {ends[how]}"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert any(path.is_dir() for path in tmp_path.iterdir()) == is_left
    local_copies.remove(local_copies.make("run", str(tmp_path)))
    assert not list(tmp_path.iterdir())


@on_s3
def test_ctrl_c_waits_for_no_store(store, url, monkeypatch):
    """Whose answers take longer than a test."""
    monkeypatch.setattr(run_lock, "HASTE", 0.1)
    checkpointer = Checkpointer(url, 1, "", "max")
    lock = run_lock.NumberedLock(RemoteFolder(url), url)
    answered = threading.Event()
    with contextlib.suppress(KeyboardInterrupt), checkpointer, lock:
        checkpointer.save(1, state(1), {})
        checkpointer._staging.wait = lambda: pytest.fail("it waits")
        lock._thread.join = lambda: answered.wait(20)
        begun = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 10
    answered.set()


@on_s3
def test_a_folder_for_temporary_files_that_is_not_there_is_named(store, url, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/none")
    with pytest.raises(StoreError, match="TMPDIR=/none: no checkpoint can be written") as told:
        Checkpointer(url, 1, "", "max")
    assert not told.value.passes


@on_s3
def test_a_disk_that_fills_up_is_no_failure_of_the_store(store, url, monkeypatch):
    checkpointer = Checkpointer(url, 1, "", "max")

    def full():
        raise ValueError("RESOURCE_EXHAUSTED: Error writing local file: no space")

    monkeypatch.setattr(checkpointer._manager, "wait_until_finished", full)
    with (
        pytest.raises(CheckpointError, match="permissions of TMPDIR, where it lies first") as told,
        checkpointer,
    ):
        checkpointer.save(1, state(1), {})
    assert not isinstance(told.value, StoreError) and not checkpointer._staging.folder.exists()
