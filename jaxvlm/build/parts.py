"""A model's vision tower by itself, and all the rest without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jaxvlm.build.model import Known, Model, axes_of, wrap
from jaxvlm.config import DualConfig, LoraConfig, ModelConfig, StrategyConfig
from jaxvlm.models import dual, vlm
from jaxvlm.models.vit import Tower
from jaxvlm.nn.param import Init
from jaxvlm.train.apart import is_tower


def features_of(config: ModelConfig | DualConfig) -> tuple[int, int]:
    """(P, D) of a picture in ``Batch.features``; P is 0 where a picture of any size has one of each
    of its patches, and 1 of a dual encoder, whose tower gives a vector.
    """
    if isinstance(config, DualConfig):
        return 1, config.vision.width
    return 0 if config.vision.packed else vlm.tower_tokens(config), vlm.tower_width(config)


def tower_part(model: Model[Known], mesh: Mesh, strategy: StrategyConfig) -> Model[Known]:
    """The tower on ``mesh``: ``module(params)(batch)`` is ``Batch.features``; allocates nothing.

    Raises:
        ConfigError: dims that the mesh does not divide.
    """
    axes = axes_of(model.config, mesh, strategy)["vision"]

    def make(init: Init) -> nnx.Module:
        encode = dual.encoded if isinstance(model.config, DualConfig) else vlm.encoded
        return Tower(init, axes, model.config, encode)

    # Adapters are the whole model's: it has found them, and _part takes the tower's over.
    config = dataclasses.replace(model.config, lora=LoraConfig())
    alone = wrap(make, mesh, {"vision": strategy}, config)
    there = {"mesh": mesh, "graph": alone.graph, "make": make, "strategies": alone.strategies}
    return _part(model, is_tower, **there)


def rest_of(model: Model[Known]) -> Model[Known]:
    """The model without its tower: it takes batches with features."""
    absent = {path: x for path, x in model.shapes.items() if is_tower(path)}
    there = {name: s for name, s in model.strategies.items() if name != "vision"}
    return _part(model, lambda path: not is_tower(path), strategies=there, absent=absent)


def _part(model: Model[Known], mine: Callable[[str], bool], **more: Any) -> Model[Known]:
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
