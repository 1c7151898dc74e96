"""Runs with islands: outer updates, evaluation, resuming, and what is refused."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import runs
from runs import losses

import jaxvlm
from jaxvlm.checkpoint.checkpointer import restore_params
from jaxvlm.config import ConfigError, default_config


def recipe(data, islands=2, steps=3):
    config = runs.recipe(data)
    config.mesh.data, config.mesh.island = 2, islands
    config.outer.steps, config.outer.optimizer = steps, "nesterov"
    config.outer.learning_rate, config.outer.momentum = 0.7, 0.9
    config.outer.fragments, config.outer.overlap_steps = 2, 1
    config.outer.delta_dtype = "int8"
    config.model.decoder.dropout = 0.1
    config.steps, config.checkpoint.every = 7, 0
    return config


def trainer(config, workdir, callbacks=()):
    return jaxvlm.Trainer(config, workdir, devices=jax.devices()[:4], callbacks=callbacks)


class Stop(jaxvlm.Callback):
    """Ends the process's run after a step, as SIGTERM does."""

    def __init__(self, step):
        self.step = step

    def should_stop(self, step):
        return step == self.step


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory):
    run = trainer(recipe(data), tmp_path_factory.mktemp("islands"))
    run.result = run.fit()
    return run


def test_a_run_ends_with_an_outer_update(unbroken):
    """After 1, 3, 4, 6 and 7 steps: what the islands trained in the last one is not lost."""
    assert unbroken.result["ended"] == "done" and unbroken.result["step"] == 7
    assert unbroken.result["skipped_outer_updates"] == unbroken.result["skipped_updates"] == 0
    state = unbroken.state
    for path, x in state.params.items():
        for own in np.asarray(state.islands.params[path]):
            np.testing.assert_array_equal(own, x, path)
    assert not np.any(state.islands.applied)
    lines = (unbroken.workdir / "metrics.jsonl").read_text().splitlines()
    figures = [json.loads(line) for line in lines]
    assert all(line["train/islands_left_out"] == 0 for line in figures if "train/loss" in line)
    assert len(losses(unbroken.workdir)) == 7


def test_its_weights_are_the_shared_ones(unbroken):
    found = restore_params(unbroken.workdir / "checkpoints", unbroken.model.abstract(), "latest")
    for path, x in unbroken.state.params.items():
        np.testing.assert_array_equal(found[path], x, path)
    loaded = jaxvlm.load(unbroken.workdir)
    for path, x in unbroken.state.params.items():
        np.testing.assert_array_equal(loaded.params[path], x, path)


@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(data, unbroken, tmp_path, step):
    assert trainer(recipe(data), tmp_path, [Stop(step)]).fit()["ended"] == "preempted"
    run = trainer(recipe(data), tmp_path)
    assert run.fit()["step"] == 7
    assert losses(tmp_path) == losses(unbroken.workdir)
    found, expected = jax.device_get((run.state, unbroken.state))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_another_number_of_islands_is_refused(data, unbroken):
    config = recipe(data, islands=1)
    config.mesh.data, config.outer = 4, default_config().outer
    with pytest.raises(ConfigError, match=r"config.mesh.island=1, .* of a run with 2"):
        trainer(config, unbroken.workdir).fit()
