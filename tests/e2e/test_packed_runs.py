"""Runs on a packed set: the bits of a run on its files, which it can also go on with."""

import json

import jax
import loopback_store
import numpy as np
import pytest

import jaxvlm
from jaxvlm.cli.main import run
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
