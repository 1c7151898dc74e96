"""Trainable parameters of a model: its parameters' paths, split as the run splits them.

A pattern may freeze part of a tower, and adapters may be on some maps only, so only the model's own
paths can tell. Listing them costs one trace of the model's shapes, per model and its patterns.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxvlm.config import DualConfig, EmbeddingConfig, MeshConfig, ModelConfig
from jaxvlm.models.lora import is_adapter
from jaxvlm.planner.request import abstract_devices
from jaxvlm.planner.request.per_object import per_object
from jaxvlm.spmd.model import Model, build_model
from jaxvlm.spmd.train_step import split


class TrainableParams(NamedTuple):
    """A tower's trainable parameters: fractions of its matrices whose gradients are computed,
    0..1.
    """

    blocks: float = 0.0
    """Of the matrices of its blocks, without experts."""
    experts: float = 0.0
    other: float = 0.0
    """Of all other matrices: stems, tables, output matrices."""
    own: bool = False
    """Whether any parameter other than adapters is trained, a norm's included."""
    adapted: bool = False
    """Whether an adapter is trained."""
    backward: bool = False
    """Whether a gradient is needed of something in or before its blocks."""


NOTHING = TrainableParams()
GROUPS = ("blocks", "experts", "other")
_BEHIND = ("decoder/embed/out", "decoder/norm/")
"""Parameters after a tower's blocks: training these needs no backward pass through the blocks."""


@per_object
def of(config: ModelConfig | DualConfig, frozen: tuple[str, ...]) -> Mapping[str, TrainableParams]:
    """Tower -> its trainable parameters; fully frozen towers are left out.

    Args:
        config: the model, with its adapters.
        frozen: path patterns.

    Raises:
        ConfigError: a pattern that matches nothing, as in a run.
    """
    return _of(plain(config), frozen)


@functools.lru_cache(maxsize=64)
def _of(config: ModelConfig | DualConfig, frozen: tuple[str, ...]) -> Mapping[str, TrainableParams]:
    model = alone(config, None)
    trained_paths, _ = split(model, model.shapes, frozen)
    totals: collections.Counter[tuple[str, str]] = collections.Counter()
    trained: collections.Counter[tuple[str, str]] = collections.Counter()
    for path, x in model.shapes.items():
        words = [word for word in model.logical[path] if word != "layers"]
        embedding = len(words) < 2 or words[1:] == ["head_dim"]  # includes biases of heads
        if is_adapter(path) or embedding:
            continue
        group = "other"
        if "/blocks/" in path:
            group = "experts" if {"experts", "mlp"} <= set(words) else "blocks"
        key = _tower(path), group
        totals[key] += math.prod(x.shape)
        trained[key] += math.prod(x.shape) * (path in trained_paths)
    result: dict[str, TrainableParams] = {}
    for tower in dict.fromkeys(map(_tower, trained_paths)):
        groups = {g: trained[tower, g] / totals[tower, g] for g in GROUPS if totals[tower, g]}
        inside = [path for path in trained_paths if path.startswith(f"{tower}/")]
        result[tower] = TrainableParams(
            **groups,
            own=any(not is_adapter(path) for path in inside),
            adapted=any(map(is_adapter, inside)),
            backward=any(not path.startswith(_BEHIND) for path in inside),
        )
    return result


def _tower(path: str) -> str:
    """Tower of a path. A dual encoder's ``head/vision/w``, after the blocks, is the vision
    tower's.
    """
    return path.removeprefix("head/").split("/")[0]


@functools.lru_cache(maxsize=64)
def alone(config: ModelConfig | DualConfig, embeddings: EmbeddingConfig | None) -> Model:
    """A model on one abstract device."""
    mesh = abstract_devices.mesh(MeshConfig(data=1), "cpu")
    model: Any = build_model(config, mesh, embeddings=embeddings)
    return model


@per_object
def plain(config: ModelConfig | DualConfig) -> ModelConfig | DualConfig:
    """The config without remat and attention backend, which change no parameter: fewer traces."""
    towers = {
        name: dataclasses.replace(getattr(config, name), remat="none")
        for name in ("vision", "decoder", "text")
        if hasattr(config, name)
    }
    return dataclasses.replace(config, **towers, attention="xla")
