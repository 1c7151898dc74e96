"""Runs on a packed set: the bits of a run on its files, which it can also go on with."""

import json

import jax
import loopback_store
import numpy as np
import pytest

import jaxvlm
from jaxvlm.cli.main import run
from tests.e2e.test_embedding_runs import scratch
from tests.runs import HERE, recipe, write_data

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data file, and the set that is packed from it."""
    folder = tmp_path_factory.mktemp("packed")
    data = write_data(folder, 12)
    flags = [f"--config={HERE / 'recipe.py'}:{data}", f"--output={folder / 'set'}"]
    assert run(["data", "pack", *flags]) == 0
    return folder


def trained(folder, train, workdir, steps=STEPS):
    config = recipe(folder / "data.jsonl")
    config.data.train, config.data.batch_size = str(train), 2
    config.steps, config.epochs, config.log_every = steps, 0.0, 1
    config.checkpoint.every = 3
    trainer = jaxvlm.Trainer(config, workdir, jax.devices()[:1])
    trainer.fit()
    return [np.asarray(x) for x in jax.tree.leaves(trainer.state.params)]


def test_the_bits_of_a_run_on_files(folder, tmp_path):
    """Its tokenizer is that of the set; its evaluation and sample images are of a file."""
    files = trained(folder, folder / "data.jsonl", tmp_path / "files")
    packed = trained(folder, folder / "set", tmp_path / "set")
    for ours, theirs in zip(packed, files, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_same_bits_from_a_web_server(folder, tmp_path, monkeypatch):
    """Its tokenizer and arrays are copied, its images are read as they are needed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = trained(folder, folder / "data.jsonl", tmp_path / "files")
    with loopback_store.store(folder, loopback_store.Web) as store:
        assert run(["data", "verify", f"{store.url}/set"]) == 0
        served = trained(folder, f"{store.url}/set", tmp_path / "served")
    for ours, theirs in zip(served, files, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (tmp_path / "cache" / "jaxvlm" / "sets").is_dir()


def test_a_run_goes_on_where_its_data_were_packed(folder, tmp_path):
    files = trained(folder, folder / "data.jsonl", tmp_path / "whole")
    trained(folder, folder / "data.jsonl", tmp_path / "run", 3)
    packed = trained(folder, folder / "set", tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row["step"] for row in map(json.loads, lines) if "train/loss" in row]
    assert steps == list(range(1, STEPS + 1))
    for ours, theirs in zip(packed, files, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def pairs_trained(path, workdir, steps=STEPS, **data):
    config = scratch(path)
    config.steps, config.data.eval = steps, ""
    config.data.update(data)
    trainer = jaxvlm.Trainer(config, workdir, jax.devices()[:1])
    trainer.fit()
    return [np.asarray(x) for x in jax.tree.leaves(trainer.state.params)]


@pytest.fixture(scope="module")
def set_of_pairs(captions, tmp_path_factory):
    """A recipe, and the set that is packed from its pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    text = "from tests.e2e.test_embedding_runs import scratch\n\nget_config = scratch\n"
    (folder / "recipe.py").write_text(text)
    recipe = f"--config={folder / 'recipe.py'}:{captions}"
    assert run(["data", "pack", recipe, f"--output={folder / 'set'}"]) == 0
    return recipe, folder / "set"


def vlm_recipe(folder):
    """A recipe of a VLM's embeddings."""
    path = folder.parent / "vlm_recipe.py"
    path.write_text(
        "from tests.e2e.test_embedding_runs import scratch\n\n"
        "def get_config():\n    return scratch('', 'vlm')\n"
    )
    return f"--config={path}"


def test_a_run_on_pairs_goes_on_with_the_packed_set(captions, set_of_pairs, tmp_path, capsys):
    """To the bits of a run on the files; its tokenizer is that of the set."""
    recipe, folder = set_of_pairs
    files = pairs_trained(captions, tmp_path / "files")
    pairs_trained(captions, tmp_path / "run", 3)
    packed = pairs_trained(folder, tmp_path / "run")
    for ours, theirs in zip(packed, files, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    workdir = f"--workdir={tmp_path / 'other'}"
    own_data, other = ["--config=configs/own_data.py", workdir], [vlm_recipe(folder), workdir]
    capsys.readouterr()
    for line, said in (
        (["data", "check", str(folder), recipe], "is packed, and holds what a run trains on"),
        (["data", "pack", str(folder), recipe, "--output=x"], "packed already"),
        (["eval", f"--checkpoint={tmp_path / 'run'}", f"--data={folder}"], "is packed"),
        (
            ["train", *own_data, f"--config.data.train={folder}"],
            "was packed from pairs, and this run trains on conversations",
        ),
        (
            ["train", *other, "--config.data.eval=", f"--config.data.train={folder}"],
            "was packed for config.embedder='dual', and this run has 'vlm'",
        ),
    ):
        assert run(line) == 2
        assert said in capsys.readouterr().err
    assert run(["data", "verify", str(folder)]) == 0


def test_what_the_loss_does_not_read_is_not_packed(set_of_pairs, tmp_path, capsys):
    recipe, _ = set_of_pairs
    rows = [{"query": f"a {i}", "positive": f"b {i}", "score": i / 8} for i in range(9)]
    (tmp_path / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pack = ["data", "pack", str(tmp_path / "scored.jsonl"), recipe, f"--output={tmp_path / 'set'}"]
    assert run(pack) == 2
    assert "does not read scores; leave the field out" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()
    assert run([*pack, "--config.data.ignored_fields=('score',)"]) == 0
    pack[-1] = f"--output={tmp_path / 'cosine'}"
    assert run([*pack, "--config.loss.name=cosine"]) == 0
    assert "scores: similarities of pairs, from 0 to 1" in capsys.readouterr().out
    line = ["train", recipe, f"--config.data.train={tmp_path / 'cosine'}", "--config.data.eval="]
    assert run([*line, f"--workdir={tmp_path / 'run'}"]) == 2
    said = "with config.data.ignored_fields when the data are packed, which trains"
    assert said in capsys.readouterr().err


def test_pairs_from_a_web_server(captions, set_of_pairs, tmp_path):
    """From the beginning, with images that are asked for several at a time."""
    _, folder = set_of_pairs
    files = pairs_trained(captions, tmp_path / "files")
    with loopback_store.store(folder.parent, loopback_store.Web) as store:
        copies = str(tmp_path / "copies")
        served = pairs_trained(f"{store.url}/set", tmp_path / "served", download_dir=copies)
    for ours, theirs in zip(served, files, strict=True):
        np.testing.assert_array_equal(ours, theirs)
