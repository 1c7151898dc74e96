"""Runs that keep visual tokens: the same bits, killed and resumed, and refused where it is vain."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from numerics import close
from runs import losses, recipe

import jaxvlm
from jaxvlm.checkpoint.checkpointer import restore_params
from jaxvlm.config import ConfigError
from jaxvlm.data.errors import DataError
from jaxvlm.data.images import image_files
from jaxvlm.data.page_allocation import WrittenPages
from jaxvlm.train.loop import TrainingStopped


def made(data, policy="off", frozen=True, **cache):
    config = recipe(data)
    config.data.flip, config.data.max_shift = False, 0
    config.cache.policy = policy
    for name, value in cache.items():
        config.cache[name] = value
    if frozen:
        config.optim.frozen = ("vision/*",)
    return config


def weights(run):
    found = restore_params(run.workdir / "checkpoints", run.model.abstract(), "latest")
    return {path: np.asarray(x) for path, x in found.items()}


def assert_same_run(a, b):
    assert losses(a.workdir) == losses(b.workdir)
    for path, x in weights(a).items():
        np.testing.assert_array_equal(x, weights(b)[path], err_msg=path)


def metric(run, name):
    lines = (run.workdir / "metrics.jsonl").read_text().splitlines()
    return [m[name] for m in map(json.loads, lines) if name in m]


def test_frozen_tower(data, tmp_path, capsys):
    """With the cache, without it, and killed in the middle: one run, and its tower rests."""
    off = jaxvlm.Trainer(made(data, encode_batch=2), tmp_path / "off")
    off.fit()
    capsys.readouterr()
    on = jaxvlm.Trainer(made(data, "strict", encode_batch=2), tmp_path / "on")
    assert "visual tokens (strict): room for 40 images in" in capsys.readouterr().out
    on.fit()
    assert_same_run(off, on)
    found = metric(on, "train/cache/hit_rate")
    assert found[0] == 0 and found[-1] == 1  # twelve steps go through the data twice
    assert metric(on, "train/cache/encoded")[-1] == 0
    spared = metric(on, "train/cache/saved_ms")
    assert spared[0] == 0 < spared[-1]
    assert metric(on, "train/cache/device_mib")[-1] > 0
    assert set(metric(off, "train/cache/hit_rate")) == {0}
    config = made(data, "strict", encode_batch=2)
    config.steps = 7
    jaxvlm.Trainer(config, tmp_path / "broken").fit()
    config.steps = 12
    again = jaxvlm.Trainer(config, tmp_path / "broken")
    again.fit()
    assert_same_run(off, again)
    # What can be made again is not saved.
    table = json.loads(next((tmp_path / "broken").glob("checkpoints/12/record/*")).read_text())
    assert "cache" not in json.dumps(table)


def with_and_without(data, folder, monkeypatch, change, devices=1):
    """Runs of eight passes, and how many images each decoded; ``change`` gets their configs."""
    decode, counts, runs = image_files.decode, [], []

    def counted(*args):
        counts[-1] += 1
        return decode(*args)

    monkeypatch.setattr(image_files, "decode", counted)
    for policy in ("off", "strict"):
        counts.append(0)
        config = made(data, policy, encode_batch=2)
        config.data.image_cache_mb, config.data.workers, config.data.prefetch = 0, 1, 1
        config.steps, config.checkpoint.every = 48, 0
        change(config)
        runs.append(jaxvlm.Trainer(config, folder / policy, devices=jax.devices()[:devices]))
        runs[-1].fit()
    assert_same_run(*runs)
    return runs, counts


@pytest.mark.long
def test_images_in_pages_are_not_decoded(data, tmp_path, monkeypatch):
    """The first pass decodes all, none later but what was read ahead of it."""
    _, counts = with_and_without(data, tmp_path, monkeypatch, lambda config: None)
    assert 40 <= counts[1] < counts[0] / 2


@pytest.mark.long
def test_images_in_pages_on_a_mesh_whose_evaluations_take_the_pages(data, tmp_path, monkeypatch):
    """Data 2 x tensor 2. After an evaluation all are decoded once more, and no bit differs."""

    def change(config):
        config.mesh.data, config.mesh.tensor = 2, 2
        config.data.eval, config.eval_every, config.eval_records = str(data), 24, 8
        config.cache.evict_for_eval = config.cache.policy == "strict"

    runs, counts = with_and_without(data, tmp_path, monkeypatch, change, devices=4)
    found = metric(runs[1], "train/cache/hit_rate")
    assert found[0] == 0 and found[23] == 1 and found[24] == 0 and found[-1] == 1
    assert 80 <= counts[1] < counts[0] * 2 / 3


@pytest.mark.long
def test_pages_that_are_not_what_they_were_said_to_be(data, tmp_path, monkeypatch):
    monkeypatch.setattr(WrittenPages, "has", lambda self, page, key: page >= 0)
    run = jaxvlm.Trainer(
        made(data, "strict", encode_batch=2), tmp_path / "run", devices=jax.devices()[:1]
    )
    with pytest.raises(TrainingStopped, match=r"step 1: the visual tokens of \d+ images are not"):
        run.fit()


@pytest.mark.long
def test_tower_that_learns(data, tmp_path):
    """Tokens of up to three updates ago: resumed to the same bits, and on another mesh."""
    config = made(data, "lazy", False, max_staleness=3)
    whole = jaxvlm.Trainer(config, tmp_path / "whole", devices=jax.devices()[:1])
    whole.fit()
    assert max(metric(whole, "train/cache/staleness")) > 0
    for name, devices in (("broken", 1), ("moved", 4)):
        config.steps = 7
        jaxvlm.Trainer(config, tmp_path / name, devices=jax.devices()[:1]).fit()
        config.steps = 12
        again = jaxvlm.Trainer(config, tmp_path / name, devices=jax.devices()[:devices])
        again.fit()
        if devices == 1:
            assert_same_run(whole, again)
        assert metric(again, "train/cache/hit_rate") == metric(whole, "train/cache/hit_rate")
        for step, value in losses(whole.workdir).items():
            close(losses(again.workdir)[step], value, 1e-5, step)


@pytest.mark.long
def test_rows_of_several_lengths(data, tmp_path):
    """Without packing batches have several shapes: programs of their own, whose bits may differ."""
    lines, seen = data.read_text().splitlines(), []
    longer = [x.replace("is it red?", "is it red" + 24 * " red" + "?") for x in lines[::9]]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join(lines + [x.replace('"id": "', '"id": "l') for x in longer]) + "\n")
    for policy in ("off", "strict"):
        config = made(mixed, policy, encode_batch=3)
        config.data.image_root = str(data.parent)
        config.data.packing, config.data.batch_size, config.steps = False, 4, 40
        run = jaxvlm.Trainer(config, tmp_path / policy, devices=jax.devices()[:1])
        run.fit()
        seen.append(losses(tmp_path / policy))
    np.testing.assert_allclose(list(seen[0].values()), list(seen[1].values()), rtol=1e-5)
    assert metric(run, "train/cache/hit_rate")[-1] == 1
    assert len(run.training.step.compiled) > 1


def test_a_part_of_the_images(data):
    config = made(data, "strict", max_images=16)
    run = jaxvlm.Trainer(config)
    seen = {}
    for _, (batch, _) in zip(range(24), run.dataset.train(run.rows)):
        for key, page in zip(
            batch.image_key[batch.image_start >= 0], batch.image_pages[batch.image_start >= 0]
        ):
            assert seen.setdefault(key.tobytes(), page.tobytes()) == page.tobytes()
    kept = [page for page in seen.values() if np.frombuffer(page, np.int32)[0] >= 0]
    assert len(seen) == 40 and len(set(kept)) == len(kept) == 16


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"cache.policy": "lru"}, "known: off, strict, lazy"),
        (
            {"cache.max_staleness": 4},
            "config.cache.max_staleness=4 is not read without policy='lazy'",
        ),
        ({"cache.policy": "strict", "data.flip": True}, "config.data.flip=False"),
        ({"cache.policy": "strict", "encoder.devices": 1}, "config.encoder.devices"),
        ({"cache.policy": "strict", "cache.max_images": 3}, "cache.max_images=3"),
        ({"cache.policy": "strict", "cache.encode_batch": -1}, "config.cache.encode_batch=-1"),
        (
            {"cache.encode_batch": 2, "strategy.grad_reduce_dtype": "int8"},
            "grad_reduce_dtype='int8'",
        ),
        (
            {"cache.token_order": "morton"},
            "config.cache.token_order='morton' is not read without a policy",
        ),
        (
            {"cache.policy": "strict", "cache.token_order": "spiral"},
            "is no order; known: morton, row",
        ),
        ({"cache.policy": "strict", "cache.token_order": "tiled(3)"}, "multiples of 3"),
    ],
)
def test_refused(data, settings, words):
    config = made(data, frozen=False)
    for name, value in settings.items():
        group, field = name.split(".")
        config[group][field] = value
    with pytest.raises((ConfigError, DataError), match=words.replace("(", r"\(")):
        jaxvlm.Trainer(config, devices=jax.devices()[:2])
