"""``jaxvlm cache``: what it says of a store, what it removes, and what it never touches."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from jaxvlm.cache.store import maintenance, segment_files
from jaxvlm.cache.store.rows import Store
from jaxvlm.cli.main import run

DAY = 86_400


def row(i: int) -> np.ndarray:
    return (np.arange(64).reshape(4, 16) + i).astype(ml_dtypes.bfloat16)


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


def write(folder, tower: str, rows=range(6), days_ago: float = 0.0) -> pathlib.Path:
    """An identity with two rows a segment file; returns its folder."""
    with Store(folder, {"vision_encoder": tower}) as store:
        for i in rows:
            store.put(key(i), row(i))
            if i % 2:
                store.flush()
    used = time.time() - days_ago * DAY
    os.utime(store.folder / segment_files.IDENTITY, (used, used))
    return store.folder


def found(folder, tower: str, rows=range(6)) -> list[int]:
    store = Store(folder, {"vision_encoder": tower}, on_warning=lambda text: None)
    got = {i: store.get(key(i)) for i in rows}
    assert all(x.tobytes() == row(i).tobytes() for i, x in got.items() if x is not None)
    return [i for i, x in got.items() if x is not None]


def damage(folder: pathlib.Path) -> None:
    """One file that can't be read, one row in another that can't."""
    first, second, *_ = segment_files.list_folder(folder).segments
    first.write_bytes(first.read_bytes()[:-1])
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)


def says(capsys, *argv: str, code: int = 0) -> tuple[str, dict]:
    """What a command prints for people, and its JSON."""
    assert run(["cache", *map(str, argv), "--json"]) == code
    text, _, last = capsys.readouterr().out.strip().rpartition("\n")
    return text, json.loads(last)


def fails(capsys, *argv: str) -> str:
    assert run(["cache", *map(str, argv)]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and "Traceback" not in error
    return error


def test_stat_says_whose_rows_there_are_and_what_they_take(capsys, tmp_path):
    write(tmp_path, "siglip", days_ago=3)
    write(tmp_path, "clip", range(2))
    text, told = says(capsys, "stat", tmp_path)
    assert "2 identities, 8 rows" in text and "vision_encoder: siglip" in text
    assert "6 rows in 3 files" in text and "used 3.0 days ago" in text
    assert [each["facts"]["vision_encoder"] for each in told["identities"]] == ["clip", "siglip"]
    assert told["rows"] == 8
    assert told["bytes"] == sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert told["identities"][1]["raw_bytes"] == 6 * row(0).nbytes


def test_verify_is_content_with_what_is_good(capsys, tmp_path):
    write(tmp_path, "clip")
    text, told = says(capsys, "verify", tmp_path)
    assert "6 rows" in text and "all good" in text
    assert told["rows"] == 6 and told["bad"] == []


def test_verify_names_what_is_bad_and_prune_removes_it(capsys, tmp_path):
    folder = write(tmp_path, "clip")
    write(tmp_path, "siglip")
    damage(folder)
    text, told = says(capsys, "verify", tmp_path, code=1)
    assert "2 bad" in text and "truncated" in text and "checksum" in text
    assert f"jaxvlm cache prune {tmp_path}" in text
    assert len(told["bad"]) == 2 and told["rows"] == 9 and told["exit_code"] == 1
    before = sorted((p, p.stat().st_size) for p in tmp_path.rglob("*"))
    text, would = says(capsys, "prune", tmp_path, "--dry_run")
    assert (
        "would be removed: 0 identities, 1 file that can't be read, 1 bad and 0 duplicate rows"
        in text
    )
    assert sorted((p, p.stat().st_size) for p in tmp_path.rglob("*")) == before
    text, went = says(capsys, "prune", tmp_path)
    assert "removed: 0 identities, 1 file that can't be read" in text
    assert would == went | {"dry_run": True}
    assert says(capsys, "verify", tmp_path)[1]["rows"] == 9
    assert len(found(tmp_path, "clip")) == 3 and len(found(tmp_path, "siglip")) == 6
    assert maintenance.prune(tmp_path)[:6] == ([], 0, 0, 0, 0, 0)


def test_prune_keeps_one_of_rows_that_are_there_twice(tmp_path):
    folder = write(tmp_path, "clip", range(4))
    for path in segment_files.list_folder(folder).segments:
        os.rename(path, tmp_path / path.name)
    write(tmp_path, "clip", range(2, 8))
    for path in tmp_path.glob("*.safetensors"):
        os.rename(path, folder / path.name)
    assert maintenance.prune(tmp_path).double_rows == 2
    assert found(tmp_path, "clip", range(8)) == list(range(8))
    assert (
        sum(
            len(segment_files.read_segment(p).rows)
            for p in segment_files.list_folder(folder).segments
        )
        == 8
    )


def test_prune_keeps_a_good_row_where_its_double_is_bad(tmp_path):
    folder = write(tmp_path, "clip", range(2))
    (path,) = segment_files.list_folder(folder).segments
    bad = bytearray(path.read_bytes())
    bad[-1] ^= 1
    newer = folder / f"{'0' * 32}.safetensors"
    newer.write_bytes(bad)
    os.utime(newer, (time.time() + 9,) * 2)
    pruned = maintenance.prune(tmp_path)
    assert (pruned.bad_rows, pruned.double_rows) == (1, 1)
    assert found(tmp_path, "clip", range(2)) == [0, 1]


def test_prune_removes_what_dead_writers_left_and_no_live_ones(tmp_path):
    folder = write(tmp_path, "clip")
    dead, live = folder / f"{'a' * 32}.tmp", folder / f"{'b' * 32}.tmp"
    for path in (dead, live):
        path.write_bytes(b"half a segment")
    os.utime(dead, (time.time() - 1.1 * DAY,) * 2)
    assert maintenance.prune(tmp_path).temporary == 1
    assert live.exists() and not dead.exists()


def test_prune_removes_what_no_run_has_read_for_long(capsys, tmp_path):
    old, new = write(tmp_path, "clip", days_ago=31), write(tmp_path, "siglip", days_ago=29)
    (old / "notes.txt").write_text("not the store's")
    _, went = says(capsys, "prune", tmp_path, "--unused_days=30")
    assert went["identities"] == [old.name]
    assert new.is_dir() and [path.name for path in old.iterdir()] == ["notes.txt"]
    assert found(tmp_path, "siglip") == list(range(6))


def test_prune_keeps_so_much_of_what_was_used_last(capsys, tmp_path):
    folders = [write(tmp_path, f"tower {i}", days_ago=3 - i) for i in range(3)]
    size = maintenance.stat(tmp_path)[0].bytes
    _, would = says(capsys, "prune", tmp_path, f"--keep_gb={2.5 * size / 1e9}", "--dry_run")
    _, went = says(capsys, "prune", tmp_path, f"--keep_gb={2.5 * size / 1e9}")
    assert went["identities"] == would["identities"] == [folders[0].name]
    assert went["bytes"] == size and went["left"] == would["left"] == 2 * size
    text, went = says(capsys, "prune", tmp_path, "--keep_gb=1e-9")
    assert went["identities"] == [folders[1].name] and "above --keep_gb" in text
    assert found(tmp_path, "tower 2") == list(range(6))


def test_what_is_no_store_is_never_touched(capsys, tmp_path):
    folder = write(tmp_path / "store", "clip")
    other = tmp_path / "photos"
    (other / ("0" * 32)).mkdir(parents=True)
    theirs = other / ("0" * 32) / f"{'1' * 32}.tmp"
    theirs.write_bytes(b"precious")
    (other / ("0" * 32) / "identity.json").write_text((folder / "identity.json").read_text())
    os.utime(theirs, (0, 0))
    (tmp_path / "a file").write_text("")
    for verb in ("stat", "verify", "prune"):
        assert "no store of visual tokens" in fails(capsys, verb, other)
        assert "no store of visual tokens" in fails(capsys, verb, tmp_path / "nowhere")
        assert "no store of visual tokens" in fails(capsys, verb, tmp_path / "a file")
        assert "one identity of a store" in fails(capsys, verb, folder)
    assert theirs.read_bytes() == b"precious"


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "usage: jaxvlm cache stat|verify|prune DIR"),
        (["stats", "x"], "usage: jaxvlm cache stat|verify|prune DIR"),
        (["stat", "x", "--dry_run"], "cache stat takes no --dry_run"),
        (["prune", "x", "--keep_gb=-1"], "keep_gb"),
    ],
)
def test_bad_usage_is_one_line(capsys, argv, says):
    assert says in fails(capsys, *argv)


def test_a_folder_that_can_not_be_changed_is_one_line(capsys, tmp_path, monkeypatch):
    folder = write(tmp_path, "clip")
    damage(folder)

    def no(self, **more):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(pathlib.Path, "unlink", no)
    assert "Permission denied" in fails(capsys, "prune", tmp_path)


def test_it_needs_no_jax(tmp_path):
    write(tmp_path, "clip")
    code = f"""
import sys
from jaxvlm.cli.main import run
assert run(["cache", "--help"]) == 0
assert run(["cache", "verify", {str(tmp_path)!r}]) == 0
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "6 rows" in done.stdout
