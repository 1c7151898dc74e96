"""Refuses settings that have no effect because the setting that they depend on is not set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxvlm.config.cache import CacheConfig
from jaxvlm.config.convert import ConfigError
from jaxvlm.config.data import PairDataConfig
from jaxvlm.config.embed import EmbeddingConfig, TextConfig
from jaxvlm.config.model import (
    ConnectorConfig,
    DecoderConfig,
    RelevanceConfig,
    RopeScaling,
    VisionConfig,
)
from jaxvlm.config.parallel import EncoderConfig

Rule = tuple[str, str, Callable[[Any], Any]]


def refuse_unread(config: Any, where: str) -> None:
    """Refuse a setting that differs from its default but has no effect.

    Args:
        config: a group of settings.
        where: path of the group in error messages.

    Raises:
        ConfigError: a setting that is not read; the message says which one, and what it needs.
    """
    default = type(config)()
    for names, needs, read in RULES[type(config)]:
        if read(config):
            continue
        for name in names.split():
            if (value := getattr(config, name)) != getattr(default, name):
                name, value = _inside(name, value, getattr(default, name))
                raise ConfigError(f"{where}.{name}={value!r} is not read without {needs}")


def _inside(name: str, value: Any, default: Any) -> tuple[str, Any]:
    """Path and value of the first field that differs from the default, also inside a group."""
    if not dataclasses.is_dataclass(value):
        return name, value
    fields = (field.name for field in dataclasses.fields(value))
    changed = next(f for f in fields if getattr(value, f) != getattr(default, f))
    return _inside(f"{name}.{changed}", getattr(value, changed), getattr(default, changed))


def _kinds(*kinds: str) -> Callable[[RopeScaling], bool]:
    return lambda scaling: scaling.kind in kinds


RULES: dict[type, tuple[Rule, ...]] = {
    VisionConfig: (
        ("patch_layout frames merge_block rope_theta window", "packed=True", lambda c: c.packed),
        (
            "position_resize",
            "packed=True and position='learned'",
            lambda c: c.packed and c.position == "learned",
        ),
        ("full_layers", "a window", lambda c: c.window),
        ("keep_class_token", "class_token=True", lambda c: c.class_token),
    ),
    ConnectorConfig: (
        ("hidden activation", "kind='mlp'", lambda c: c.kind == "mlp"),
        ("pool", "a merge above 1", lambda c: c.merge > 1),
        ("norm_merged norm_eps", "a norm", lambda c: c.norm != "none"),
    ),
    RelevanceConfig: (("levels width query", "a budget", lambda c: c.budget),),
    RopeScaling: (
        ("factor", "a kind that stretches", lambda c: c.kind != "default"),
        (
            "original_length",
            "kind='dynamic', 'llama3' or 'yarn'",
            _kinds("dynamic", "llama3", "yarn"),
        ),
        ("low_factor high_factor", "kind='llama3'", _kinds("llama3")),
        ("beta_fast beta_slow whole_dims", "kind='yarn'", _kinds("yarn")),
    ),
    DecoderConfig: (
        ("window_pattern local_rope_theta", "a window", lambda c: c.window),
        (
            "experts_per_token normalize_experts expert_matmul",
            "num_experts",
            lambda c: c.num_experts,
        ),
        ("rope_interleaved", "rope_sections", lambda c: c.rope_sections),
        ("logit_cap", "head=True", lambda c: c.head),
    ),
    EncoderConfig: (("mesh strategy microbatches_in_flight", "devices", lambda c: c.devices),),
    CacheConfig: (
        (
            "max_staleness",
            "policy='lazy', 'hybrid' or 'adaptive'",
            lambda c: c.policy in ("lazy", "hybrid", "adaptive"),
        ),
        ("prefetch_staleness", "policy='hybrid'", lambda c: c.policy == "hybrid"),
        ("drift_threshold", "policy='adaptive'", lambda c: c.policy == "adaptive"),
        ("refresh_burst", "refresh_fraction", lambda c: c.refresh_fraction),
        (
            "drift_warning",
            "refresh_fraction, or policy='lazy', 'hybrid', 'adaptive' or 'custom'",
            lambda c: c.refresh_fraction or c.policy in ("lazy", "hybrid", "adaptive", "custom"),
        ),
        ("custom_policy", "policy='custom'", lambda c: c.policy == "custom"),
        ("refresh_fraction", "a built-in policy", lambda c: c.policy not in ("off", "custom")),
        ("store memory_mb", "a policy", lambda c: c.policy != "off"),
        ("codec identity", "a store", lambda c: c.store),
        ("token_order", "a policy or encode_batch", lambda c: c.policy != "off" or c.encode_batch),
        (
            "max_images min_pages_fraction evict_for_eval",
            "a policy or encode_batch",
            lambda c: c.policy != "off" or c.encode_batch,
        ),
    ),
    EmbeddingConfig: (
        ("scale", "learn_scale=True", lambda c: c.learn_scale),
        ("bias", "learn_bias=True", lambda c: c.learn_bias),
    ),
    PairDataConfig: (("task_alpha", "tasks='homogeneous'", lambda c: c.tasks == "homogeneous"),),
    TextConfig: (("eos_id", "pool='eos'", lambda c: c.pool == "eos"),),
}
"""Group of settings -> (names of fields, what they need, whether the group has it)."""
