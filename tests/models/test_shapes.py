"""A model's shapes, for which nothing is drawn, are those of drawn parameters."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from builders import TINY
from flax import nnx

from jaxvlm.config import DualConfig, MeshConfig, TextConfig
from jaxvlm.nn.param import Init, split
from jaxvlm.planner.request import abstract_devices
from jaxvlm.spmd.model import build_model

EVERYTHING = dataclasses.replace(
    TINY,
    vision=dataclasses.replace(TINY.vision, class_token=True, layer_scale=0.1),
    connector=dataclasses.replace(TINY.connector, newline=True),
    decoder=dataclasses.replace(TINY.decoder, num_experts=4, experts_per_token=2, qk_norm=True),
)
DUAL = DualConfig(
    vision=dataclasses.replace(TINY.vision, pool="attention"),
    text=TextConfig(vocab_size=32, max_length=8),
)


@pytest.mark.parametrize("config", [TINY, EVERYTHING, DUAL])
def test_shapes_and_dtypes_are_those_of_drawn_parameters(config):
    model = build_model(config, abstract_devices.mesh(MeshConfig(data=1), "cpu"))

    def drawn(key):
        return split(model.make(Init(nnx.Rngs(params=key))))[1]

    assert model.shapes == jax.eval_shape(drawn, jax.eval_shape(jax.random.key, 0))
