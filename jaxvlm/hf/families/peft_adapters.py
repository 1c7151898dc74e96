"""Reads and writes PEFT's ``adapter_config.json``, and maps adapters to PEFT's tensor names.

Source: huggingface/peft ``tuners/lora/config.py``, ``utils/save_and_load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxvlm.config import ConfigError, LoraConfig
from jaxvlm.hf.families.config_reader import ConfigFields, read
from jaxvlm.hf.families.name_map import Entry, NameMap
from jaxvlm.models.int8_weights import Dims
from jaxvlm.models.lora import MAGNITUDE, A, B

CONFIG = "adapter_config.json"
_FIRST = "base_model.model."
_SUFFIXES = {A: ".lora_A.weight", B: ".lora_B.weight", MAGNITUDE: ".lora_magnitude_vector"}
_RANK = "r"
"""Dim letter of the rank; no family has a dim of that name."""

_NONE: tuple[Any, ...] = (None, False, {}, [])
_FIELDS = ConfigFields(
    {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False, "lora_dropout": 0.0},
    {
        "peft_type": ("LORA",),
        "bias": ("none",),
        # The other values change the base weights too, or are quantized.
        "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
        **dict.fromkeys(
            (
                *("alora_invocation_tokens", "alpha_pattern", "arrow_config"),
                *("ensure_weight_tying", "fan_in_fan_out", "kasa_config", "layer_replication"),
                *("loftq_config", "lora_bias", "modules_to_save", "monteclora_config"),
                *("rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora"),
                *("use_qalora", "velora_config"),
            ),
            _NONE,
        ),
    },
    # Fields about how the adapter was trained; its layers follow from its tensors.
    frozenset(
        (
            *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config"),
            *("exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform"),
            *("lora_ga_config", "megatron_config", "megatron_core", "peft_version"),
            *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
        )
    ),
)


def config_from_peft(
    group: Mapping[str, Any], tensors: Iterable[str], base: NameMap, where: str
) -> LoraConfig:
    """Read the settings of a folder's adapters; their ``targets`` are parameter paths.

    Args:
        group: content of ``adapter_config.json``.
        tensors: names of all tensors.
        base: map of the model that the adapters belong to.
        where: the folder, for error messages.

    Raises:
        ConfigError: an unknown field or unsupported value, or tensors that adapt no parameter.
    """
    fields = read(group, _FIELDS, f"{where}/{CONFIG}: ")
    paths = {tensor: path for path, names in base.by_path().items() for tensor in names}
    targets: set[str] = set()
    unknown = []
    for name in tensors:
        canonical = _canonical(base, name)
        suffix = next((s for s in _SUFFIXES.values() if canonical.endswith(s)), "")
        path = paths.get(canonical.removesuffix(suffix) + ".weight") if suffix else None
        if path is None:
            unknown.append(name)
        else:
            targets.add(path)
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ConfigError(
            f"{where}: these adapt no linear map of this model: {', '.join(unknown[:5])}{more}"
        )
    return LoraConfig(
        rank=int(fields["r"]),
        alpha=float(fields["lora_alpha"]),
        rslora=bool(fields["use_rslora"]),
        dora=bool(fields["use_dora"]),
        targets=tuple(sorted(targets)),
        dropout=float(fields["lora_dropout"]),
        checkpoint=where,
    )


def config_to_peft(
    config: LoraConfig, base: NameMap, adapted: Collection[str], model: str
) -> dict[str, Any]:
    """Build the content of ``adapter_config.json``.

    Args:
        config: settings of the run's adapters.
        base: map of the model that the adapters belong to.
        adapted: paths of the linear maps that have an adapter.
        model: the checkpoint that is adapted.
    """
    is_integer = config.alpha.is_integer()
    names = base.by_path()
    modules = [name.removesuffix(".weight") for path in adapted for name in names[path]]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": model,
        "task_type": None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if is_integer else config.alpha,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "lora_dropout": config.dropout,
        "bias": "none",
        "init_lora_weights": True,
        # Full names: a suffix could match a layer of another submodule too.
        "target_modules": sorted(_module(base, name) for name in modules),
    }


def weights(config: LoraConfig, base: NameMap, adapted: Mapping[str, Dims]) -> NameMap:
    """Map the adapters' parameters to PEFT's tensors.

    Args:
        config: rank and variant.
        base: map of the model that the adapters belong to.
        adapted: result of :func:`jaxvlm.models.lora.find`.

    Raises:
        ConfigError: a linear map that is not a layer of its own in a Hugging Face model, so that
            PEFT has no adapter for it.
    """
    entries = []
    by_path = {entry.ours: entry for entry in base.entries}
    for path, (lead, cut) in adapted.items():
        entry = by_path[path]
        dims = entry.dims.split()
        inner, outer = dims[: cut - lead], dims[cut - lead :]
        theirs = entry.theirs.removesuffix(".weight")
        joined = " ".join(("".join(outer), "".join(inner)))
        if entry.part[1] > 1 or theirs == entry.theirs or entry.their_dims != joined:
            raise ConfigError(
                f"config.model.lora.targets: {path} is not a linear layer of its own in a Hugging "
                f"Face model but a part of {entry.theirs}, where PEFT has no such adapter; choose "
                "targets without it"
            )
        parts = {
            A: ([*inner, _RANK], [_RANK, "".join(inner)]),
            B: ([_RANK, *outer], ["".join(outer), _RANK]),
        }
        if config.dora:
            parts[MAGNITUDE] = (outer, ["".join(outer)])
        for name, (our_dims, their_dims) in parts.items():
            layout = " ".join(our_dims), " ".join(their_dims)
            entries.append(
                Entry(f"{path}/{name}", theirs + _SUFFIXES[name], *layout, first=entry.first)
            )
    aliases = (
        (r"^base_model\.model\.", ""),
        (r"(?<=\.lora_magnitude_vector)\.weight$", ""),
        *base.aliases,
    )
    return NameMap(entries, {**base.sizes, _RANK: config.rank}, base.depths, aliases)


def not_layers(base: NameMap) -> list[str]:
    """List linear maps that PEFT's ``all-linear`` does not match, or that no output depends on."""

    def excluded(entry: Entry) -> bool:
        linear = entry.ours.rpartition("/")[2].startswith("w")
        joined = entry.part[1] > 1 or not entry.theirs.endswith(".weight")
        return linear and (joined or entry.ours.startswith(("vision/head/", "vision_top/head/")))

    return [entry.ours for entry in base.entries if excluded(entry)]


def spelled(tensors: Iterable[str], base: NameMap) -> dict[str, str]:
    """Return the names of adapters' tensors in PEFT's files, by our names."""
    return {name: _FIRST + _module(base, name) for name in tensors}


def _canonical(base: NameMap, name: str) -> str:
    name = name.removeprefix(_FIRST)
    name = re.sub(r"(?<=\.lora_magnitude_vector)\.weight$", "", name)
    for pattern, replacement in base.aliases:
        name = re.sub(pattern, replacement, name)
    return name


def _module(base: NameMap, name: str) -> str:
    for pattern, replacement in base.modules:
        name = re.sub(pattern, replacement, name)
    return name
