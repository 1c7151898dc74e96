"""Merges a checkpoint's settings, which define a model, with a recipe's, which say how to compute
it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Collection
from typing import Any, TypeVar

from jaxvlm.config import ConfigError, ModelConfig, json_text

T = TypeVar("T")
RECIPE_FIELDS = ("remat", "frozen_blocks", "dropout", "attention_dropout", "expert_matmul")
"""Settings that say how a model is computed or trained, not what it is; the recipe decides them."""


def json_object(path: pathlib.Path, advice: str = "give a checkpoint's folder") -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ConfigError: the file is missing (the message includes ``advice``), or holds no object.
    """
    try:
        content = json_text.read(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; {advice}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no object")
    return content


def write_json(path: pathlib.Path, content: Any) -> None:
    """Write a JSON file with indents."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def merged_model(recipe: ModelConfig, checkpoint: ModelConfig) -> ModelConfig:
    """The checkpoint's model with the recipe's settings of how to compute it."""
    parts = {
        part: merged(getattr(recipe, part), getattr(checkpoint, part), f"config.model.{part}")
        for part in ("vision", "connector", "decoder")
    }
    return dataclasses.replace(recipe, **parts)


def merged(
    recipe: T,
    checkpoint: T,
    path: str,
    recipe_fields: Collection[str] = RECIPE_FIELDS,
    unset: T | None = None,
) -> T:
    """The checkpoint's group of settings with the recipe's settings of how to compute it.

    Args:
        recipe: group of the recipe.
        checkpoint: the same group of the checkpoint.
        path: path of the group in error messages.
        recipe_fields: fields whose value is taken from the recipe.
        unset: value of the group where a recipe sets nothing; ``None``: the class's defaults.

    Raises:
        ConfigError: the recipe sets another field to a value that is not the checkpoint's.
    """
    group: Any = recipe
    unset, taken = unset or type(recipe)(), {}
    for field in dataclasses.fields(group):
        value, of_checkpoint = getattr(recipe, field.name), getattr(checkpoint, field.name)
        if field.name in recipe_fields:
            taken[field.name] = value
        elif value not in (getattr(unset, field.name), of_checkpoint):
            raise ConfigError(
                f"{path}.{field.name}={value!r}, but the checkpoint says {of_checkpoint!r}; "
                "leave it out"
            )
    group = checkpoint
    return dataclasses.replace(group, **taken)
