"""Numbers that no setting can have are refused by name, from a recipe and from config.json."""

import functools
import math
import typing

import pytest

from jaxvlm.config import CheckpointConfig, Config, ConfigError, from_config_dict, to_config_dict
from jaxvlm.hf.families import any_family, config_reader
from jaxvlm.spmd.gradcache import AUTO_MINI_BATCH
from jaxvlm.trainer.checks import auto_settings, checked
from tests.bad_input import folders, settings, values

NEGATIVE = {
    **dict.fromkeys(("data", "fsdp", "tensor", "context", "expert", "pipeline"), "the rest"),
    "devices": "a share by cost",
    "eos_id": "none",
    "max_negatives": "all",
    "query_mini_batch": "the planner chooses",
    "feature_layer": "from the end",
    "feature_layers": "from the end",
    "scale": "a logarithm",
    "bias": "of logits",
    "margin": "either way",
}
"""Last part of a setting's name -> what -1 means; for all others it means nothing."""
ANY_SIZE = {"feature_layer", "feature_layers", "scale", "bias", "margin"}
"""Of these, those in which other negative numbers have a meaning too."""


def of_numbers():
    """Names of the settings that hold a number, or several -> the type of what they hold."""
    found = {}
    for name in settings.names():
        *groups, last = name.split(".")
        group = functools.reduce(getattr, groups, Config())
        hint = typing.get_type_hints(type(group))[last]
        kinds = str(hint)
        if hint is not bool and ("int" in kinds or "float" in kinds):
            found[name] = hint
    return found


def negative(hint, number):
    """A value of a type in which numbers are ``number``."""
    if typing.get_origin(hint) is tuple:
        inner = [x for x in typing.get_args(hint) if x is not Ellipsis]
        return tuple(negative(x, number) for x in inner)
    return "vision/*" if hint is str else float(number) if hint is float else number


def with_setting(name, value):
    *groups, last = name.split(".")
    config = to_config_dict(Config())
    group = functools.reduce(getattr, groups, config)
    group[last] = value
    return config


@pytest.mark.parametrize(("name", "hint"), of_numbers().items(), ids=list(of_numbers()))
def test_a_negative_number_is_refused_where_it_means_nothing(name, hint):
    last = name.rpartition(".")[2]
    for number in (-1, -7):
        config = with_setting(name, negative(hint, number))
        if last in ANY_SIZE or (last in NEGATIVE and number == -1):
            from_config_dict(config)
            continue
        with pytest.raises(ConfigError, match=f"^config.{name}=-{-number}(.0)?: must be "):
            from_config_dict(config)


def test_settings_of_numbers_are_all_found():
    names = of_numbers()
    assert {"optim.lr_multipliers", "profile_steps", "optim.warmup_steps", "seed"} <= names.keys()
    assert len(names) > 120 and NEGATIVE.keys() <= {name.rpartition(".")[2] for name in names}


def test_a_config_in_python_is_checked_like_a_recipe():
    with pytest.raises(ConfigError, match=r"^config\.checkpoint\.keep=0: must be at least 1"):
        checked(Config(checkpoint=CheckpointConfig(keep=0)), "")


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
    with pytest.raises(ConfigError, match=f"config.{name}"):
        from_config_dict(with_setting(name, value))


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
    assert auto_settings(from_config_dict(with_setting(name, value))) == [name]
