"""Vision encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Hugging Face config and tensor names.

Patches of images of any size are packed; the merger after the encoder is jaxvlm's connector.
Sources: arXiv 2409.12191, 2502.13923, 2511.21631.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError, ConnectorConfig, VisionConfig
from jaxvlm.hf.families import clip, config_reader
from jaxvlm.hf.families.config_reader import ConfigFields
from jaxvlm.hf.families.name_map import Entry, linear_layer, norm_layer


class _Tower(NamedTuple):
    """Differences between the generations."""

    fields: ConfigFields
    width: str
    """Field of the vision encoder's width."""
    out: str
    """Field of the decoder's width."""
    norm: str
    mlp: tuple[tuple[str, str], ...]
    """Matrices of a block's MLP: our name, their name."""
    merger: tuple[str, str, str]
    """Names of a merger's norm, first and second matrix."""


_COMMON = {
    "depth": 32,
    "hidden_size": 3584,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "rope_parameters": None,
}
# Fields of old files that transformers does not read; tokens_per_second is for decoder positions.
_IGNORED = config_reader.METADATA | {"in_chans", "spatial_patch_size", "tokens_per_second"}
_ONLY = {"in_channels": (3,)}
_MOE = ("qwen3_vl_moe", "qwen3_vl_moe_vision")  # only the decoder has experts
_TOWERS = {
    "qwen2_vl": _Tower(
        ConfigFields(
            {**_COMMON, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4},
            {**_ONLY, "model_type": ("qwen2_vl", "qwen2_vl_vision")},
            _IGNORED,
        ),
        width="embed_dim",
        out="hidden_size",
        norm="layer",
        mlp=(("in", "fc1"), ("out", "fc2")),
        merger=("ln_q", "mlp.0", "mlp.2"),
    ),
    "qwen2_5_vl": _Tower(
        ConfigFields(
            {**_COMMON, "hidden_act": "silu", "intermediate_size": 3420, "window_size": 112}
            | {"out_hidden_size": 3584, "fullatt_block_indexes": (7, 15, 23, 31)},
            {**_ONLY, "model_type": ("qwen2_5_vl", "qwen2_5_vl_vision")},
            _IGNORED,
        ),
        width="hidden_size",
        out="out_hidden_size",
        norm="rms",
        mlp=(("gate", "gate_proj"), ("in", "up_proj"), ("out", "down_proj")),
        merger=("ln_q", "mlp.0", "mlp.2"),
    ),
    "qwen3_vl": _Tower(
        ConfigFields(
            {**_COMMON, "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh"}
            | {"intermediate_size": 4304, "patch_size": 16, "out_hidden_size": 3584}
            | {"num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24)},
            {**_ONLY, "model_type": ("qwen3_vl", "qwen3_vl_vision", *_MOE)},
            _IGNORED,
        ),
        width="hidden_size",
        out="out_hidden_size",
        norm="layer",
        mlp=(("in", "linear_fc1"), ("out", "linear_fc2")),
        merger=("norm", "linear_fc1", "linear_fc2"),
    ),
}


def towers_from_hf(
    group: Mapping[str, Any], family: str, width: int, where: str
) -> tuple[VisionConfig, ConnectorConfig]:
    """Read the settings of vision encoder and connector from ``vision_config``.

    Args:
        group: the fields.
        family: ``qwen2_vl``, ``qwen2_5_vl`` or ``qwen3_vl``.
        width: width of the decoder.
        where: prefix of field names in error messages.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    tower = _TOWERS[family]
    vision = config_reader.read(group, tower.fields, where)
    if vision[tower.out] != width:
        raise ConfigError(f"{where}{tower.out}={vision[tower.out]} is not the decoder's {width}")
    D, merge = vision[tower.width], vision["spatial_merge_size"]
    patch = config_reader.square(vision["patch_size"], where + "patch_size")
    config = VisionConfig(
        image_size=patch * merge,  # there is no position table that would need a size
        patch_size=patch,
        width=D,
        depth=vision["depth"],
        num_heads=vision["num_heads"],
        mlp_dim=vision.get("intermediate_size") or int(D * vision["mlp_ratio"]),
        position="none",
        activation=config_reader.activation(vision["hidden_act"], where + "hidden_act"),
        gated=family == "qwen2_5_vl",
        patch_bias=family == "qwen3_vl",
        post_norm=False,
        norm=tower.norm,
        packed=True,
        patch_layout="cthw",
        frames=config_reader.square(vision["temporal_patch_size"], where + "temporal_patch_size"),
        merge_block=merge,
        rope_theta=config_reader.rope_base(vision["rope_parameters"], where + "rope_parameters"),
        pixel_mean=clip.PIXEL_MEAN,
        pixel_std=clip.PIXEL_STD,
    )
    connector = ConnectorConfig(hidden=merge**2 * D, merge=merge, norm=tower.norm)
    if family == "qwen2_5_vl":
        config = _windows(config, vision, where)
    if family == "qwen3_vl":
        config = _table_and_levels(config, vision, where)
        levels = len(vision["deepstack_visual_indexes"])
        connector = dataclasses.replace(connector, deepstack_levels=levels)
    return config, connector


def _windows(config: VisionConfig, vision: Mapping[str, Any], where: str) -> VisionConfig:
    side = config.patch_size * config.merge_block
    window = vision["window_size"] // config.merge_block // config.patch_size * side
    if not window:
        raise ConfigError(f"{where}window_size={vision['window_size']} is less than {side}")
    full = tuple(i for i in vision["fullatt_block_indexes"] if 0 <= i < config.depth)
    return dataclasses.replace(config, window=window, full_layers=full)


def _table_and_levels(config: VisionConfig, vision: Mapping[str, Any], where: str) -> VisionConfig:
    table, taps = vision["num_position_embeddings"], tuple(vision["deepstack_visual_indexes"])
    side = math.isqrt(table)
    if side * side != table:
        raise ConfigError(f"{where}num_position_embeddings={table} is not a square")
    if list(taps) != sorted(set(taps)) or not all(0 <= i < config.depth for i in taps):
        raise ConfigError(
            f"{where}deepstack_visual_indexes={list(taps)} must be increasing and below "
            f"depth={config.depth}"
        )
    return dataclasses.replace(
        config,
        image_size=side * config.patch_size,
        position="learned",
        position_resize="corners",
        feature_layers=(-1, *(i - config.depth for i in taps)) if taps else (),
        pixel_mean=(0.5, 0.5, 0.5),
        pixel_std=(0.5, 0.5, 0.5),
    )


def dims(config: VisionConfig, width: int) -> dict[str, int]:
    """Return the size of each dim letter in :func:`entries`; ``width`` is the decoder's."""
    merged = config.merge_block**2 * config.width
    return {**clip.dims(config), "t": config.frames, "m": merged, "k": merged, "D": width}


def entries(family: str, model: str, config: VisionConfig, levels: int) -> tuple[Entry, ...]:
    """List the entries of vision encoder and connector.

    Args:
        family: as for :func:`towers_from_hf`.
        model: prefix of ``patch_embed``.
        config: vision encoder from :func:`towers_from_hf`.
        levels: ``deepstack_levels`` of the connector.
    """
    tower = _TOWERS[family]
    ours, block = "vision/stack/blocks/", model + "blocks.{}."
    result = [Entry("vision/stem/w", model + "patch_embed.proj.weight", "c t p q d", "d c t p q")]
    if config.patch_bias:
        result += [Entry("vision/stem/b", model + "patch_embed.proj.bias", "d", "d")]
    if config.position == "learned":
        result += [Entry("vision/position", model + "pos_embed.weight", "s d", "s d")]
    for name in ("norm1", "norm2"):
        result += norm_layer(ours + name, block + name, "d", tower.norm == "layer")
    for i, a in enumerate("qkv"):
        result += linear_layer(f"{ours}attn/{{}}{a}", block + "attn.qkv", "d n h", "nh d", (i, 3))
    result += linear_layer(ours + "attn/{}o", block + "attn.proj", "n h d", "d nh")
    for a, name in tower.mlp:
        dims = ("f d", "d f") if a == "out" else ("d f", "f d")
        result += linear_layer(f"{ours}mlp/{{}}_{a}", f"{block}mlp.{name}", *dims)
    result += _merger("connector/", model + "merger.", tower, "d")
    if levels:
        result += _merger("connector/levels/", model + "deepstack_merger_list.{}.", tower, "m")
    return tuple(result)


def _merger(ours: str, theirs: str, tower: _Tower, normed: str) -> list[Entry]:
    norm, first, second = tower.merger
    return [
        *norm_layer(ours + "norm", theirs + norm, normed, tower.norm == "layer"),
        # A square matrix: "k" has the size of "m", so that each dim has its own letter.
        *linear_layer(ours + "{}_in", theirs + first, "m k", "k m"),
        *linear_layer(ours + "{}_out", theirs + second, "k D", "D k"),
    ]
