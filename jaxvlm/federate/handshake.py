"""What sites must have in common, and what each says of itself when it joins."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxvlm.config import (
    GRAD_REDUCE_BITS,
    Config,
    ConfigError,
    FederateConfig,
    OuterConfig,
    by_path,
    check_choice,
    refuse_unread,
)
from jaxvlm.config.convert import checked_fields
from jaxvlm.federate.aggregate import check_aggregator
from jaxvlm.federate.privacy import check_privacy
from jaxvlm.optim.outer import make_outer_optimizer

LOSSLESS = "exact"
_SAME = {
    "settings": "the setting {key} is {theirs!r} there and {ours!r} here; use one recipe",
    "parameters": "the trained parameter {key} is {theirs} there and {ours} here: another model",
    "frozen": "frozen weights of {key} differ: start from the same checkpoint, with the same seed",
    "start": "first weights of {key} differ: start from the same checkpoint, with the same seed",
    "tokenizer": "the tokenizer differs ({key}): give all sites the same, by config.tokenizer.path",
    "images": "images are prepared in another way ({key}): {theirs!r} there and {ours!r} here",
    "tokens": "visual tokens differ in {key}: {theirs!r} there and {ours!r} here",
}
"""Group of facts that all sites have in common -> what is said where one differs."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a site says of itself when it joins; JSON values."""

    site: str
    common: dict[str, dict[str, Any]]
    """Group of facts -> name -> value: what all sites must have in common."""
    about: dict[str, Any]
    """Platform, device, versions: they are recorded, and may differ."""
    token_bound: int = 0
    """The largest lag at which the site's cache may read visual tokens."""
    stacked: dict[str, int] = dataclasses.field(default_factory=dict)
    """Path of a linear map with adapters -> its leading dims of layers."""


def check_settings(config: Config) -> None:
    """Refuse settings that no federation can use.

    Raises:
        ConfigError: which setting, and what would do.
    """
    federate, outer = config.federate, config.outer
    where = "config.federate"
    if not federate.sites:
        raise ConfigError(f"{where}.sites=0: set the number of sites of the federation")
    if not federate.rounds:
        raise ConfigError(f"{where}.rounds=0: set the number of outer updates")
    if not outer.steps:
        raise ConfigError("config.outer.steps=0: set the train steps between two outer updates")
    refuse_unread(federate, where)
    refuse_unread(outer, "config.outer")
    make_outer_optimizer(outer)
    check_choice("config.outer.delta_dtype", outer.delta_dtype, GRAD_REDUCE_BITS)
    if (federate.deadline_s > 0) != (federate.min_sites > 0):
        raise ConfigError(
            f"{where}.deadline_s={federate.deadline_s:g} with min_sites={federate.min_sites}: "
            "after the deadline min_sites updates are enough; set both, or neither"
        )
    check_choice(f"{where}.weighting", federate.weighting, ("tokens", "steps", "uniform"))
    check_choice(
        f"{where}.cache_invalidation", federate.cache_invalidation, ("digest", "lazy", "flush")
    )
    check_choice(f"{where}.lora", federate.lora, ("product", "freeze_a"))
    check_choice(f"{where}.mixed_codecs", federate.mixed_codecs, ("refuse", LOSSLESS))
    if federate.buffer > federate.sites:
        raise ConfigError(
            f"{where}.buffer={federate.buffer} is above {where}.sites={federate.sites}; lower it"
        )
    if 0 < federate.buffer < federate.sites and not federate.max_staleness:
        raise ConfigError(
            f"{where}.buffer={federate.buffer} of {federate.sites} sites with max_staleness=0: "
            "slow sites' updates would all be refused; raise max_staleness"
        )
    if federate.min_sites > (federate.buffer or federate.sites):
        raise ConfigError(
            f"{where}.min_sites={federate.min_sites} is above the buffer's size; lower it"
        )
    check_aggregator(federate, federate.buffer or federate.sites)
    check_privacy(federate)
    lora = config.network.lora
    if lora.rank or lora.checkpoint:
        _check_lora(federate, outer, lora.dora)
    elif federate.lora != FederateConfig().lora:
        raise ConfigError(
            f"{where}.lora={federate.lora!r} is not read without adapters, config.model.lora; "
            "leave it out"
        )


def _check_lora(federate: FederateConfig, outer: OuterConfig, dora: bool) -> None:
    """Refuse combinations of adapters that are not the mean of what sites trained."""
    if dora:
        raise ConfigError(
            "config.model.lora.dora=True in a federation: the mean of magnitudes and directions "
            "apart is not the mean of weights; use LoRA"
        )
    if federate.lora != "product":
        return
    if outer.moments != "reset":
        raise ConfigError(
            "config.federate.lora='product' needs --config.outer.moments=reset: the best adapter "
            "of a mean has other columns than a site's, which moments are of; or use lora=freeze_a"
        )
    refused = {
        "config.federate.max_staleness": federate.max_staleness,
        "config.federate.aggregator": federate.aggregator != "mean" and federate.aggregator,
        "config.federate.max_delta_norm": federate.max_delta_norm,
        "config.outer.delta_dtype": outer.delta_dtype != "float32" and outer.delta_dtype,
        "config.outer.optimizer": outer.optimizer != "sgd" and outer.optimizer,
        "config.outer.momentum": outer.momentum,
        "config.outer.learning_rate": outer.learning_rate != 1 and outer.learning_rate,
    }
    for name, value in refused.items():
        if value:
            raise ConfigError(
                f"{name}={value} with config.federate.lora='product': it would apply to the two "
                "matrices of an adapter apart, and not to their product; use "
                "--config.federate.lora=freeze_a, or leave it out"
            )


def differences(ours: Facts, theirs: Facts) -> list[str]:
    """What keeps a site out of a federation.

    Args:
        ours: of the site.
        theirs: of the first site of the federation.

    Returns:
        A sentence for each difference, the first of each group; [] where it may join.
    """
    found = []
    for group, text in _SAME.items():
        here, there = ours.common.get(group, {}), theirs.common.get(group, {})
        for key in sorted({*here, *there}):
            if here.get(key) == there.get(key):
                continue
            found.append(text.format(key=key, ours=here.get(key), theirs=there.get(key)))
            break
    return found


def comparable(group: Any, path: str) -> dict[str, Any]:
    """The settings of a group by path, as JSON values that two sites' can be compared by."""
    plain = (bool, int, float, str)
    every = by_path(group, path)
    return {path: x if isinstance(x, plain) else repr(x) for path, x in sorted(every.items())}


def refuse_other_settings(facts: Facts, config: Config) -> None:
    """Refuse a site whose recipe is not that of the coordinator's federation.

    Raises:
        ConfigError: the first setting that differs.
    """
    theirs = facts.common.get("settings", {})
    for group in ("federate", "outer"):
        for path, value in comparable(getattr(config, group), f"config.{group}").items():
            if theirs.get(path) != value:
                raise ConfigError(
                    f"site {facts.site} can't join: {path} is {value!r} at the coordinator and "
                    f"{theirs.get(path)!r} here; use one recipe"
                )


def facts_of(values: Any) -> Facts:
    """Facts from the JSON values of a message.

    Raises:
        ConfigError: a field is missing or of another type.
    """
    kinds: dict[str, type] = {
        "site": str,
        "common": dict,
        "about": dict,
        "token_bound": int,
        "stacked": dict,
    }
    if not isinstance(values, dict):
        raise ConfigError("what the site says of itself is no object")
    for name, kind in kinds.items():
        if not isinstance(values.get(name), kind):
            raise ConfigError(f"what the site says of itself has no {name} of type {kind.__name__}")
    if not all(isinstance(group, dict) for group in values["common"].values()):
        raise ConfigError("what the site says of itself has a group of facts that is no object")
    return Facts(**{name: values[name] for name in kinds})


def settings_of(config: Config) -> dict[str, Any]:
    """The settings of a federation, as JSON values: what a coordinator needs of a recipe."""
    return {
        "federate": dataclasses.asdict(config.federate),
        "outer": dataclasses.asdict(config.outer),
    }


def read_settings(values: dict[str, Any]) -> tuple[FederateConfig, OuterConfig]:
    """Read :func:`settings_of`.

    Raises:
        ConfigError: an unknown setting, or a value of another type.
    """
    federate = FederateConfig(**checked_fields(values["federate"], FederateConfig, "federate"))
    return federate, OuterConfig(**checked_fields(values["outer"], OuterConfig, "outer"))
