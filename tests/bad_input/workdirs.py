"""A run's own folder with one thing wrong in it, handed to each command that reads such folders."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.bad_input import values

COMMANDS = {
    "train": "conversations",
    "eval": "conversations",
    "generate": "conversations",
    "train encoder": "encoder",
    "embed": "encoder",
    "export": "encoder",
}
"""Command -> the run that it is given; each is trained by the recipe of this name."""
DATA = {"conversations": "good_conversations.jsonl", "encoder": "good_pairs.jsonl"}
DAMAGE = (
    *("empty", "cut", "bytes", "json", "json", "text", "deleted", "folder", "pipe"),
    *("device", "dangling link", "link out", "swapped", "another run's", "no folder"),
)


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, bytes]:
    """("workdir", JSON of which file, what is wrong with it, and the command)."""
    # One number for all of it: what is drawn part by part is drawn again with one part changed.
    chance = random.Random(draw(st.integers(0, 2**63)))
    given = {
        "file": [chance.randrange(1000), chance.randrange(1000)],
        "damage": chance.choice(DAMAGE),
        "at": chance.randrange(1000),
        "value": chance.choice(values.ODD),
        "text": chance.choice(values.RAW),
        "command": chance.choice(list(COMMANDS)),
    }
    return "workdir", json.dumps(given).encode()


def train(run: Callable[..., Any], shared: pathlib.Path) -> None:
    """Train the runs that are damaged."""
    for kind in sorted(set(COMMANDS.values())):
        recipe = f"--config={shared}/{kind}.py:{shared}/inputs/{DATA[kind]}"
        said = run(["train", recipe, f"--workdir={shared}/{kind}"])
        assert said.status == 0, said.err


def enter(run: Callable[..., Any], folder: pathlib.Path, shared: pathlib.Path, data: bytes) -> Any:
    """Damage a copy of a run as drawn, and hand it to the drawn command."""
    given = json.loads(data)
    kind = COMMANDS[given["command"]]
    workdir = folder / "run"
    for path in (workdir, folder / "out"):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(shared / kind, workdir)
    (folder / "outside").write_text("keep")
    other = next(other for other in COMMANDS.values() if other != kind)
    _damage(workdir, shared / other, folder / "outside", given)
    said = run(_argv(given["command"], shared, kind))
    assert (folder / "outside").read_text() == "keep", "a link was followed"
    assert not (folder / "outsidex").exists(), "a dangling link was followed"
    return said


def _argv(command: str, shared: pathlib.Path, kind: str) -> list[str]:
    data = f"{shared}/inputs/{DATA[kind]}"
    if command.startswith("train"):  # resumed where it ended, as a step more takes seconds
        return ["train", f"--config={shared}/{kind}.py:{data}", "--workdir=run"]
    return {
        "eval": ["eval", "--checkpoint=run", f"--data={data}"],
        "generate": ["generate", "--checkpoint=run", "--prompt=what?"],
        "embed": ["embed", "--checkpoint=run", "--text=a cat", "--output=out.npy"],
        "export": ["export", "--workdir=run", "--output=out", "--format=sentence_transformers"],
    }[command]


def _damage(
    workdir: pathlib.Path, other: pathlib.Path, outside: pathlib.Path, given: dict[str, Any]
) -> None:
    tops = sorted(p for p in workdir.iterdir() if p.is_dir() or p.stat().st_size)
    top = tops[given["file"][0] % len(tops)]
    files = sorted(p for p in top.rglob("*") if p.is_file()) if top.is_dir() else [top]
    path = files[given["file"][1] % len(files)]
    content, damage = path.read_bytes(), given["damage"]
    at = given["at"] * len(content) // 1000
    if damage in ("json", "text"):
        path.write_bytes(_other_json(content, given))
    elif damage == "cut":
        path.write_bytes(content[:at])
    elif damage == "bytes":
        path.write_bytes(content[:at] + b"\xff\x00" + content[at + 2 :])
    elif damage == "swapped":
        path.write_bytes(files[given["at"] % len(files)].read_bytes())
    elif damage == "another run's":
        theirs = other / path.relative_to(workdir)
        if theirs.is_file():
            shutil.copyfile(theirs, path)
    elif damage == "no folder":
        shutil.rmtree(workdir)
        _replace(workdir, ("empty", "pipe", "device", "dangling link")[at % 4], outside)
    elif damage != "none":
        path.unlink()
        _replace(path, damage, outside)


def _replace(path: pathlib.Path, damage: str, outside: pathlib.Path) -> None:
    """Put something else where a file or a folder was."""
    if damage == "empty":
        path.touch()
    elif damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage != "deleted":
        target = {"device": "/dev/zero", "dangling link": str(outside) + "x"}.get(damage, outside)
        path.symlink_to(target)


def _other_json(content: bytes, given: dict[str, Any]) -> bytes:
    """The file with another value somewhere in it, if it is JSON, or else that value alone."""
    try:
        base = json.loads(content)
    except ValueError:
        base = {}
    paths = values.paths(base)
    if not paths:
        return str(given["text"]).encode("utf-8", "surrogatepass")
    path = paths[given["at"] * len(paths) // 1000]
    if given["damage"] == "json":
        return values.text_of(values.replaced(base, path, given["value"])).encode()
    text = values.text_of(values.replaced(base, path, "@@@@"))
    return text.replace('"@@@@"', given["text"]).encode()
