"""Refuses settings that have no effect because the setting that they depend on is not set."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jaxvlm.config.cache import CacheConfig
from jaxvlm.config.convert import ConfigError
from jaxvlm.config.data import DataConfig, PairDataConfig
from jaxvlm.config.embed import EmbeddingConfig, TextConfig
from jaxvlm.config.federate import FederateConfig
from jaxvlm.config.model import (
    ConnectorConfig,
    DecoderConfig,
    RelevanceConfig,
    RopeScaling,
    VisionConfig,
)
from jaxvlm.config.outer import OuterConfig
from jaxvlm.config.parallel import EncoderConfig
from jaxvlm.config.train import Config

Rule = tuple[str, str, Callable[[Any], Any]]


def refuse_unread(config: Any, where: str) -> None:
    """Refuse a setting that differs from its default but has no effect.

    Args:
        config: a group of settings.
        where: path of the group in error messages.

    Raises:
        ConfigError: a setting that is not read; the message says which one, and what it needs.
    """
    for names, needs, read in RULES[type(config)]:
        if not read(config):
            refuse_changed(config, names.split(), where, f"without {needs}")


def refuse_changed(config: Any, names: Iterable[str], where: str, why: str) -> None:
    """Refuse settings that differ from their defaults where nothing reads them.

    Args:
        config: a group of settings.
        names: of fields, or of groups, in it; a dot leads into a group.
        where: path of the group in error messages.
        why: what keeps them from being read: "with ...", "without ...", or "by ...".

    Raises:
        ConfigError: the first that differs, by its whole name.
    """
    default = type(config)()
    for name in names:
        value, unset = (functools.reduce(getattr, name.split("."), c) for c in (config, default))
        if value != unset:
            name, value = _inside(name, value, unset)
            raise ConfigError(f"{where}.{name}={value!r} is not read {why}; leave it out")


def _inside(name: str, value: Any, default: Any) -> tuple[str, Any]:
    """Path and value of the first field that differs from the default, also inside a group."""
    if not dataclasses.is_dataclass(value):
        return name, value
    fields = (field.name for field in dataclasses.fields(value))
    changed = next(f for f in fields if getattr(value, f) != getattr(default, f))
    return _inside(f"{name}.{changed}", getattr(value, changed), getattr(default, changed))


def _kinds(*kinds: str) -> Callable[[RopeScaling], bool]:
    return lambda scaling: scaling.kind in kinds


def _reads_final_norm(vision: VisionConfig) -> bool:
    return vision.post_norm and -1 in (vision.feature_layers or (vision.feature_layer,))


_FIELDS = frozenset(
    ["image_root", "fetched", "ignored_fields", "literal_markers", "column_mapping"]
)
READ_BY: dict[str, frozenset[str]] = {
    ".json": _FIELDS,
    ".jsonl": _FIELDS,
    ".csv": _FIELDS,
    ".tsv": _FIELDS | {"tsv_quoting"},
    ".parquet": _FIELDS,
    ".arrow": _FIELDS,
    ".tar": _FIELDS,
    ".mds": _FIELDS,
    ".array_record": _FIELDS,
    # Its records and images are those of its package.
    "easy-vqa": frozenset(),
    # What a format of the user's own gives: a Record or an Example has no other fields, and an
    # Example has its images' whole paths.
    "dict": _FIELDS,
    "Record": frozenset(["image_root", "fetched", "literal_markers"]),
    "Example": frozenset(),
}
"""Format of data -> the settings of ``data`` that say how it is read, as far as it takes them."""
READING = sorted(frozenset().union(*READ_BY.values()))
_OWN = ("dict", "Record", "Example")


def without_shard(name: str) -> str:
    """A file's name without the number of a shard, as TensorFlow Datasets ends names."""
    return re.sub(r"(?<=\.array_record)-\d+-of-\d+$", "", name)


def formats_of(data: DataConfig, *specs: str) -> set[str]:
    """The formats, keys of ``READ_BY``, that data are read in, as far as their names say.

    Args:
        data: data settings.
        specs: files or named sources; "" is none.
    """
    if data.format.target:
        return set(_OWN) if any(specs) else set()
    out: set[str] = set()
    for spec in filter(None, specs):
        name = spec.partition(":")[0]
        file = pathlib.PurePath(without_shard(spec))
        compressed = file.suffix.lower() in (".gz", ".zst")
        suffix = (file.with_suffix("") if compressed else file).suffix.lower()
        found = name if name in READ_BY else suffix
        # A pattern or a name without an ending may stand for a file of any kind.
        out |= {found} if found in READ_BY else {f for f in READ_BY if f.startswith(".")}
    return out


def refuse_unread_by(
    data: Any,
    formats: Collection[str],
    names: Iterable[str] = READING,
    where: str = "config.data",
) -> None:
    """Refuse settings of how data are read that none of their formats takes.

    Args:
        data: data settings, or those of a source of a mixture.
        formats: keys of ``READ_BY``: those of all data that the settings are for.
        names: of the settings.
        where: path of ``data`` in error messages.

    Raises:
        ConfigError: the first that has no effect; the message names it and the formats.
    """
    read = frozenset().union(*(READ_BY[name] for name in formats))
    why = f"by data of the format {' and '.join(sorted(formats))}"
    refuse_changed(data, [name for name in names if name not in read], where, why)


_FEDERATION = [f.name for f in dataclasses.fields(FederateConfig) if f.name != "sites"]
RULES: dict[type, tuple[Rule, ...]] = {
    Config: (
        (
            "eval_every eval_records early_stop checkpoint.metric checkpoint.mode"
            " cache.evict_for_eval",
            "config.data.eval",
            lambda c: c.data.eval,
        ),
        (
            "outer",
            "config.mesh.island above 1, or config.federate.sites",
            lambda c: c.mesh.island > 1 or c.federate.sites,
        ),
        (
            "outer.fragments outer.overlap_steps outer.mixing",
            "islands, config.mesh.island above 1",
            lambda c: c.mesh.island > 1,
        ),
        ("early_stop", "evaluations on the way, config.eval_every", lambda c: c.eval_every),
        (
            "dual.lora.checkpoint",
            "a vision-language model, whose config.model.lora.checkpoint is",
            lambda c: False,
        ),
        # A checkpoint's family says which of these its files have.
        (
            "model.vision.feature_layer",
            "an empty feature_layers",
            lambda c: c.model.checkpoint or not c.model.vision.feature_layers,
        ),
        (
            "model.vision.pool",
            "a dual encoder, config.embedder='dual'",
            lambda c: c.model.checkpoint,
        ),
        (
            "model.vision.final_norm",
            "post_norm=True and the last block among the feature layers",
            lambda c: c.model.checkpoint or _reads_final_norm(c.model.vision),
        ),
        (
            "dual.vision.feature_layer dual.vision.feature_layers dual.vision.final_norm"
            " dual.vision.keep_class_token",
            "a vision-language model; a dual encoder pools the last block's output",
            lambda c: c.dual.checkpoint or c.dual.vision_checkpoint,
        ),
    ),
    DataConfig: (
        ("buckets", "packing=False", lambda c: not c.packing),
        (
            "download_dir download_gb",
            "data at a URL",
            lambda c: any(
                "://" in spec and not spec.startswith("file://")
                for spec in (c.train, c.eval, *(source.train for source in c.mixture.values()))
            ),
        ),
        (
            "mixture_temperature",
            "a mixture whose sources have neither weights nor budgets",
            lambda c: c.mixture and not any(x.weight or x.budget for x in c.mixture.values()),
        ),
    ),
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
    OuterConfig: (
        ("momentum", "optimizer='sgd' or 'nesterov'", lambda c: c.optimizer in ("sgd", "nesterov")),
        ("b1 b2", "optimizer='adam' or 'yogi'", lambda c: c.optimizer in ("adam", "yogi")),
        (
            "eps",
            "optimizer='adam', 'yogi' or 'adagrad'",
            lambda c: c.optimizer in ("adam", "yogi", "adagrad"),
        ),
        ("mixing", "overlap_steps", lambda c: c.overlap_steps),
        ("error_feedback", "a delta_dtype below float32", lambda c: c.delta_dtype != "float32"),
    ),
    FederateConfig: (
        (" ".join(_FEDERATION), "sites", lambda c: c.sites),
        ("max_staleness", "a buffer or deadline_s", lambda c: c.buffer or c.deadline_s),
        (
            "staleness_exponent",
            "max_staleness and aggregator='mean'",
            lambda c: c.max_staleness and c.aggregator == "mean",
        ),
        ("byzantine", "a robust aggregator", lambda c: c.aggregator != "mean"),
        ("weighting", "aggregator='mean'", lambda c: c.aggregator == "mean"),
        ("noise_multiplier", "max_delta_norm", lambda c: c.max_delta_norm),
        ("privacy_delta", "noise_multiplier", lambda c: c.noise_multiplier),
        ("min_sites", "deadline_s", lambda c: c.deadline_s),
    ),
    EmbeddingConfig: (
        ("scale", "learn_scale=True", lambda c: c.learn_scale),
        ("bias", "learn_bias=True", lambda c: c.learn_bias),
    ),
    PairDataConfig: (("task_alpha", "tasks='homogeneous'", lambda c: c.tasks == "homogeneous"),),
    TextConfig: (("eos_id", "pool='eos'", lambda c: c.pool == "eos"),),
}
"""Group of settings -> (names of fields, what they need, whether the group has it). A field that
asks for what holds anyway (``share_images=False`` without packing) is in no rule."""
