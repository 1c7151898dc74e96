"""A recipe says how a checkpoint's model is computed, not what it is."""

import dataclasses

import pytest

from jaxvlm.build.merge import OURS, merged_model
from jaxvlm.config import ConfigError, DecoderConfig, ModelConfig, TextConfig, VisionConfig

MIXTURE = ModelConfig(decoder=DecoderConfig(num_experts=4, experts_per_token=2))


def asked(**settings):
    decoder = dataclasses.replace(ModelConfig().decoder, **settings)
    return dataclasses.replace(ModelConfig(), decoder=decoder)


def test_a_recipe_says_how_a_checkpoint_is_computed():
    made = merged_model(asked(remat="full", expert_matmul="xla"), MIXTURE).decoder
    assert made == dataclasses.replace(MIXTURE.decoder, remat="full", expert_matmul="xla")


def test_and_not_what_it_is():
    with pytest.raises(ConfigError, match=r"config\.model\.decoder\.num_experts=8"):
        merged_model(asked(num_experts=8), MIXTURE)


def test_all_that_is_the_recipe_s_to_say_is_a_setting():
    groups = DecoderConfig, TextConfig, VisionConfig
    assert set(OURS) <= {field.name for group in groups for field in dataclasses.fields(group)}
