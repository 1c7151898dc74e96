"""Converts between a ConfigDict and frozen dataclasses; errors name the right key or type."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_collections


class ConfigError(ValueError):
    """A setting that can't be used; the message says which one, and what to set instead."""


def check_choice(setting: str, value: str, known: Iterable[str]) -> None:
    """Refuse an unknown value of a setting.

    Raises:
        ConfigError: ``value`` is none of ``known``.
    """
    known = list(known)  # a value that has no hash can be looked for in a list
    if value not in known:
        raise ConfigError(f"{setting}={value!r}; known: {', '.join(known)}")


class Options(dict[str, Any]):
    """Settings by name, with lists as tuples and nested groups as ``Options``: those of an
    extension, or groups of one dataclass under names of the user's own.
    """

    def __init__(self, values: Any = ()):
        super().__init__({str(key): _frozen(value) for key, value in dict(values).items()})

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none; settings never change
        return hash(frozenset(self.items()))


NO_OPTIONS = Options()


def _frozen(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return value
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return Options(value)
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def to_config_dict(config: Any) -> ml_collections.ConfigDict:
    """Convert a dataclass to a ConfigDict with the same keys.

    Args:
        config: a dataclass instance, nested ones included.

    Returns:
        A locked ConfigDict: assigning to an unknown key raises, but in ``options`` of an extension,
        which are checked when the extension is imported, and where names are the user's own. A
        whole number in a field that may be a float is a float, so that both can be assigned to it.
    """
    open_groups: list[ml_collections.ConfigDict] = []

    def group(config: Any) -> ml_collections.ConfigDict:
        fields, hints = {}, typing.get_type_hints(type(config))
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if isinstance(value, Options):
                inside = {
                    key: group(part) if dataclasses.is_dataclass(part) else part
                    for key, part in value.items()
                }
                value = ml_collections.ConfigDict(inside)
                open_groups.append(value)
            elif dataclasses.is_dataclass(value):
                value = group(value)
            elif type(value) is int and _may_be_float(hints[field.name]):
                value = float(value)
            fields[field.name] = value
        return ml_collections.ConfigDict(fields)

    result = group(config).lock()
    for options in open_groups:
        options.unlock()
    return result


def _may_be_float(kind: Any) -> bool:
    return float in (kind, *(typing.get_args(kind) if isinstance(kind, types.UnionType) else ()))


def checked_fields(values: Any, schema: Any, path: str) -> dict[str, Any]:
    """Check each key of a ConfigDict, and convert its value to the type of the dataclass's field.

    Args:
        values: mapping (ConfigDict or dict), nested like ``schema``, in which keys may be missing;
            or a dataclass, whose values are checked too.
        schema: dataclass whose arguments they become.
        path: path of ``values`` in error messages.

    Raises:
        ConfigError: an unknown key (the message names the nearest known one), or a value of a wrong
            type.
    """
    if dataclasses.is_dataclass(values):
        values = to_config_dict(values)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    hints = typing.get_type_hints(schema)
    checked = {}
    for key, value in dict(values).items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            advice = f"did you mean {path}.{near[0]}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"{path}.{key} is not a setting; {advice}")
        checked[key] = _checked(value, hints[key], f"{path}.{key}")
    return checked


_LARGEST = 2**31 - 1  # arrays are indexed by 32 bits
_FROM_1 = (
    *("width", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "patch_size", "frames", "merge"),
    *("merge_block", "embed_dim", "batch_size", "buckets", "keep"),
    *("max_pixels", "max_images_per_sequence", "workers", "prefetch", "log_every", "max_bad_steps"),
)
_ALL_OR_NONE = (
    *("data", "fsdp", "tensor", "context", "expert", "pipeline", "devices"),
    *("eos_id", "max_negatives", "query_mini_batch"),
)
"""Settings in which -1 stands for all of them, for none, or for what the planner chooses."""
_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_FROM_1, (1, math.inf)),
    **dict.fromkeys(_ALL_OR_NONE, (-1, math.inf)),
    **dict.fromkeys(("feature_layer", "feature_layers"), (-math.inf, -1)),  # from the end
    **dict.fromkeys(("scale", "bias", "margin"), (-math.inf, math.inf)),  # of logits
    "pixel_std": (1e-6, math.inf),
    "b1": (0, 0.9999999),
    "b2": (0, 0.9999999),
    "max_skip_fraction": (0, 1),
    "mixture_temperature": (0.1, math.inf),
    **dict.fromkeys(("epochs", "max_epochs"), (0, 1e6)),
    "tokens": (0, 1e15),
    "prometheus_port": (0, 65535),
}
"""Name of a setting -> the least and the largest number that it can be, in whatever group it is.
Others can be 0 or more: sizes, counts, rates and weights have no negative numbers."""


def check_ranges(settings: Any, path: str) -> None:
    """Check that numbers can be sizes, rates and bounds at all; what fits what is checked later.

    Args:
        settings: a dataclass of settings, nested ones included; extensions' options are left out.
        path: path of ``settings`` in error messages.

    Raises:
        ConfigError: a number is NaN, infinite, over 2**31 - 1 (the seed may be), or outside of
            what its setting can be.
    """
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), f"{path}.{field.name}"
        for at, part in _groups(value, name):
            check_ranges(part, at)
        for number in _flat(value):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if not math.isfinite(number):
                raise ConfigError(f"{name}={number}: must be a finite number")
            if isinstance(number, int) and number > _LARGEST and field.name != "seed":
                raise ConfigError(f"{name}={number}: must be at most {_LARGEST}")
            least, most = _BOUNDS.get(field.name, (0, math.inf))
            if not least <= number <= most:
                span = f"at least {least}" if most == math.inf else f"from {least} to {most}"
                span = span if least > -math.inf else f"at most {most}"
                raise ConfigError(f"{name}={number}: must be {span}")


def _groups(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and dataclass of each group that a setting is or has."""
    if dataclasses.is_dataclass(value):
        yield path, value
    if isinstance(value, Options):
        yield from ((f"{path}.{k}", x) for k, x in value.items() if dataclasses.is_dataclass(x))


def _flat(value: Any) -> Iterator[Any]:
    """The values in a tuple, and in the tuples in it; or the value alone."""
    if isinstance(value, tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def by_path(config: Any, path: str = "config") -> dict[str, Any]:
    """Maps each setting's path to its value."""
    if not dataclasses.is_dataclass(config):
        inside = dict(_groups(config, path))
        return {k: x for at, part in inside.items() for k, x in by_path(part, at).items()} or {
            path: config
        }
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        found |= by_path(getattr(config, field.name), f"{path}.{field.name}")
    return found


def changes(old: Any, new: Any, path: str = "config") -> list[str]:
    """Lists the settings that differ between two configs, as ``path: old -> new``."""
    was, now = by_path(old, path), by_path(new, path)
    names = [*was, *(name for name in now if name not in was)]
    return [
        f"{name}: {was.get(name)!r} -> {now.get(name)!r}"
        for name in names
        if was.get(name) != now.get(name)
    ]


def _checked(value: Any, kind: Any, path: str) -> Any:
    """``value`` as ``kind``; otherwise a ConfigError that names ``path``."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not hasattr(value, "items"):
            near = f"; did you mean {path}.name={value!r}?" if hasattr(kind, "name") else ""
            raise ConfigError(f"{path} is a group of settings, not {value!r}{near}")
        return kind(**checked_fields(value, kind, path))
    if typing.get_origin(kind) is Mapping:
        if not hasattr(value, "items"):
            raise ConfigError(f"{path} is a group of settings, not {value!r}")
        each = typing.get_args(kind)[1]
        if not dataclasses.is_dataclass(each):
            return Options(value)
        return Options({k: _checked(x, each, f"{path}.{k}") for k, x in value.items()})
    if typing.get_origin(kind) is tuple:
        return _checked_tuple(value, typing.get_args(kind), path)
    if typing.get_origin(kind) is typing.Literal:
        known = {(type(x), x) for x in typing.get_args(kind)}
        if isinstance(value, str | int) and (type(value), value) in known:
            return value
        names = ", ".join(map(repr, typing.get_args(kind)))
        raise ConfigError(f"{path}={value!r}; known: {names}")
    if not _is_settable(kind):
        raise ConfigError(
            f"{path}: a field of type {getattr(kind, '__name__', kind)} can't be set; give it the "
            "type bool, int, float, str, Literal, a tuple of these (tuple[float, ...] instead of a "
            "list), or a frozen dataclass instead of a dict"
        )
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wrong_bool = isinstance(value, bool) and kind is not bool
    if isinstance(kind, types.GenericAlias) or wrong_bool or not isinstance(value, kind):
        raise ConfigError(f"{path} must be {getattr(kind, '__name__', kind)}, not {value!r}")
    return value


def _is_settable(kind: Any) -> bool:
    """Whether a value can be checked to be of a type."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return all(map(_is_settable, typing.get_args(kind)))
    return kind in (bool, int, float, str, tuple, type(None))


def _checked_tuple(value: Any, args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{path} must be a list, not {value!r}")
    items = tuple(value)
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
    if len(items) != len(kinds):
        raise ConfigError(f"{path} must have {len(kinds)} entries, not {len(items)}")
    pairs = zip(items, kinds, strict=True)
    return tuple(_checked(item, kind, f"{path}[{i}]") for i, (item, kind) in enumerate(pairs))
