"""Hands an input to the command that would read it, in this process: its status and its lines.

Only ``jaxvlm.cli.main`` is used, so that the sources of another commit can be asked the same.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable
from typing import Any

from tests.bad_input import workdirs

CONVERSATIONS = {
    "data.batch_size": 2,
    "data.max_length": 64,
    "data.max_images_per_sequence": 2,
    "data.workers": 1,
    "model.vision.image_size": 16,
    "model.vision.patch_size": 8,
    "model.vision.width": 16,
    "model.vision.depth": 1,
    "model.vision.num_heads": 2,
    "model.vision.mlp_dim": 32,
    "model.decoder.width": 16,
    "model.decoder.depth": 1,
    "model.decoder.mlp_dim": 32,
    "model.decoder.num_heads": 2,
    "model.decoder.num_kv_heads": 2,
    "model.decoder.head_dim": 8,
    "steps": 2,
    "checkpoint.every": 1,
    "tensorboard": False,
}
"""Settings of a recipe of a tiny model; :func:`write_recipe` writes them."""
PAIRS = {
    "loss.name": "info_nce",
    "embedder": "dual",
    "data.batch_size": 2,
    "data.max_length": 16,
    "data.buckets": 1,
    "data.workers": 1,
    "dual.towers": ("text",),
    "dual.project": ("text",),
    "dual.embed_dim": 16,
    "dual.text.width": 16,
    "dual.text.depth": 1,
    "dual.text.num_heads": 2,
    "dual.text.mlp_dim": 32,
    "dual.text.max_length": 16,
    "tokenizer.kind": "bpe",
    "tokenizer.vocab_size": 300,
    "steps": 2,
    "checkpoint.every": 1,
    "tensorboard": False,
}
IMAGE_PAIRS = PAIRS | {
    "dual.towers": ("vision", "text"),
    "dual.project": ("vision", "text"),
    "dual.vision.image_size": 16,
    "dual.vision.patch_size": 8,
    "dual.vision.width": 16,
    "dual.vision.num_heads": 2,
}
"""Settings of a recipe whose records may have images."""
ENCODER = {
    name: value
    for name, value in PAIRS.items()
    if not name.startswith(("dual.text.", "tokenizer.", "dual.project", "dual.embed_dim"))
}
"""Settings of a recipe of an encoder that comes from a checkpoint."""
Enter = Callable[[str, bytes], "Said"]


class Said:
    """What a command printed, and its status."""

    def __init__(self, status: int, out: str, err: str):
        self.status, self.out, self.err = status, out, err

    @property
    def kind(self) -> str:
        """ok, refused, or what is wrong: traceback, or status."""
        if "Traceback (most recent call last)" in self.out + self.err:
            return "traceback"
        lines = [line for line in self.err.splitlines() if line.startswith("jaxvlm: ")]
        if self.status == 0:
            return "ok"
        counted = self.status == 1 and not lines and self.out  # `data check`
        return "refused" if counted or (self.status in (1, 2) and len(lines) == 1) else "status"

    @property
    def line(self) -> str:
        """What it said last; the error if it printed a traceback."""
        said = (self.err.strip() or self.out.strip() or "nothing").splitlines()
        begins = [i for i, line in enumerate(said) if "Traceback (most recent" in line]
        errors = [x for i in begins for x in said[i + 1 :] if x and not x.startswith(" ")]
        return errors[0] if errors else said[-1]


class Names:
    """Settings' names of the commit that is asked, where they are other ones."""

    def __init__(self, file: str = ""):
        found = json.loads(pathlib.Path(file).read_text()) if file else {}
        self.groups, self.last = found.get("groups", {}), found.get("last", {})

    def __call__(self, name: str) -> str:
        """The name there of a setting of ours."""
        for ours, theirs in sorted(self.groups.items(), reverse=True):  # the longest first
            if name == ours or name.startswith(f"{ours}."):
                name = theirs + name.removeprefix(ours)
                break
        group, dot, last = name.rpartition(".")
        return f"{group}{dot}{self.last.get(last, last)}"


def run(argv: list[str]) -> Said:
    """Run a command as the shell would, but for the end of the process."""
    from jaxvlm.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main.run(argv)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
    said = Said(status, out.getvalue(), err.getvalue())
    assert "Unknown command line flag" not in said.err, said.err  # of ours, so nothing was asked
    return said


def write_recipe(path: pathlib.Path, settings: dict[str, Any], names: Names) -> None:
    """Write a recipe whose argument is its training file."""
    lines = ["from jaxvlm.config import default_config", "", "def get_config(data=''):"]
    lines += ["    c = default_config()", f"    c.{names('data.train')} = data"]
    lines += [f"    c.{names(name)} = {value!r}" for name, value in settings.items()]
    path.write_text("\n".join([*lines, "    return c", ""]))


def prepare(kind: str, folder: pathlib.Path, shared: pathlib.Path, names: Names) -> Enter:
    """The commands for a kind of input.

    Args:
        kind: of ``runner.KINDS``.
        folder: a new folder for the inputs, in which they are handed in.
        shared: the folder that :func:`prepare_shared` has filled.
        names: of settings.
    """
    shutil.copytree(shared / "inputs", folder, True, copy_function=_copy, dirs_exist_ok=True)
    if kind == "override":
        return lambda file, data: _override(shared, names, data)
    if kind == "workdir":
        return lambda file, data: workdirs.enter(run, folder, shared, data)
    if kind in ("conversations", "image"):
        return _conversations
    if kind in ("pairs", "tables", "tar"):
        return lambda file, data: _pairs(shared, file, data)
    return lambda file, data: _folder(shared, file, data)


def _copy(source: str, target: str) -> Any:
    if pathlib.Path(source).is_file():
        return shutil.copy2(source, target)
    return os.mkfifo(target)


def prepare_shared(shared: pathlib.Path, names: Names, runs: bool) -> None:
    """Write the recipes and, if asked, train the runs that a workdir's inputs are copies of."""
    write_recipe(shared / "conversations.py", CONVERSATIONS, names)
    write_recipe(shared / "pairs.py", PAIRS, names)
    write_recipe(shared / "image_pairs.py", IMAGE_PAIRS, names)
    finetune = {k: v for k, v in CONVERSATIONS.items() if not k.startswith("model.")}
    write_recipe(shared / "finetune.py", finetune, names)
    bert = {
        "dual.text_checkpoint": f"{shared}/models/bert",
        "dual.project": (),
        "dual.embed_dim": 32,
    }
    write_recipe(shared / "encoder.py", ENCODER | bert, names)
    if runs:
        workdirs.train(run, shared)


def _conversations(file: str, data: bytes) -> Said:
    pathlib.Path(file).write_bytes(data)
    if not file.startswith("data."):
        record = json.loads(pathlib.Path("good_conversations.jsonl").read_text().splitlines()[0])
        pathlib.Path("data.jsonl").write_text(json.dumps(record | {"image": file}))
        file = "data.jsonl"
    return run(["data", "check", file, "--image_size=16", "--patch_size=8", "--json"])


def _pairs(shared: pathlib.Path, file: str, data: bytes) -> Said:
    pathlib.Path(file).write_bytes(data)
    return run(["data", "check", file, f"--config={shared}/image_pairs.py", "--json"])


def _folder(shared: pathlib.Path, file: str, data: bytes) -> Said:
    shutil.rmtree("bad", ignore_errors=True)
    names = [path.name for path in (shared / "models").iterdir()]
    name = next((name for name in names if f'"{name}"'.encode() in data), "llava")
    name = "qwen2_5_vl" if b"Qwen2VL" in data else name
    shutil.copytree(shared / "models" / name, "bad")
    (pathlib.Path("bad") / file).write_bytes(data)
    if name == "bert":
        return run(["embed", "--checkpoint=bad", "--text=a cat", "--output=out.npy"])
    if zlib.crc32(data) % 2:
        return run(["generate", "--checkpoint=bad", "--prompt=<image>what?", "--image=good.png"])
    shutil.rmtree("run", ignore_errors=True)
    recipe = f"--config={shared}/finetune.py:good_conversations.jsonl"
    with _without_fit():  # weights are read in it, data before
        return run(["train", recipe, "--config.model.checkpoint=bad", "--workdir=run"])


def _override(shared: pathlib.Path, names: Names, data: bytes) -> Said:
    """``--config.NAME=VALUE`` of ``train``, up to its first step, or of ``plan``."""
    name, value, command = json.loads(data)
    text = value if isinstance(value, str) else repr(value)
    given = f"--config.{names(name)}={text}"
    recipe = "pairs" if command.endswith("pairs") else "conversations"
    good = f"{shared}/{recipe}.py:good_{recipe}.jsonl"
    if command.startswith("plan"):
        return run(["plan", f"--model={good}", "--devices=cpu:2", given])
    shutil.rmtree("run", ignore_errors=True)
    with _before_steps():
        return run(["train", f"--config={good}", "--workdir=run", given])


@contextlib.contextmanager
def _without_fit() -> Any:
    """Leave out the training that follows a Trainer that is built: its weights are not there."""
    for module, name in (("jaxvlm.trainer.trainer", "Trainer"), ("jaxvlm.build.run", "Run")):
        with contextlib.suppress(ImportError):
            with _replaced(module, name, "fit", lambda self: {}):
                yield
            return


def _before_steps() -> Any:
    """End training with status 0 where it is about to begin, the first state made."""

    def end(*_: Any, **__: Any) -> Any:
        raise SystemExit(0)

    return _replaced("jaxvlm.train.progress", "Progress", "__init__", end)


@contextlib.contextmanager
def _replaced(module: str, name: str, method: str, other: Any) -> Any:
    owner = getattr(importlib.import_module(module), name)
    own = getattr(owner, method)
    setattr(owner, method, other)
    try:
        yield
    finally:
        setattr(owner, method, own)
