"""Whether a model drops anything as it is trained, and what can't be dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from jaxvlm.build.model import Model
from jaxvlm.config import ConfigError, DualConfig, LoraConfig, ModelConfig, TrainConfig
from jaxvlm.models import lora

_PARTS = {"vision": ("vision/", "top/"), "decoder": ("decoder/",), "text": ("text/",)}
_RATES = ("dropout", "attention_dropout")
_AT_ZERO = "leave it at 0, and lora_dropout in the adapter_config.json that a run starts from too"


def _rates(config: ModelConfig | DualConfig) -> dict[str, float]:
    """``tower.field`` -> what a tower drops; those above 0."""
    found = {
        f"{tower}.{field}": getattr(getattr(config, tower, None), field, 0.0)
        for tower in _PARTS
        for field in _RATES
    }
    return {name: rate for name, rate in found.items() if rate}


def learning(model: Model, own: Collection[str]) -> tuple[Model, bool]:
    """The model with dropout on the adapters that learn, and whether anything is dropped.

    Args:
        model: of any kind.
        own: paths of the trainable parameters.

    Raises:
        ConfigError: dropout in a part that does not learn: it is run once, and may be kept.
    """
    where = "config.dual" if isinstance(model.config, DualConfig) else "config.model"
    noisy = frozenset(path for path in model.noisy if f"{path}/{lora.A}" in own)
    if model.noisy and not noisy:
        raise ConfigError(
            f"{where}.lora.dropout={model.adapter.dropout:g}: no adapter learns; {_AT_ZERO}"
        )
    rates = _rates(model.config) if isinstance(model.config, (ModelConfig, DualConfig)) else {}
    for name, rate in rates.items():
        if not any(path.startswith(_PARTS[name.split(".")[0]]) for path in own):
            raise ConfigError(
                f"{where}.{name}={rate:g}: this part is frozen, and a frozen part drops "
                "nothing; leave it at 0"
            )
    return dataclasses.replace(model, noisy=noisy), bool(noisy or rates)


def check_kept(model: Model) -> None:
    """Refuse dropout before tokens that a cache keeps.

    Raises:
        ConfigError: which setting.
    """
    name = ""
    if any(path.startswith("vision/") for path in model.noisy):
        name = f"lora.dropout={model.adapter.dropout:g}"
    elif model.config.vision.dropout and not model.has_trunk:
        name = f"vision.dropout={model.config.vision.dropout:g}"
    if name:
        raise ConfigError(
            f"config.model.{name} in a vision tower whose tokens config.cache keeps: they would be "
            f"those of one mask; {_AT_ZERO}, or config.cache.policy='off' and chunk=0"
        )


def check_read(config: TrainConfig) -> None:
    """Refuse dropout in the model that a run does not train.

    Raises:
        ConfigError: which setting.
    """
    name, other = ("model", config.model) if config.encoder == "dual" else ("dual", config.dual)
    found = _rates(other)
    if other.lora.dropout != LoraConfig().dropout:
        found["lora.dropout"] = other.lora.dropout
    for field, rate in found.items():
        raise ConfigError(
            f"config.{name}.{field}={rate:g} is not read with config.encoder={config.encoder!r}"
        )
