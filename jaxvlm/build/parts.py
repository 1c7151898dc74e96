"""A model's vision tower by itself, and all the rest without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jaxvlm.build.model import Model, axes_of, wrap
from jaxvlm.config import LoraConfig, ModelConfig, StrategyConfig
from jaxvlm.models.vlm import Tower
from jaxvlm.nn.param import Init
from jaxvlm.train.apart import is_tower


def tower_part(
    model: Model[ModelConfig], mesh: Mesh, strategy: StrategyConfig
) -> Model[ModelConfig]:
    """The tower on ``mesh``: ``module(params)(batch)`` is ``Batch.features``; allocates nothing.

    Raises:
        ConfigError: dims that the mesh does not divide.
    """
    axes = axes_of(model.config, mesh, strategy)["vision"]

    def make(init: Init) -> nnx.Module:
        return Tower(init, axes, model.config)

    # Adapters are the whole model's: it has found them, and _part takes the tower's over.
    config = dataclasses.replace(model.config, lora=LoraConfig())
    alone = wrap(make, mesh, {"vision": strategy}, config)
    there = {"mesh": mesh, "graph": alone.graph, "make": make, "strategies": alone.strategies}
    return _part(model, is_tower, **there)


def rest_of(model: Model[ModelConfig]) -> Model[ModelConfig]:
    """The model without its tower: it takes batches with features."""
    absent = {path: x for path, x in model.shapes.items() if is_tower(path)}
    there = {name: s for name, s in model.strategies.items() if name != "vision"}
    return _part(model, lambda path: not is_tower(path), strategies=there, absent=absent)


def _part(
    model: Model[ModelConfig], mine: Callable[[str], bool], **more: Any
) -> Model[ModelConfig]:
    def pick(of: Mapping[str, Any]) -> dict[str, Any]:
        return {path: x for path, x in of.items() if mine(path)}

    found = dataclasses.replace(
        model,
        shapes=pick(model.shapes),
        logical=pick(model.logical),
        adapted=pick(model.adapted),
        packed=pick(model.packed),
        **more,
    )
    _ = found.shardings  # dims that the mesh does not divide are refused here
    return found
