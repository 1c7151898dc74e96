"""Reads positions from ``config.json``: RoPE scaling, M-RoPE sections, sliding windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError, RopeScaling

LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""Values of ``layer_types``."""
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset(("factor",)),
    "dynamic": frozenset(("factor",)),
    "llama3": frozenset(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ),
    "yarn": frozenset(
        (
            *("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
            *("original_max_position_embeddings", "truncate"),
        )
    ),
}
"""``rope_type`` -> fields that its group may have in addition to type and base."""


class Rotary(NamedTuple):
    """RoPE settings of a decoder."""

    theta: float
    scaling: RopeScaling
    sections: tuple[int, ...] = ()
    interleaved: bool = False


def read_rotary(
    text: Mapping[str, Any], where: str, theta: float, sectioned: Sequence[str] = ()
) -> Rotary:
    """Read the RoPE settings of a text config, as transformers 5 or older versions write them.

    Transformers 5 has ``rope_parameters``; older versions have ``rope_theta`` and ``rope_scaling``.

    Args:
        text: the fields; these three and ``max_position_embeddings`` are read.
        where: prefix of field names in error messages.
        theta: the family's default base.
        sectioned: names of further fields that a family with M-RoPE sections reads.

    Raises:
        ConfigError: an unknown type or field, or a missing number.
    """
    field = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    group = dict(text.get(field) or {})
    sections = tuple(group.pop("mrope_section", ())) if "mrope_section" in sectioned else ()
    interleaved = "mrope_interleaved" in sectioned
    if interleaved and group.pop("mrope_interleaved", True) is not True:
        raise ConfigError(f"{where}{field}: mrope_interleaved is always true in this family")
    if sectioned and group.get("rope_type", group.get("type")) == "mrope":
        group["rope_type"] = "default"
    base = group.pop("rope_theta", None) or text.get("rope_theta") or theta
    length = int(text["max_position_embeddings"])
    return Rotary(float(base), scaling(group, length, where + field), sections, interleaved)


def scaling(group: Mapping[str, Any], length: int, where: str) -> RopeScaling:
    """Read RoPE scaling from a group of RoPE parameters without its base.

    Args:
        group: ``rope_type`` (or ``type``) and its numbers.
        length: ``max_position_embeddings``.
        where: name of the group in error messages.

    Raises:
        ConfigError: an unknown type or field, or a missing number.
    """
    numbers = dict(group)
    old = numbers.pop("type", "default")
    kind = numbers.pop("rope_type", old)
    if kind not in _KEYS:
        known = ", ".join(_KEYS)
        raise ConfigError(f"{where}: rope_type={kind!r} is not supported; known: {known}")
    for key in numbers:
        if key not in _KEYS[kind]:
            raise ConfigError(f"{where}: {key}={numbers[key]!r} is unknown to rope_type={kind!r}")
    if kind == "default":
        return RopeScaling()
    original = int(numbers.get("original_max_position_embeddings") or length)
    if kind == "yarn":
        return _yarn(numbers, length, original, where)
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    for key in needed:
        if numbers.get(key) is None:
            raise ConfigError(f"{where}: rope_type={kind!r} needs a number for {key}")
    values = [float(numbers[key]) for key in needed]
    if kind == "llama3":
        return RopeScaling(kind, values[0], original, values[1], values[2])
    return RopeScaling(kind, values[0], length if kind == "dynamic" else 0)


def _yarn(numbers: Mapping[str, Any], length: int, original: int, where: str) -> RopeScaling:
    if "factor" not in numbers:
        raise ConfigError(f"{where}: rope_type='yarn' needs a number for factor")
    factor = float(numbers["factor"] or length / original)

    def growth(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    magnitude = numbers.get("attention_factor")
    if magnitude is None:
        above, below = numbers.get("mscale"), numbers.get("mscale_all_dim")
        magnitude = growth(above) / growth(below) if above and below else growth(1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=original,
        beta_fast=float(numbers.get("beta_fast") or 32.0),
        beta_slow=float(numbers.get("beta_slow") or 1.0),
        whole_dims=bool(numbers.get("truncate", True)),
        magnitude=float(magnitude),
    )


def read_windows(
    window: int | None, layer_types: Sequence[str], depth: int, where: str
) -> dict[str, Any]:
    """Read ``window`` and ``window_pattern`` of :class:`DecoderConfig`.

    Args:
        window: tokens that a query of a local layer attends to, or ``None``.
        layer_types: one entry per layer.
        depth: L.
        where: prefix of field names in error messages.

    Raises:
        ConfigError: a layer of another type, too few entries, or no window for a local layer.
    """
    if unknown := set(layer_types) - {LOCAL, GLOBAL}:
        raise ConfigError(f"{where}layer_types: {sorted(unknown)} are not supported here")
    if len(layer_types) != depth:
        raise ConfigError(
            f"{where}layer_types has {len(layer_types)} entries, not num_hidden_layers={depth}"
        )
    pattern = tuple(kind == LOCAL for kind in layer_types)
    if not any(pattern):
        return {}
    if window is None or window < 1:
        raise ConfigError(f"{where}sliding_window={window!r}, but layer_types has {LOCAL!r}")
    period = next(n for n in range(1, depth + 1) if _repeats(pattern, n))
    return {"window": int(window), "window_pattern": pattern[:period]}


def _repeats(pattern: tuple[bool, ...], period: int) -> bool:
    return all(kind == pattern[i % period] for i, kind in enumerate(pattern))
