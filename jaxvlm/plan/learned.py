"""What of a model learns: its parameters' paths, split as the run splits them.

A pattern may freeze part of a tower, and adapters may be asked for on some maps only, so only the
model's own paths say it. They cost a trace of the model's shapes, once a model and its patterns.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxvlm.build.assemble import split
from jaxvlm.build.model import Model, build_model
from jaxvlm.config import DualConfig, MeshConfig, ModelConfig, VectorConfig
from jaxvlm.models.lora import is_adapter
from jaxvlm.plan import absent


class Learned(NamedTuple):
    """Of a tower: shares of its matrices whose gradients are taken, 0..1."""

    blocks: float = 0.0
    """Of those of its blocks, experts left out."""
    experts: float = 0.0
    other: float = 0.0
    """Of all else: stems, tables, output matrices."""
    own: bool = False
    """Any of its parameters does that is no adapter's, were it a norm's."""
    adapted: bool = False
    """An adapter does."""
    back: bool = False
    """A gradient is wanted of something in or before its blocks."""


NOTHING = Learned()
GROUPS = ("blocks", "experts", "other")
_BEHIND = ("decoder/embed/out", "decoder/norm/")
"""Behind a tower's blocks: to learn these asks for no way back through them."""


@functools.lru_cache(maxsize=256)
def of(config: ModelConfig | DualConfig, frozen: tuple[str, ...]) -> Mapping[str, Learned]:
    """Tower -> what of it learns; towers in which nothing does are left out.

    Args:
        config: the model, its adapters with it.
        frozen: path patterns.

    Raises:
        ConfigError: a pattern that matches nothing, as in a run.
    """
    return _of(plain(config), frozen)


@functools.lru_cache(maxsize=64)
def _of(config: ModelConfig | DualConfig, frozen: tuple[str, ...]) -> Mapping[str, Learned]:
    model = alone(config, None)
    own, _ = split(model, model.shapes, frozen)
    every: collections.Counter[tuple[str, str]] = collections.Counter()
    taken: collections.Counter[tuple[str, str]] = collections.Counter()
    for path, x in model.shapes.items():
        words = [word for word in model.logical[path] if word != "layers"]
        vector = len(words) < 2 or words[1:] == ["head_dim"]  # a bias of heads too
        if is_adapter(path) or vector:
            continue
        group = "other"
        if "/blocks/" in path:
            group = "experts" if {"experts", "mlp"} <= set(words) else "blocks"
        key = _tower(path), group
        every[key] += math.prod(x.shape)
        taken[key] += math.prod(x.shape) * (path in own)
    made: dict[str, Learned] = {}
    for tower in dict.fromkeys(map(_tower, own)):
        groups = {g: taken[tower, g] / every[tower, g] for g in GROUPS if every[tower, g]}
        inside = [path for path in own if path.startswith(f"{tower}/")]
        made[tower] = Learned(
            **groups,
            own=any(not is_adapter(path) for path in inside),
            adapted=any(map(is_adapter, inside)),
            back=any(not path.startswith(_BEHIND) for path in inside),
        )
    return made


def _tower(path: str) -> str:
    """A dual encoder's ``head/vision/w`` is the vision tower's, behind its blocks."""
    return path.removeprefix("head/").split("/")[0]


@functools.lru_cache(maxsize=64)
def alone(config: ModelConfig | DualConfig, vectors: VectorConfig | None) -> Model:
    """A model on one device that is not there."""
    model: Any = build_model(config, absent.mesh(MeshConfig(data=1), "cpu"), vectors=vectors)
    return model


def plain(config: ModelConfig | DualConfig) -> ModelConfig | DualConfig:
    """Remat and attention's backend change no parameter, and are not to be traced apart."""
    towers = {
        name: dataclasses.replace(getattr(config, name), remat="none")
        for name in ("vision", "decoder", "text")
        if hasattr(config, name)
    }
    return dataclasses.replace(config, **towers, attention="xla")
