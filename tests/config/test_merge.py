"""A recipe says how a checkpoint's model is computed, not what it is."""

import dataclasses

import pytest

from jaxvlm.config import ConfigError, DecoderConfig, ModelConfig, TextConfig, VisionConfig
from jaxvlm.config.merge import RECIPE_FIELDS, merged_model

MIXTURE = ModelConfig(decoder=DecoderConfig(num_experts=4, experts_per_token=2))


def recipe(**settings):
    decoder = dataclasses.replace(ModelConfig().decoder, **settings)
    return dataclasses.replace(ModelConfig(), decoder=decoder)


def test_a_recipe_says_how_a_checkpoint_is_computed():
    decoder = merged_model(recipe(remat="full", expert_matmul="xla"), MIXTURE).decoder
    assert decoder == dataclasses.replace(MIXTURE.decoder, remat="full", expert_matmul="xla")


def test_a_recipe_does_not_say_what_a_checkpoint_is():
    with pytest.raises(ConfigError, match=r"config\.model\.decoder\.num_experts=8"):
        merged_model(recipe(num_experts=8), MIXTURE)


def test_every_field_of_the_recipe_is_a_setting():
    groups = DecoderConfig, TextConfig, VisionConfig
    names = {field.name for group in groups for field in dataclasses.fields(group)}
    assert set(RECIPE_FIELDS) <= names
