"""A run's folder in an object store: what is fetched, sent and removed."""

import contextlib
import pathlib
import time
from urllib.parse import unquote

import pytest
from loopback_store import answers, both, unavailable

from jaxvlm.checkpoint import local_copies, run_folder, run_record
from jaxvlm.config import ConfigError
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder
from jaxvlm.trainer import run_files


def test_what_changes_is_sent_and_what_is_gone_is_removed(url, monkeypatch):
    monkeypatch.setattr(run_folder, "EVERY", 0.1)
    files = RemoteFolder(url)
    files.write("config.json", b"old")
    files.write("part.tmp/x", b"half")
    files.write("checkpoints/3/record", b"large")
    folder = run_files.folder_of(url)
    assert {p.name for p in folder.iterdir()} == {"config.json", ".url"}
    assert run_record.checkpoints_of(folder) == f"{url}/checkpoints"
    assert not run_record.has_checkpoint(folder)
    files.write(f"checkpoints/3/{run_record.COMMITTED}", b"")
    assert run_record.has_checkpoint(folder)
    with contextlib.ExitStack() as stack:
        run_folder.open_for_run(folder, stack)
        (folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"st')
        (folder / "config.json").write_text("new")
        (folder / "tokenizer.tmp").mkdir()
        (folder / "tokenizer.tmp" / "x").write_text("half")
        for _ in range(100):
            if files.exists("metrics.jsonl"):
                break
            time.sleep(0.1)
        assert files.read("metrics.jsonl") == b'{"step": 1}\n'
        (folder / "tokenizer.tmp").rename(folder / "tokenizer")
        (folder / "config.json").unlink()
    names = set(files.files(without=[".locks", "checkpoints", "part.tmp"]))
    assert names == {"config.json", "metrics.jsonl", "tokenizer/x"}, "a run never removes it"
    assert run_record.shown(folder / "a.png") == f"{url}/a.png"


def test_what_a_run_removes_is_removed(url):
    for name in ("config.json", "host_cache/3/x", "tokenizer/old"):
        RemoteFolder(url).write(name, b"1")
    folder = run_files.folder_of(url)
    with contextlib.ExitStack() as stack:
        run_folder.open_for_run(folder, stack)
        for name in ("config.json", "host_cache/3/x", "tokenizer/old"):
            (folder / name).unlink()
    with contextlib.ExitStack() as stack:  # the same copy again
        run_folder.open_for_run(folder, stack)
    assert set(RemoteFolder(url).files(without=[".locks"])) == {"config.json"}


def test_a_folder_of_something_else_is_refused(url):
    RemoteFolder(url).write("first/config.json", b"{}")
    for use in (run_files.folder_of, lambda url: run_folder.local_to_read(url, "checkpoint")):
        with pytest.raises(ConfigError, match=r"such as first/config\.json"):
            use(url)
    with pytest.raises(ConfigError, match="there is no such bucket"):
        run_files.folder_of("gs://no-such-bucket/run")
    with pytest.raises(ConfigError, match="as text, not as a path"):
        run_files.folder_of(pathlib.Path(url))


def test_a_run_that_is_made_anew_is_read_anew(url):
    RemoteFolder(url).write("config.json", b"1")
    first = run_folder.local_to_read(url, "checkpoint")
    assert run_folder.local_to_read(url + "/", "checkpoint") == first
    RemoteFolder(url).write("config.json", b"2")
    assert (run_folder.local_to_read(url, "checkpoint") / "config.json").read_bytes() == b"2"
    local_copies.remove_all()
    assert not first.exists()


def test_a_folder_that_changed_after_it_was_read_is_refused(url):
    RemoteFolder(url).write("config.json", b"1")
    folder = run_files.folder_of(url)
    RemoteFolder(url).write("config.json", b"2")
    with contextlib.ExitStack() as stack, pytest.raises(ConfigError, match="start again"):
        run_folder.open_for_run(folder, stack)


def test_what_can_not_be_sent_at_the_end_is_an_error(store, url, hasty):
    folder = run_files.folder_of(url)
    with pytest.raises(StoreError, match="metrics"), contextlib.ExitStack() as stack:
        run_folder.open_for_run(folder, stack)
        (folder / "metrics.jsonl").write_text("{}\n")
        store.wrong.append(answers("upload", unavailable, times=10_000, methods="POST"))


@both
def test_what_is_written_is_sent_at_the_end_or_not_at_all(store, url, tmp_path):
    files = RemoteFolder(url)
    with run_folder.sent(url, "--output") as folder:
        (folder / "part").mkdir(parents=True)
        for name in ("config.json", "part/x"):
            (folder / name).write_text(name)
        assert not files.files()
    assert not folder.exists()
    assert {name: files.read(name) for name in files.files()} == {
        "config.json": b"config.json", "part/x": b"part/x",
    }  # fmt: skip
    uploads = [line for line in store.seen if line.startswith(("POST", "PUT"))]
    assert "config.json" in unquote(uploads[-1]) or store.scheme == "gs"
    with (
        pytest.raises(ConfigError, match=f"--output={url} is not empty"),
        run_folder.sent(url, "--output"),
    ):
        pass
    with (
        pytest.raises(ZeroDivisionError),
        run_folder.sent(f"{url}-2", "--output") as folder,
    ):
        folder.mkdir(parents=True)
        (folder / "half").write_text("x")
        raise ZeroDivisionError
    assert not folder.exists() and not RemoteFolder(f"{url}-2").files()
    with run_folder.sent(str(tmp_path), "--output") as folder:
        assert folder == tmp_path
    with (
        pytest.raises(ConfigError, match="there is no such bucket"),
        run_folder.sent(f"{store.scheme}://none/x", "--output"),
    ):
        pass


def test_a_folder_without_a_run_is_named(url):
    with pytest.raises(ConfigError, match=f"{url} holds no run"):
        run_folder.local_to_read(url, "checkpoint")
    assert run_folder.local_to_read(pathlib.Path("x"), "checkpoint") == pathlib.Path("x")
