"""A setting that has no effect is refused, not ignored."""

import dataclasses
import functools

import pytest

from jaxvlm.config import (
    Config,
    ConfigError,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    DualConfig,
    LoraConfig,
    ModelConfig,
    RopeScaling,
    TextConfig,
    VisionConfig,
    refuse_unread,
)
from jaxvlm.config.unread import RULES

CASES = [
    (VisionConfig(), {"position_resize": "antialias"}, {"packed": True}),
    (VisionConfig(packed=True), {"full_layers": (0,)}, {"window": 32}),
    (VisionConfig(), {"keep_class_token": True}, {"class_token": True}),
    (ConnectorConfig(kind="linear"), {"hidden": 8}, {"kind": "mlp"}),
    (ConnectorConfig(), {"pool": "mean"}, {"merge": 2}),
    (ConnectorConfig(), {"norm_merged": True}, {"norm": "rms"}),
    (RopeScaling(), {"factor": 2.0}, {"kind": "linear"}),
    (RopeScaling("linear"), {"original_length": 8}, {"kind": "dynamic"}),
    (RopeScaling("yarn"), {"low_factor": 2.0}, {"kind": "llama3"}),
    (RopeScaling("llama3"), {"beta_fast": 2.0}, {"kind": "yarn"}),
    (DecoderConfig(), {"local_rope_theta": 1e4}, {"window": 8}),
    (DecoderConfig(), {"window_pattern": (True, False)}, {"window": 8}),
    (DecoderConfig(), {"experts_per_token": 2}, {"num_experts": 4}),
    (DecoderConfig(), {"rope_interleaved": True}, {"rope_sections": (4, 2, 2)}),
    (TextConfig(), {"eos_id": 3}, {"pool": "eos"}),
    (DataConfig(), {"buckets": 2}, {"packing": False}),
    (Config(), {"eval_records": 5}, {"data": DataConfig(eval="FILE")}),
    (Config(), {"early_stop": 2}, {"data": DataConfig(eval="FILE"), "eval_every": 5}),
    (
        Config(),
        {"model": ModelConfig(vision=VisionConfig(pool="attention"))},
        {"model": ModelConfig(vision=VisionConfig(pool="attention"), checkpoint="FOLDER")},
    ),
    (
        Config(),
        {"model": ModelConfig(vision=VisionConfig(feature_layer=-2, feature_layers=(-1, -2)))},
        {"model": ModelConfig(vision=VisionConfig(feature_layers=(-1, -2)))},
    ),
    (
        Config(),
        {"model": ModelConfig(vision=VisionConfig(feature_layer=-2, final_norm=False))},
        {"model": ModelConfig(vision=VisionConfig(final_norm=False))},
    ),
    (
        Config(),
        {"dual": DualConfig(vision=VisionConfig(pool="attention", feature_layer=-2))},
        {"dual": DualConfig()},
    ),
    (Config(), {"dual": DualConfig(lora=LoraConfig(checkpoint="FOLDER"))}, {"dual": DualConfig()}),
]


@pytest.mark.parametrize(("config", "changed", "needs"), CASES)
def test_a_setting_without_effect_is_refused(config, changed, needs):
    (name,) = changed
    refuse_unread(config, "config.group")
    with pytest.raises(ConfigError, match=rf"config\.group\.{name}(\.\w+)*=.* is not read without"):
        refuse_unread(dataclasses.replace(config, **changed), "config.group")
    refuse_unread(dataclasses.replace(config, **changed | needs), "config.group")


def other(value):
    """A value that differs."""
    if dataclasses.is_dataclass(value):
        field = dataclasses.fields(value)[0].name
        return dataclasses.replace(value, **{field: other(getattr(value, field))})
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, type(value[0])(0)) if value else (1,)
    return value + 1 if isinstance(value, int | float) else f"another {value}"


def with_setting(config, name, value):
    """``config`` with a field of it, or of a group in it, replaced."""
    field, _, rest = name.partition(".")
    if rest:
        value = with_setting(getattr(config, field), rest, value)
    return dataclasses.replace(config, **{field: value})


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_every_rule_holds(kind):
    default = kind()
    for names, _, read in RULES[kind]:
        for name in names.split():
            given = functools.reduce(getattr, name.split("."), default)
            changed = with_setting(default, name, other(given))
            if read(changed):
                continue
            with pytest.raises(ConfigError, match=rf"config\.group\.{name}(\.\w+)*="):
                refuse_unread(changed, "config.group")
