"""Runs that train embeddings with a frozen tower's tokens in host memory and on disk."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from test_cache import assert_same_run, made, metric
from test_embedding_runs import scratch

import jaxvlm
from jaxvlm.cache.store.rows import Store
from jaxvlm.config import ConfigError, from_config_dict
from jaxvlm.data.errors import DataError
from jaxvlm.inference import embedding_evaluator


def locked(path, encoder="dual", policy="strict", **cache):
    config = scratch(path, encoder)
    config.optim.frozen = ("vision/*",)
    config.data.eval, config.steps, config.checkpoint.every = "", 12, 0
    config.grad_cache.query_mini_batch, config.grad_cache.document_mini_batch = 3, 5
    config.cache.policy, config.cache.encode_batch = policy, 2
    for name, value in cache.items():
        config.cache[name] = value
    return config


def run(folder, *how, **cache):
    found = jaxvlm.Trainer(locked(*how, **cache), folder, devices=jax.devices()[:1])
    found.fit()
    return found


@pytest.fixture(scope="module")
def first(captions, tmp_path_factory):
    """A run that fills a store."""
    folder = tmp_path_factory.mktemp("first")
    return run(folder / "run", captions, store=str(folder / "store")), folder / "store"


@pytest.mark.long
def test_a_second_run_decodes_and_encodes_nothing(
    first,
    captions,
    tmp_path,
    monkeypatch,
    capsys,
):
    done, store = first
    stored = metric(done, "train/cache/from_store")
    assert stored[0] == 0 and stored[-1] == 1  # the second time through the data
    off = run(tmp_path / "off", captions, "dual", "off")
    assert_same_run(done, off)
    assert metric(off, "train/cache/hit_rate") == [0] * 12

    def refuse(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr("jaxvlm.data.images.image_files.decode", refuse)
    capsys.readouterr()
    again = run(tmp_path / "again", captions, store=str(store))
    assert_same_run(done, again)
    assert set(metric(again, "train/cache/from_store")) == {1.0}
    assert set(metric(again, "train/cache/encoded")) == {0.0}
    assert "40 images of this vision encoder" in "".join(capsys.readouterr())


@pytest.mark.long
def test_memory_alone(first, captions, tmp_path):
    """And evaluations see pixels, as a model does that has no cache."""
    done, _ = first
    config = locked(captions, memory_mb=8)
    config.data.eval = str(captions)
    here = jaxvlm.Trainer(config, tmp_path / "here", devices=jax.devices()[:1])
    figures = here.fit()
    assert_same_run(done, here)
    seen = embedding_evaluator.evaluate(jaxvlm.load(tmp_path / "here")).metrics
    assert seen["recall@10"] == pytest.approx(figures["recall@10"]) and seen["recall@10"] > 0.3
    assert metric(here, "train/cache/from_store")[-1] == 1


@pytest.mark.long
def test_a_conversations_run_finds_what_a_pair_run_made(captions, data, tmp_path):
    """Of the same tower and images: tokens are one thing, whatever a run makes of them."""
    store = str(tmp_path / "store")
    pairs = run(tmp_path / "pairs", captions, "vlm", store=store)
    assert metric(pairs, "train/cache/from_store")[-1] == 1
    config = from_config_dict(made(data, "strict", encode_batch=2, store=store))
    model = dataclasses.replace(config.model, vision=pairs.config.model.vision)
    config = dataclasses.replace(config, model=model, seed=pairs.config.seed)
    talk = jaxvlm.Trainer(config, tmp_path / "talk", devices=jax.devices()[:1])
    talk.fit()
    assert set(metric(talk, "train/cache/from_store")) == {1.0}


@pytest.mark.long
def test_stored_tokens_are_audited(first, captions, tmp_path, monkeypatch, capsys):
    """A store whose tokens are wrong though nothing says so: the alarm does."""
    _, store = first
    get = Store.get

    def wrong(self, key):
        found = get(self, key)
        return None if found is None else found * np.float32(1.01)

    monkeypatch.setattr(Store, "get", wrong)
    bad = run(tmp_path / "bad", captions, store=str(store), refresh_fraction=0.5)
    assert max(metric(bad, "train/cache/drift_max")) == pytest.approx(0.01, rel=0.05)
    assert "differ by 0.0099" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"memory_mb": 0}, "not on the devices; set config.cache.memory_mb"),
        ({"policy": "lazy"}, "that is policy='strict'"),
        ({"max_images": 64}, "config.cache.max_images=64 with config.loss.name='info_nce'"),
        (
            {"learns": True},
            "config.cache.policy='strict' with an embedding loss and a trained",
        ),
        (
            {"policy": "off", "memory_mb": 0, "learns": True},
            "config.cache.encode_batch=2 with an embedding loss",
        ),
        ({"flip": True}, "config.data.flip=False"),
        (
            {"token_order": "morton"},
            "config.cache.token_order='morton' with embeddings of whole images",
        ),
        ({"texts": True}, "no tower takes images"),
        ({"without": True}, "the data has no image, so config.cache has nothing to cache"),
    ],
)
def test_refused(captions, tmp_path, settings, words):
    settings = {"memory_mb": 8, **settings}
    flags = {name: settings.pop(name, False) for name in ("learns", "flip", "texts", "without")}
    config = locked(captions, **settings)
    config.data.flip = flags["flip"]
    if flags["learns"]:
        config.optim.frozen = ()
    if flags["texts"]:
        config.dual.towers = ("text",)
    if flags["without"]:
        path = tmp_path / "words.jsonl"
        path.write_text("".join(f'{{"query": "q{i}", "positive": "p{i}"}}\n' for i in range(9)))
        config.data.train = str(path)
    with pytest.raises((ConfigError, DataError), match=words):
        jaxvlm.Trainer(config, devices=jax.devices()[:1])
