"""ConfigDict at the door, frozen dataclasses inside; wrong keys and types name the right ones."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any, TypeVar

import ml_collections

from jaxvlm.config.schema import TrainConfig

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting that can't be used; the message says which, and what would do."""


def to_config_dict(config: Any) -> ml_collections.ConfigDict:
    """The dataclass ``config`` as a ConfigDict of the same keys.

    Args:
        config: a dataclass instance, nested ones included.

    Returns:
        A locked ConfigDict: assigning an unknown key raises.
    """
    fields = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        fields[field.name] = to_config_dict(value) if dataclasses.is_dataclass(value) else value
    return ml_collections.ConfigDict(fields).lock()


def default_config() -> ml_collections.ConfigDict:
    """All defaults of a training run, to be changed by a recipe."""
    return to_config_dict(TrainConfig())


def from_config_dict(values: Any, schema: type[T] = TrainConfig, path: str = "config") -> T:  # type: ignore[assignment]  # a TypeVar's default
    """``values`` as the dataclass ``schema``, checked key by key.

    Args:
        values: mapping (ConfigDict or dict), nested like ``schema``; keys may be missing.
        schema: the dataclass to make.
        path: what error messages call ``values``.

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a value of a wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(schema)}  # type: ignore[arg-type]  # any dataclass
    hints = typing.get_type_hints(schema)
    made = {}
    for key, value in dict(values).items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            advice = f"did you mean {path}.{near[0]}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"{path}.{key} is not a setting; {advice}")
        made[key] = _checked(value, hints[key], f"{path}.{key}")
    return schema(**made)


def _checked(value: Any, kind: Any, path: str) -> Any:
    """``value`` as ``kind``, or a ConfigError that names ``path``."""
    if dataclasses.is_dataclass(kind):
        if not hasattr(value, "items"):
            raise ConfigError(f"{path} is a group of settings, not {value!r}")
        return from_config_dict(value, kind, path)  # type: ignore[arg-type]  # a dataclass type
    if typing.get_origin(kind) is tuple:
        return _checked_tuple(value, typing.get_args(kind), path)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wrong_bool = isinstance(value, bool) and kind is not bool
    if isinstance(kind, types.GenericAlias) or wrong_bool or not isinstance(value, kind):
        raise ConfigError(f"{path} must be {getattr(kind, '__name__', kind)}, not {value!r}")
    return value


def _checked_tuple(value: Any, args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{path} must be a list, not {value!r}")
    items = tuple(value)
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
    if len(items) != len(kinds):
        raise ConfigError(f"{path} must have {len(kinds)} entries, not {len(items)}")
    pairs = zip(items, kinds, strict=True)
    return tuple(_checked(item, kind, f"{path}[{i}]") for i, (item, kind) in enumerate(pairs))
