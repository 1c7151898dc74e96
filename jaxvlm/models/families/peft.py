"""PEFT's adapter folders: what ``adapter_config.json`` says, and what adapters' tensors are called.

Source: huggingface/peft ``tuners/lora/config.py``, ``utils/save_and_load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxvlm.config import ConfigError, LoraConfig
from jaxvlm.models.families.fields import Fields, read
from jaxvlm.models.families.names import Entry, NameMap
from jaxvlm.models.lora import MAGNITUDE, A, B
from jaxvlm.models.quantized import Dims

CONFIG = "adapter_config.json"
_FIRST = "base_model.model."
_SUFFIXES = {A: ".lora_A.weight", B: ".lora_B.weight", MAGNITUDE: ".lora_magnitude_vector"}
_RANK = "r"
"""The rank's letter; no family has a dim of that name."""

_NONE: tuple[Any, ...] = (None, False, {}, [])
_FIELDS = Fields(
    {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False, "lora_dropout": 0.0},
    {
        "peft_type": ("LORA",),
        "bias": ("none",),
        # The others change the base's weights too, or are quantised.
        "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
        **dict.fromkeys(
            (
                "alora_invocation_tokens",
                "alpha_pattern",
                "arrow_config",
                "ensure_weight_tying",
                "fan_in_fan_out",
                "kasa_config",
                "layer_replication",
                "loftq_config",
                "lora_bias",
                "modules_to_save",
                "monteclora_config",
                "rank_pattern",
                "target_parameters",
                "trainable_token_indices",
                "use_bdlora",
                "use_qalora",
                "velora_config",
            ),
            _NONE,
        ),
    },
    # How it was made; which layers it has, its tensors say.
    frozenset(
        (
            "auto_mapping",
            "base_model_name_or_path",
            "corda_config",
            "eva_config",
            "exclude_modules",
            "inference_mode",
            "layers_pattern",
            "layers_to_transform",
            "lora_ga_config",
            "megatron_config",
            "megatron_core",
            "peft_version",
            "qalora_group_size",
            "revision",
            "runtime_config",
            "target_modules",
            "task_type",
        )
    ),
)


def config_from_peft(
    group: Mapping[str, Any], tensors: Iterable[str], base: NameMap, where: str
) -> LoraConfig:
    """The adapters of a folder; its ``targets`` are paths.

    Args:
        group: of ``adapter_config.json``.
        tensors: names of all tensors.
        base: of the model that it adapts.
        where: the folder, for messages.

    Raises:
        ConfigError: a field that is unknown or can't be done, or tensors that adapt no parameter.
    """
    found = read(group, _FIELDS, f"{where}/{CONFIG}: ")
    paths = {tensor: path for path, names in _by_path(base).items() for tensor in names}
    targets: set[str] = set()
    strange = []
    for name in tensors:
        canonical = _canonical(base, name)
        suffix = next((s for s in _SUFFIXES.values() if canonical.endswith(s)), "")
        path = paths.get(canonical.removesuffix(suffix) + ".weight") if suffix else None
        if path is None:
            strange.append(name)
        else:
            targets.add(path)
    if strange:
        more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
        raise ConfigError(
            f"{where}: these adapt no linear map of this model: {', '.join(strange[:5])}{more}"
        )
    return LoraConfig(
        rank=int(found["r"]),
        alpha=float(found["lora_alpha"]),
        rslora=bool(found["use_rslora"]),
        dora=bool(found["use_dora"]),
        targets=tuple(sorted(targets)),
        dropout=float(found["lora_dropout"]),
        checkpoint=where,
    )


def config_to_peft(
    config: LoraConfig, base: NameMap, adapted: Collection[str], model: str
) -> dict[str, Any]:
    """``adapter_config.json``.

    Args:
        config: of the run.
        base: of the model.
        adapted: paths of the maps that have an adapter.
        model: the checkpoint that is adapted.
    """
    whole = config.alpha.is_integer()
    names = _by_path(base)
    modules = [name.removesuffix(".weight") for path in adapted for name in names[path]]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": model,
        "task_type": None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if whole else config.alpha,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "lora_dropout": config.dropout,
        "bias": "none",
        "init_lora_weights": True,
        # In full: a name's end alone may stand for a layer of the other tower too.
        "target_modules": sorted(_module(base, name) for name in modules),
    }


def weights(config: LoraConfig, base: NameMap, adapted: Mapping[str, Dims]) -> NameMap:
    """The adapters' tensors.

    Args:
        config: rank and variant.
        base: of the model.
        adapted: of :func:`jaxvlm.models.lora.find`.

    Raises:
        ConfigError: a map that has no tensor of its own, as PEFT's layers have.
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
        for name, (ours, there) in parts.items():
            lies = " ".join(ours), " ".join(there)
            entries.append(
                Entry(f"{path}/{name}", theirs + _SUFFIXES[name], *lies, first=entry.first)
            )
    aliases = (
        (r"^base_model\.model\.", ""),
        (r"(?<=\.lora_magnitude_vector)\.weight$", ""),
        *base.aliases,
    )
    return NameMap(entries, {**base.sizes, _RANK: config.rank}, base.depths, aliases)


def not_layers(base: NameMap) -> list[str]:
    """Paths of linear maps that PEFT's ``all-linear`` does not know, or that no output needs."""

    def strange(entry: Entry) -> bool:
        linear = entry.ours.rpartition("/")[2].startswith("w")
        joined = entry.part[1] > 1 or not entry.theirs.endswith(".weight")
        return linear and (joined or entry.ours.startswith(("vision/head/", "top/head/")))

    return [entry.ours for entry in base.entries if strange(entry)]


def spelled(tensors: Iterable[str], base: NameMap) -> dict[str, str]:
    """Our name of an adapter's tensor -> how PEFT spells it."""
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


def _by_path(base: NameMap) -> dict[str, list[str]]:
    return {entry.ours: base.names(entry) for entry in base.entries}
