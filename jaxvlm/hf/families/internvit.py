"""InternVL's vision encoder (arXiv 2312.14238): Hugging Face config and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, VisionConfig
from jaxvlm.hf.families.clip import MLP, dims
from jaxvlm.hf.families.config_reader import ConfigFields, FeatureLayers, block_sizes, read, square
from jaxvlm.hf.families.name_map import Entry, linear_layer, norm_layer

__all__ = ["dims", "entries", "vision_from_hf"]

_FIELDS = ConfigFields(
    {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "attention_bias": False,
        "use_qk_norm": False,
        "intermediate_size": 4096,
        "hidden_act": "gelu",
        "norm_type": "layer_norm",
        "layer_norm_eps": 1e-6,
        "image_size": 448,
        "patch_size": 14,
        "use_absolute_position_embeddings": True,
        "layer_scale_init_value": 0.1,
        "use_mean_pooling": True,
    },
    {
        "model_type": ("internvl_vision",),
        "num_channels": (3,),
        "use_mask_token": (False,),
        "norm_type": ("layer_norm", "rms_norm"),
        "attention_dropout": (0.0,),
        "hidden_dropout_prob": (0.0,),
        "projection_dropout": (0.0,),
        "dropout": (0.0,),
    },
)
_NORMS = {"layer_norm": "layer", "rms_norm": "rms"}
PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)


def vision_from_hf(group: Mapping[str, Any], take: FeatureLayers, where: str) -> VisionConfig:
    """Read a vision encoder's settings from an InternVL ``vision_config``.

    Args:
        group: the fields.
        take: layer that becomes visual tokens; -1 is the encoder's output.
        where: prefix of field names in error messages.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    vision = read(group, _FIELDS, where)
    layers = take.layers(vision["num_hidden_layers"]) or (-1,)
    if len(layers) > 1 or take.whole:
        raise ConfigError(
            "config.json: InternVL takes one vision_feature_layer, and "
            "vision_feature_select_strategy='default'"
        )
    if not vision["layer_scale_init_value"]:
        raise ConfigError(f"{where}layer_scale_init_value=0 is not supported here")
    pooled = bool(vision["use_mean_pooling"])
    size = square(vision["image_size"], where + "image_size")
    patch = square(vision["patch_size"], where + "patch_size")
    return VisionConfig(
        image_size=size,
        patch_size=patch,
        crop_rest=size % patch > 0,
        **block_sizes(vision, where),
        position="learned" if vision["use_absolute_position_embeddings"] else "none",
        class_token=True,
        qkv_bias=bool(vision["attention_bias"]),
        qk_norm_all=bool(vision["use_qk_norm"]),
        layer_scale=float(vision["layer_scale_init_value"]),
        feature_layer=layers[0],
        post_norm=not pooled,
        final_norm=take.layer in (None, -1),  # hidden states are taken before it
        norm=_NORMS[vision["norm_type"]],
        norm_eps=float(vision["layer_norm_eps"]),
        pixel_mean=PIXEL_MEAN,
        pixel_std=PIXEL_STD,
    )


def entries(model: str, config: VisionConfig) -> tuple[Entry, ...]:
    """List the entries of the vision encoder; ``model`` is the prefix of ``embeddings``."""
    where = model + "embeddings."
    stem = where + "patch_embeddings.projection"
    table = Entry("vision/position", where + "position_embeddings", "s d", "1 s d")
    top = [
        Entry("vision/class_token", where + "cls_token", "d", "1 1 d"),
        *linear_layer("vision/stem/{}", stem, "p q c d", "d c p q"),
        *([table] if config.position == "learned" else []),
        *(norm_layer("vision/norm", model + "layernorm", "d") if config.post_norm else ()),
    ]
    ours, theirs = "vision/stack/blocks/", model + "encoder.layer.{}."
    rows = list(_BLOCK)
    if config.qkv_bias:
        rows += [(f"attn/b{a}", f"attention.{a}_proj.bias", "n h", "nh") for a in "qkv"]
    if config.qk_norm_all:
        rows += [(f"attn/{a}_norm_all/scale", f"attention.{a}_norm.weight", "d", "d") for a in "qk"]
    has_bias = config.norm == "layer"
    for name, place in (("norm1", "before"), ("norm2", "after")):
        top += norm_layer(ours + name, f"{theirs}layernorm_{place}", "d", has_bias)
    top += (Entry(ours + o, theirs + t, dims, their_dims) for o, t, dims, their_dims in rows)
    for name, layer, our_dims, their_dims in _LINEAR:
        top += linear_layer(ours + name, theirs + layer, our_dims, their_dims)
    return tuple(top)


_BLOCK = (
    ("scale1", "lambda_1", "d", "d"),
    ("scale2", "lambda_2", "d", "d"),
    ("attn/wq", "attention.q_proj.weight", "d n h", "nh d"),
    ("attn/wk", "attention.k_proj.weight", "d n h", "nh d"),
    ("attn/wv", "attention.v_proj.weight", "d n h", "nh d"),
)
_LINEAR = (("attn/{}o", "attention.projection_layer", "n h d", "d nh"), *MLP)
