"""The folder of a packed set: whole or absent, whatever happens, and nobody else's files."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxvlm.data.errors import DataError
from jaxvlm.data.packed import packed_files
from tests.data.stored_sets import SIZES, of_files, packed


def test_a_failure_leaves_nothing(album, word_tokenizer, tmp_path, monkeypatch):
    data = of_files(album(), word_tokenizer, SIZES)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "tokens.npy")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match=r"tokens.npy can't be written: No space left on device"):
        packed(data, tmp_path / "set")
    assert list(tmp_path.glob("set*")) == []


def test_two_processes_pack_into_one_folder(tmp_path):
    """The first one is there; the other says so, and removes its own."""
    target = tmp_path / "set"
    with (
        pytest.raises(DataError, match="set exists; name another folder"),
        packed_files.new_folder(str(target)) as folder,
    ):
        (folder / "mine").touch()
        target.mkdir()  # by another process
        (target / "theirs").touch()
    assert [path.name for path in target.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_what_is_not_ours_stays(tmp_path, monkeypatch):
    other = tmp_path / "elsewhere"
    host = socket.gethostname()
    (other / "precious").mkdir(parents=True)
    names = ["set.partial", "set.partial-notes", f"set.partial-otherhost-{2**22 + 1}"]
    for name in names:
        (tmp_path / name / "precious").mkdir(parents=True)
    (tmp_path / f"set.partial-{host}-{2**22 + 2}").symlink_to(other)
    (tmp_path / f"set.partial-{host}-{os.getpid()}0000000").mkdir()  # of a process that is gone
    with packed_files.new_folder(str(tmp_path / "set")):
        pass
    assert all((tmp_path / name / "precious").is_dir() for name in names)
    assert (other / "precious").is_dir()
    assert len(list(tmp_path.iterdir())) == len(names) + 3
    monkeypatch.setenv("HOME", str(tmp_path))
    for output in ("~/set", "~", "/", "."):
        with (
            pytest.raises(DataError, match="exists; name another folder"),
            packed_files.new_folder(output),
        ):
            pass


def test_images_that_change_while_they_are_packed(album, word_tokenizer, tmp_path, monkeypatch):
    data = of_files(album(20), word_tokenizer, SIZES)
    image = pathlib.Path(data.corpus.paths[3])
    whole = image.read_bytes()
    image.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="images changed while they were packed"):
        packed(data, tmp_path / "set")
    image.unlink()
    with pytest.raises(DataError, match=f"{image.name}: missing file; it could be read before"):
        packed(data, tmp_path / "set")
    assert not list(tmp_path.glob("set*"))


def test_killed_while_packing(album, word_tokenizer, tmp_path):
    """There is no set until it is whole; packing again gives the bytes of an undisturbed one."""
    data = of_files(album(20), word_tokenizer, SIZES)
    expected = pathlib.Path(packed(data, tmp_path / "whole"))
    script = f"""
import os, signal, sys
from jaxvlm.data.conversations import packed_set
from jaxvlm.data.packed import packed_files
with packed_files.new_folder({str(tmp_path / "set")!r}) as folder:
    (folder / "images-00000.tar").write_bytes(b"half")
    (folder / "tokenizer").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "set").exists() and len(list(tmp_path.glob("set.partial-*"))) == 1
    again = pathlib.Path(packed(data, tmp_path / "set"))
    files = sorted(path.relative_to(expected) for path in expected.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert all((again / name).read_bytes() == (expected / name).read_bytes() for name in files)
    assert not list(tmp_path.glob("set.partial-*"))
