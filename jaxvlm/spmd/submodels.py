"""Submodels: a model's vision encoder alone, and the model without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jaxvlm.config import DualConfig, LoraConfig, ModelConfig, StrategyConfig
from jaxvlm.models import dual_encoder, vlm
from jaxvlm.models.vit import VisionEncoder
from jaxvlm.nn.param import Init
from jaxvlm.spmd.model import AnyModelConfig, Model, axes_of, wrap
from jaxvlm.types import is_vision_path


def feature_shape(config: ModelConfig | DualConfig) -> tuple[int, int]:
    """Return the shape (P, D) of an image's features in ``Batch.features``.

    P is 0 for packed encoders, where an image of any size has one feature for each patch, and 1
    for a dual encoder, whose vision encoder gives one embedding.
    """
    if isinstance(config, DualConfig):
        return 1, config.vision.width
    return 0 if config.vision.packed else vlm.encoder_tokens(config), vlm.encoder_width(config)


def vision_encoder_part(
    model: Model[AnyModelConfig], mesh: Mesh, strategy: StrategyConfig
) -> Model[AnyModelConfig]:
    """Return the vision encoder on ``mesh``; allocates nothing.

    Its ``module(params)(batch)`` computes ``Batch.features``.

    Raises:
        ConfigError: dims that the mesh does not divide.
    """
    axes = axes_of(model.config, mesh, strategy)["vision"]

    def make(init: Init) -> nnx.Module:
        encode = dual_encoder.encoded if isinstance(model.config, DualConfig) else vlm.encoded
        return VisionEncoder(init, axes, model.config, encode)

    # The full model has matched adapters already; _part takes over those of the encoder.
    config = dataclasses.replace(model.config, lora=LoraConfig())
    alone = wrap(make, mesh, {"vision": strategy}, config)
    placement = {"mesh": mesh, "graph": alone.graph, "make": make, "strategies": alone.strategies}
    return _part(model, is_vision_path, **placement)


def without_vision_encoder(model: Model[AnyModelConfig]) -> Model[AnyModelConfig]:
    """Return the model without its vision encoder: it takes batches with features."""
    absent = {path: x for path, x in model.shapes.items() if is_vision_path(path)}
    strategies = {name: s for name, s in model.strategies.items() if name != "vision"}
    return _part(model, lambda path: not is_vision_path(path), strategies=strategies, absent=absent)


def _part(
    model: Model[AnyModelConfig], belongs: Callable[[str], bool], **more: Any
) -> Model[AnyModelConfig]:
    def pick(of: Mapping[str, Any]) -> dict[str, Any]:
        return {path: x for path, x in of.items() if belongs(path)}

    part = dataclasses.replace(
        model,
        shapes=pick(model.shapes),
        logical=pick(model.logical),
        adapted=pick(model.adapted),
        packed=pick(model.packed),
        **more,
    )
    _ = part.shardings  # refuses dims that the mesh does not divide
    return part
