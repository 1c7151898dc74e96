"""A checkpoint's settings and a recipe's, put together: the one says what a model is, the other how
it is computed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Collection
from typing import Any, TypeVar

from jaxvlm.config import ConfigError, ModelConfig

T = TypeVar("T")
OURS = ("remat", "trunk", "dropout", "attention_dropout", "expert_matmul")
"""Settings of a tower that say how it is computed or trained, not what it is; a recipe's to say."""


def json_object(path: pathlib.Path, advice: str = "give a checkpoint's folder") -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: it is missing (the message says ``advice``), or holds none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; {advice}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no object")
    return found


def merged_model(given: ModelConfig, found: ModelConfig) -> ModelConfig:
    """The checkpoint's model with the recipe's way to compute it."""
    towers = {
        tower: merged(getattr(given, tower), getattr(found, tower), f"config.model.{tower}")
        for tower in ("vision", "connector", "decoder")
    }
    return dataclasses.replace(given, **towers)


def merged(
    given: T, found: T, where: str, ours: Collection[str] = OURS, unset: T | None = None
) -> T:
    """A checkpoint's group of settings with the recipe's way to compute it.

    Args:
        given: of the recipe.
        found: of the checkpoint.
        where: what error messages call the group.
        ours: fields that are the recipe's to say.
        unset: what the group is where a recipe says nothing; ``None``: the class's defaults.

    Raises:
        ConfigError: the recipe sets another one, to another value.
    """
    group: Any = given
    unset, own = unset or type(given)(), {}
    for field in dataclasses.fields(group):
        value, of_file = getattr(given, field.name), getattr(found, field.name)
        if field.name in ours:
            own[field.name] = value
        elif value not in (getattr(unset, field.name), of_file):
            raise ConfigError(
                f"{where}.{field.name}={value!r}, but the checkpoint says {of_file!r}; leave it out"
            )
    group = found
    return dataclasses.replace(group, **own)
