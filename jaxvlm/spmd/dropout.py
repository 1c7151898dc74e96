"""Dropout of a model in training: which parts have it, and where it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from jaxvlm.config import ConfigError, DualConfig, dropout_rates
from jaxvlm.models import lora
from jaxvlm.spmd.model import Model

_PARTS = {"vision": ("vision/", "vision_top/"), "decoder": ("decoder/",), "text": ("text/",)}
_AT_ZERO = "set it to 0, and lora_dropout in the adapter_config.json that a run starts from too"


def without_frozen_dropout(model: Model, trainable: Collection[str]) -> tuple[Model, bool]:
    """Return the model with dropout on trainable adapters alone, and whether it has any dropout.

    Args:
        model: a model of any kind.
        trainable: paths of the trainable parameters.

    Raises:
        ConfigError: dropout in a frozen part, whose outputs may be computed once and cached.
    """
    where = "config.dual" if isinstance(model.config, DualConfig) else "config.model"
    noisy = frozenset(path for path in model.has_dropout if f"{path}/{lora.A}" in trainable)
    if model.has_dropout and not noisy:
        raise ConfigError(
            f"{where}.lora.dropout={model.adapter.dropout:g}: no adapter is trainable; {_AT_ZERO}"
        )
    rates = dropout_rates(model.config)
    for name, rate in rates.items():
        if not any(path.startswith(_PARTS[name.split(".")[0]]) for path in trainable):
            raise ConfigError(
                f"{where}.{name}={rate:g}: this part is frozen, and dropout applies to trainable "
                "parts only; set it to 0"
            )
    return dataclasses.replace(model, has_dropout=noisy), bool(noisy or rates)


def check_cached(model: Model) -> None:
    """Refuse dropout in a vision encoder whose tokens are cached.

    Raises:
        ConfigError: the setting that has dropout.
    """
    name = ""
    if any(path.startswith("vision/") for path in model.has_dropout):
        name = f"lora.dropout={model.adapter.dropout:g}"
    elif model.config.vision.dropout and not model.has_frozen_blocks:
        name = f"vision.dropout={model.config.vision.dropout:g}"
    if name:
        raise ConfigError(
            f"config.model.{name} in a vision encoder whose tokens config.cache caches: they would "
            f"all have one dropout mask; {_AT_ZERO}, or set config.cache.policy='off' and "
            "config.cache.encode_batch=0"
        )
