"""What islands can't be combined with is refused by name, before a file is read."""

from __future__ import annotations

import pytest

from jaxvlm.config import ConfigError, default_config, from_config_dict
from jaxvlm.trainer import checks

REFUSED = {
    "mesh.island": 0,
    "outer.steps": 0,
    "outer.momentum": 1.0,
    "outer.fragments": 101,
    "outer.overlap_steps": 100,
    "outer.mixing": 1.0,
    "federate.sites": 2,
    "encoder.devices": 1,
    "loss.name": "info_nce",  # "a loss of pairs"
    "cache.policy": "strict",
    "strategy.offload": ("optimizer",),
    "early_stop": 1,
}


def recipe(islands):
    config = default_config()
    config.data.train = config.data.eval = "easy-vqa:train"
    config.eval_every, config.steps, config.mesh.island = 10, 20, islands
    return config


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name):
    config = recipe(2)
    config.update_from_flattened_dict({name: REFUSED[name]})
    with pytest.raises(ConfigError, match=name.partition(".")[0] or name):
        checks._check_config(from_config_dict(config))


def test_islands_and_outer_updates_go_together():
    config = recipe(2)
    config.outer.steps = 10
    checks._check_config(from_config_dict(config))
    config.mesh.island = 1
    with pytest.raises(ConfigError, match=r"config.outer.steps=10 is not read without .*island"):
        checks._check_config(from_config_dict(config))
