"""Numbers that no setting can have are refused by name, from a recipe and from config.json."""

import math

import pytest

from jaxvlm.config import Config, ConfigError, from_config_dict, to_config_dict
from jaxvlm.hf.families import any_family, config_reader
from jaxvlm.spmd.gradcache import AUTO_MINI_BATCH
from jaxvlm.trainer.checks import auto_settings
from tests.bad_input import folders, values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.vision.width", 0),
        ("model.decoder.num_heads", -1),
        ("model.decoder.mlp_dim", 10**12),
        ("data.batch_size", 0),
        ("data.buckets", -2),
        ("optim.eps", -1.0),
        ("optim.eps", math.nan),
        ("optim.min_lr_ratio", math.nan),
        ("optim.learning_rate", math.inf),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(name, value):
    config = to_config_dict(Config())
    *groups, last = name.split(".")
    group = config
    for part in groups:
        group = group[part]
    group[last] = value
    with pytest.raises(ConfigError, match=f"config.{name}"):
        from_config_dict(config)


@pytest.mark.parametrize("value", [None, 0, -1, 10**12, 2.5, "x", [], {}, [1], True, math.nan])
@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "intermediate_size"])
def test_a_field_of_config_json_with_a_wrong_value_is_refused(field, value):
    for group in ("vision_config", "text_config"):
        hf_config = values.replaced(folders.LLAVA, (group, field), value)
        with pytest.raises(ConfigError, match=r"config\.json"):
            config_reader.model_of(any_family(hf_config, "folder"), hf_config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("microbatches", 0), ("mesh.data", 0), ("grad_cache.query_mini_batch", AUTO_MINI_BATCH)],
)
def test_what_leaves_a_choice_to_the_planner_is_in_range(name, value):
    config = to_config_dict(Config())
    config.update_from_flattened_dict({name: value})
    assert auto_settings(from_config_dict(config)) == [name]
