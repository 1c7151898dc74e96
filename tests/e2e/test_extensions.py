"""Extensions of the user's own, from a folder outside of the package: the whole life of a run."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import time

import pytest
from checkpoints import write_llava
from runs import command, environment, losses, write_data

from jaxvlm.cli import main

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
FORMATS = """
def nothing(file):
    "A file's name."

def text(file):
    return file

def number(file):
    return 3
"""
POLICY = '''
import dataclasses
import jax.numpy as jnp
from jaxvlm.cache.policy import Policy

@dataclasses.dataclass(frozen=True)
class EveryFew(Policy):
    """Encodes all images of every n-th step."""
    every: int = 2
    max_staleness: int = 100
    refresh_fraction: float = 0.5

    def draw(self, allowed, need, step):
        return allowed & (step % self.every == 0), jnp.where(allowed, 1 / self.every, 0.0)
'''
FAMILY = '''
"""A checkpoint of LLaVA whose model_type is another word."""
from jaxvlm.hf.families import llava
from jaxvlm.hf.families.llava import chat_style, span, weights

def config_from_hf(hf_config):
    return llava.config_from_hf({**hf_config, "model_type": "llava"})
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The examples, an extension of each other kind, data, and a tiny Hugging Face folder."""
    folder = tmp_path_factory.mktemp("outside")
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "my_policy.py").write_text(POLICY)
    (folder / "my_family.py").write_text(FAMILY)
    (folder / "my_formats.py").write_text(FORMATS)
    lines = [json.loads(line) for line in write_data(folder, images=8).read_text().splitlines()]
    table = []
    for line in lines:
        (image, question), answer = line["messages"][0]["content"], line["messages"][1]["content"]
        table.append("|".join((image["image"], question["text"], answer)))
    (folder / "table.txt").write_text("\n".join(table))
    write_llava(folder / "llava", folder / "data.jsonl", "float32")
    config = json.loads((folder / "llava" / "config.json").read_text())
    (folder / "llava" / "config.json").write_text(json.dumps({**config, "model_type": "other"}))
    return folder


@pytest.fixture
def run(monkeypatch, capfd):
    """(folder, arguments) -> what a command says that is run there; ``code`` is its exit status."""

    def command_of(cwd, *args, code=0):
        monkeypatch.chdir(cwd)
        capfd.readouterr()
        done = main.run(list(args))
        said = "".join(capfd.readouterr())
        assert done == code, said[-3000:]
        return said

    return command_of


@pytest.mark.long
def test_a_loss_lives_through_kill_resume_eval_and_export(folder, run):
    given = (
        "--config=custom_loss.py:data.jsonl",
        "--workdir=loss",
        "--config.loss.options.gamma=1.5",
        "--config.model.checkpoint=llava",
        "--config.model.family.target=my_family.py",
        "--config.tensorboard=False",
    )
    process = subprocess.Popen(
        command("train", *given, "--config.steps=100000", "--config.checkpoint.every=2"),
        env=environment(1, PYTHONPATH=str(EXAMPLES.parent)),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    checkpoints = folder / "loss" / "checkpoints"
    deadline = time.monotonic() + 300
    while not any(path.name.isdigit() for path in checkpoints.glob("*")):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.communicate()
    assert losses(folder / "loss")
    done = max(int(path.name) for path in checkpoints.glob("*") if path.name.isdigit())
    steps = f"--config.steps={done + 2}"
    run(folder, "train", *given, steps)
    recorded = json.loads((folder / "loss" / "config.json").read_text())["config"]
    document = json.loads((folder / "loss" / "config.json").read_text())
    assert document["trains_embeddings"] is False
    assert recorded["loss"] == {
        "target": f"{folder}/custom_loss.py:Focal",
        "options": {"gamma": 1.5},
        "name": "next_token",
    }
    elsewhere = folder / "elsewhere"  # paths in the record do not depend on where a command runs
    elsewhere.mkdir()
    data = f"--data={folder / 'data.jsonl'}"
    assert "exact_match" in run(elsewhere, "eval", "--checkpoint=../loss", data)
    # The loss is in no one's way once the model is trained.
    (folder / "custom_loss.py").rename(folder / "gone.py")
    assert "exact_match" in run(elsewhere, "eval", "--checkpoint=../loss", data)
    image = f"--image={folder / '0.png'}"
    run(elsewhere, "generate", "--checkpoint=../loss", image, "--prompt=is it red?")
    run(elsewhere, "export", "--workdir=../loss", "--output=exported")
    error = run(folder, "train", *given, f"--config.steps={done + 4}", code=2)
    assert "custom_loss.py" in error and "no such" in error
    (folder / "gone.py").rename(folder / "custom_loss.py")
    named = f"--family={folder / 'my_family.py'}"
    assert "exact_match" in run(elsewhere, "eval", "--checkpoint=exported", data, named)
    assert "config.model.family.target" in run(
        elsewhere, "eval", "--checkpoint=exported", data, code=2
    )


@pytest.mark.long
def test_a_format_and_a_policy_live_through_resume_and_eval(folder, run):
    given = (
        "--config=custom_data.py:table.txt,table.txt",
        "--workdir=table",
        "--config.data.format.options.separator=|",
        "--config.cache.policy=custom",
        "--config.cache.custom_policy.target=my_policy.py:EveryFew",
        "--config.cache.custom_policy.options.every=3",
        "--config.tensorboard=False",
    )
    run(folder, "train", *given, "--config.steps=4")
    run(folder, "train", *given, "--config.steps=8")
    lines = (folder / "table" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    hits = {row["step"]: row["train/cache/hit_rate"] for row in rows if "train/loss" in row}
    assert [hits[step] for step in range(3, 9)] == [1, 0, 1, 1, 0, 1]
    table = folder / "table.txt"
    elsewhere = folder.parent
    workdir = f"--checkpoint={folder / 'table'}"
    assert "exact_match" in run(elsewhere, "eval", workdir, f"--data={table}")
    bad = folder / "bad.txt"
    bad.write_text(table.read_text() + "\na|b")
    checked = run(folder, "data", "check", "bad.txt", given[0], given[2], code=1)
    assert "16 of 17 records are good" in checked
    assert "not three cells: bad.txt: line 17 (2 cells)" in checked
    # A file in another format: by the run's, which says so, or by jaxvlm's own.
    data = f"--data={folder / 'data.jsonl'}"
    said = run(elsewhere, "eval", workdir, data, code=2)
    target = f"config.data.format.target='{folder}/custom_data.py:Table'"
    assert f"data.jsonl is read by the run's {target}" in said
    assert "--data_format=built_in reads jaxvlm's own formats" in said.splitlines()[-1]
    assert "data.jsonl: line 1: not three cells" in said
    said = run(elsewhere, "eval", workdir, data, "--data_format=built_in")
    assert "exact_match" in said and "is read by" not in said
    refused = run(elsewhere, "eval", workdir, "--data_format=run", code=2)
    assert "--data_format is for --data=FILE; add it" in refused


@pytest.mark.parametrize(
    "setting, says",
    [
        ("moe_aux_loss_weight=0.1", "moe_aux_loss_weight=0.1: there is no router"),
        ("pair_loss.margin=0.1", "config.pair_loss.margin=0.1 is not read by config.loss.target="),
        ("loss.name=info_nce", "config.loss.name='info_nce' is not read with config.loss.target"),
        ("loss.options.gama=1.0", "did you mean config.loss.options.gamma?"),
        ("loss.options.loss_chunk=4", "reads the run's loss_chunk"),
        ("loss.target=custom_loss.py:Focl", "did you mean 'Focal'?"),
        ("loss.target=custom_data.py:Table", "config.loss.options.gamma is not a setting"),
        ("loss.target=nowhere.py:Focal", "no such file"),
        ("loss.target=custom_loss.py", "names a file, not a class or function; add :NAME (Focal, "),
        ("data.format.target=custom_data.py", "names a file, not a class or function; add :NAME"),
        ("loss.target=json", "names a module, not a class or function; add :NAME"),
        ("loss.options.gamma.x=1", "config.loss.options.gamma is 2.0, and no group of"),
        ("loss.options.sub.x=1", "config.loss.options.sub is not a setting"),
        ("loss.target=nowhere:Focal", "no module 'nowhere'"),
        ("loss.target=", "config.loss.options.gamma=2.0 is not read without config.loss.target"),
        ("loss=focal", "it is a group of settings"),
        ("data.format.target=custom_loss.py:default_config", "failed"),
        ("data.format.target=json:JSONDecoder.raw_decode", "failed"),
        ("data.format.target=my_formats.py:nothing", "returned None; it must give an iterable"),
        (
            "data.format.target=my_formats.py:text",
            "returned an object of type str; it must give an iterable",
        ),
        ("data.format.target=my_formats.py:number", "returned an object of type int; it must"),
        ("data.format.target=custom_loss.py:__doc__", "is no function of a file's name"),
        ("model.family.target=my_family.py", "not read without config.model.checkpoint"),
        ("cache.policy=custom", "needs config.cache.custom_policy.target"),
        ("cache.custom_policy.target=my_policy.py:EveryFew", "not read without policy='custom'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(folder, run, setting, says):
    given = ("--config=custom_loss.py:data.jsonl", "--workdir=refused", f"--config.{setting}")
    error = run(folder, "train", *given, code=2)
    assert says in error and error.count("\n") == 1, error
    assert not (folder / "refused").exists()
