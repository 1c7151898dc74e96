"""Freezes parameters that no record reaches, which weight decay alone would shrink."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxvlm.config import Config, ConfigError, DualConfig
from jaxvlm.optim.optimizer import matches
from jaxvlm.spmd.model import Model
from jaxvlm.trainer.training import trained_paths

_READ_BY = {"vision": "an image", "text": "a text"}
"""Tower of a dual encoder -> what a record needs for it."""
MODALITIES = frozenset(_READ_BY)
"""Where records hold all of these, every tower has an input."""


def freeze_unreached(
    config: Config, model: Model, dataset: Any, log: Callable[[str], None] = print
) -> Config:
    """Freeze the trainable towers that no record has an input for, and say so in a line.

    Patterns of learning rates and weight decay that match nothing else are left out with them.

    Args:
        config: of the run.
        model: on its mesh.
        dataset: that the run trains on; its ``modalities`` are a function of the data alone, so a
            run that resumes freezes the same.
        log: takes lines for people.

    Returns:
        The settings, with the towers' patterns added to ``optim.frozen``.

    Raises:
        ConfigError: nothing else is trained.
    """
    trained = trained_paths(model, config)
    missing = {
        tower: [path for path in trained if matches(path, patterns)]
        for tower, patterns in _towers(model.config).items()
        if tower not in dataset.modalities
    }
    lost = {path for paths in missing.values() for path in paths}
    if not lost:
        return config
    what = " or ".join(_READ_BY[tower] for tower, paths in missing.items() if paths)
    why = f"{dataset.name}: no record has {what}"
    if lost == set(trained):
        raise ConfigError(
            f"{why}, and config.optim.frozen and config.{_name(model)}.lora leave nothing else to "
            "train; train other parameters, or other data"
        )
    patterns = [
        pattern
        for tower in missing
        for pattern in _towers(model.config)[tower]
        if any(matches(path, (pattern,)) for path in lost)
    ]
    size = sum(math.prod(model.shapes[path].shape) for path in lost)
    log(f"{why}, so {', '.join(patterns)} ({size:,} parameters) are frozen")
    return dataclasses.replace(config, optim=_without(config.optim, lost, set(trained), patterns))


def _towers(config: Any) -> dict[str, tuple[str, ...]]:
    """What a record may have -> patterns of the parameters that nothing else reaches."""
    if isinstance(config, DualConfig):
        return {tower: (f"{tower}/*", f"head/{tower}*") for tower in config.towers}
    return {"vision": ("vision/*", "vision_top/*", "connector/*")}


def _name(model: Model) -> str:
    return "dual" if isinstance(model.config, DualConfig) else "model"


def _without(optim: Any, lost: set[str], trained: set[str], patterns: list[str]) -> Any:
    """The optimizer's settings with ``lost`` parameters frozen and patterns of these alone gone."""

    def is_kept(pattern: str) -> bool:
        matched = {path for path in trained if matches(path, (pattern,))}
        return not matched or not matched <= lost  # one that matches nothing is refused later

    return dataclasses.replace(
        optim,
        frozen=(*optim.frozen, *patterns),
        decay=tuple(filter(is_kept, optim.decay)),
        no_decay=tuple(filter(is_kept, optim.no_decay)),
        lr_multipliers=tuple(pair for pair in optim.lr_multipliers if is_kept(pair[0])),
    )
