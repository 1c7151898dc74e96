"""Runs whose images' tokens are chosen: kept, resumed, asked, refused; and that they learn."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest
from runs import losses, recipe

import jaxvlm
from benchmarks.relevance import settings, train, write_data
from jaxvlm.config import ConfigError
from jaxvlm.inference import prompts
from jaxvlm.parallel.sharding import to_global


def made(data, **cache):
    config = recipe(data)
    config.data.flip, config.data.max_shift, config.data.share_images = False, 0, False
    config.model.vision.patch_size = 4
    relevance = config.model.connector.relevance
    relevance.budget, relevance.levels, relevance.width = 7, 1, 8
    config.optim.frozen = ("vision/*",)
    for name, value in cache.items():
        config.cache[name] = value
    return config


@pytest.mark.long
def test_a_run_that_keeps_its_tokens(data, tmp_path):
    """The run without a cache, to the bit; resumed; and the questions that it is asked later."""
    off = jaxvlm.Trainer(made(data, encode_batch=2), tmp_path / "off")
    off.fit()
    config = made(data, policy="strict", encode_batch=2)
    config.steps = 5
    jaxvlm.Trainer(config, tmp_path / "on").fit()
    config.steps = 12
    on = jaxvlm.Trainer(config, tmp_path / "on")
    on.fit()
    assert losses(off.workdir) == losses(on.workdir)
    for path, x in on.state.params.items():
        assert np.asarray(x).tobytes() == np.asarray(off.state.params[path]).tobytes(), path
    lines = map(json.loads, (on.workdir / "metrics.jsonl").read_text().splitlines())
    assert [m["train/cache/hit_rate"] for m in lines if "train/cache/hit_rate" in m][-1] == 1
    assert_asked_as_trained(on)
    assert isinstance(on.generate(str(data.parent / "0.png"), "is it red?"), str)


def assert_asked_as_trained(run):
    """What stands before an answer has the states that it has when the answer is not yet there."""
    batch, meta = next(run.dataset.eval(run.rows, 8, 8))
    apply = jax.jit(run.model.apply)
    params = run.training.params(run.state)
    hidden = np.asarray(apply(params, to_global(run.mesh, batch, 8)).hidden)
    for row, segment, record in list(zip(*map(np.ndarray.tolist, meta[1:])))[:3]:
        given = run.dataset.records[record]
        first = np.flatnonzero((batch.segment[row] == segment) & (batch.loss_weight[row] > 0))[0]
        asked = re.sub("<image>", "", given.turns[0].content).strip()
        prompt = prompts.to_answer(
            [(given.images, asked)], run.model, run.tokenizer, run.image_format, 10**6
        ).batch
        alone = np.asarray(apply(params, prompt).hidden)
        np.testing.assert_allclose(alone[0, -1], hidden[row, first - 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data.share_images": True}, r"config.data.share_images=True: .*query=False"),
        ({"model.connector.relevance.budget": 8}, "budget=8 is not .* 7 would do"),
        ({"model.connector.merge": 2}, "leave config.model.connector.merge at its default"),
    ],
)
def test_refused(data, changes, words):
    config = made(data).unlock()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=words):
        jaxvlm.Trainer(config, devices=jax.devices()[:1])


@pytest.mark.long
def test_images_alone_may_be_shared(data, tmp_path):
    """Without the question's say; on a pipeline and with a tower on devices of its own."""
    config = made(data)
    config.data.share_images = True
    config.model.connector.relevance.query = False
    config.steps = 3
    one = jaxvlm.Trainer(config, tmp_path / "one", devices=jax.devices()[:1])
    one.fit()
    config.encoder.devices = 1
    apart = jaxvlm.Trainer(config, tmp_path / "apart", devices=jax.devices()[:3])
    apart.fit()
    np.testing.assert_allclose(
        list(losses(one.workdir).values()), list(losses(apart.workdir).values()), rtol=1e-5
    )


@pytest.mark.exhaustive  # minutes; benchmarks/results/relevance_cpu.json has its figures
def test_it_learns_where_to_look(tmp_path):
    """One mark, few steps: far better than as many tokens of a uniform pooling.

    ``benchmarks/relevance.py`` has the other contestants, and a random choice among them.
    """
    write_data(tmp_path, "train", 3000, 0, ["crossed"])
    write_data(tmp_path, "eval", 200, 1, ["crossed"])
    found = {}
    for contestant in ("learned", "uniform mean"):
        config = settings(tmp_path, contestant)
        config.steps = 400
        found[contestant] = train(config, contestant)["exact_match"]
    assert found["learned"] > found["uniform mean"] + 0.2, found


def test_a_recipes_settings_are_the_benchmarks(tmp_path):
    """All contestants have as many tokens an image, and differ in nothing else."""
    plain = settings(tmp_path, "learned").to_dict()
    for contestant in ("without the question", "random", "uniform mean", "uniform concat"):
        other = settings(tmp_path, contestant).to_dict()
        assert other["optim"] == plain["optim"] and other["data"] == plain["data"]
        assert other["model"]["decoder"] == plain["model"]["decoder"]
        assert (other["steps"], other["seed"]) == (plain["steps"], plain["seed"])
