"""SigLIP's vision tower (arXiv 2303.15343) and variants: Hugging Face config and tensor names.

Idefics3 and SmolVLM have it under other model types. SigLIP 2 (arXiv 2502.14786) has it with packed
patches of images of any size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, VisionConfig
from jaxvlm.hf.families import clip, config_reader
from jaxvlm.hf.families.config_reader import ConfigFields, FeatureLayers
from jaxvlm.hf.families.name_map import Entry, linear_layer, norm_layer

_TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_ONLY = {"num_channels": (3,), "attention_dropout": (0.0,)}
_FIELDS = {
    "siglip_vision_model": ConfigFields(
        {**_TOWER, "image_size": 224, "vision_use_head": True},
        _ONLY,
        # Fields of a text tower that the model lacks, and old fields of PaliGemma.
        config_reader.METADATA | {"vocab_size", "num_image_tokens", "projector_hidden_act"},
    ),
    "siglip2_vision_model": ConfigFields(
        {**_TOWER, "num_patches": 256, "vision_use_head": True}, _ONLY
    ),
    "idefics3_vision": ConfigFields(
        {**_TOWER, "hidden_size": 1152, "num_attention_heads": 16, "image_size": 224}
        | {"patch_size": 32},
        _ONLY,
        # Sizes that the image processor reads, and a switch that transformers has removed.
        config_reader.METADATA
        | {"size", "max_image_size", "use_base_siglip", "tie_word_embeddings"},
    ),
}
_ALSO = {
    "idefics3": "idefics3_vision",
    "smolvlm_vision": "idefics3_vision",
    "smolvlm": "idefics3_vision",
}
_MISPLACED = frozenset((19, 25, 29, 31, 38, 40, 41, 43, 47, 49, 50, 54, 55, 58, 59, 61, 62, 67))
"""Grid sides, up to 70, for which Idefics3's positions, computed by float32 division, put two
neighbouring patches at one position. Which patches depends on the processor, so these are refused.
"""


def vision_from_hf(group: Mapping[str, Any], take: FeatureLayers, where: str) -> VisionConfig:
    """Read a vision encoder's settings from ``vision_config``.

    Args:
        group: the fields, including ``model_type``.
        take: layers that become visual tokens; there is no class token to leave out.
        where: prefix of field names in error messages.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    kind = _ALSO.get(group.get("model_type", ""), group.get("model_type", "siglip_vision_model"))
    if kind not in _FIELDS:
        known = ", ".join((*_FIELDS, *_ALSO))
        raise ConfigError(f"{where}model_type={kind!r} is not supported here, only {known}")
    fields = {name: value for name, value in group.items() if name != "model_type"}
    vision = config_reader.read(fields, _FIELDS[kind], where)
    if take.layer is not None and not take.whole:
        raise ConfigError(
            "config.json: vision_feature_select_strategy='default' would drop a patch of a vision "
            "encoder without a class token; only 'full' is supported"
        )
    layers = take.layers(vision["num_hidden_layers"])
    patch = config_reader.square(vision["patch_size"], where + "patch_size")
    tower = VisionConfig(
        patch_size=patch,
        **config_reader.block_sizes(vision, where),
        feature_layer=layers[0] if layers else -1,
        feature_layers=layers if len(layers) > 1 else (),
        final_norm=not layers,  # hidden states are taken before it
        pool="attention" if vision.get("vision_use_head") else "none",
        norm_eps=float(vision["layer_norm_eps"]),
    )
    if kind == "siglip2_vision_model":
        return _any_size(tower, vision["num_patches"], where)
    size = config_reader.square(vision["image_size"], where + "image_size")
    if kind == "idefics3_vision" and size // patch in _MISPLACED:
        raise ConfigError(f"{where}image_size={size} with patches of {patch} is not supported")
    return dataclasses.replace(tower, image_size=size, crop_rest=size % patch > 0)


def _any_size(tower: VisionConfig, num_patches: int, where: str) -> VisionConfig:
    side = math.isqrt(num_patches)
    if side * side != num_patches:
        raise ConfigError(f"{where}num_patches={num_patches} is not a square")
    size = side * tower.patch_size
    return dataclasses.replace(tower, image_size=size, packed=True, position_resize="antialias")


def entries(model: str, config: VisionConfig) -> tuple[Entry, ...]:
    """List the entries of the vision encoder; dim letters are those of :func:`clip.dims`.

    Args:
        model: prefix of ``embeddings``.
        config: result of :func:`vision_from_hf`.
    """
    stem = model + "embeddings.patch_embedding"
    kernel = "d pqc" if config.packed else "d c p q"
    return (
        *linear_layer("vision/stem/{}", stem, "p q c d", kernel),
        Entry("vision/position", model + "embeddings.position_embedding.weight", "s d", "s d"),
        *norm_layer("vision/norm", model + "post_layernorm", "d"),
        *clip.block_entries(model + "encoder.layers.{}."),
        *(_head(model + "head.") if config.pool == "attention" else ()),
    )


def _head(theirs: str) -> list[Entry]:
    """List the entries of the pooling head, whose q, k and v projections are one tensor."""
    ours, joined = "vision/head/", theirs + "attention.in_proj_"
    result = [Entry(ours + "probe", theirs + "probe", "d", "1 1 d")]
    for i, a in enumerate("qkv"):
        result += [
            Entry(f"{ours}attn/w{a}", joined + "weight", "d n h", "nh d", (i, 3)),
            Entry(f"{ours}attn/b{a}", joined + "bias", "n h", "nh", (i, 3)),
        ]
    result += linear_layer(ours + "attn/{}o", theirs + "attention.out_proj", "n h d", "d nh")
    result += norm_layer(ours + "norm", theirs + "layernorm", "d")
    for name, layer, dims, their_dims in clip.MLP:
        result += linear_layer(ours + name, theirs + layer, dims, their_dims)
    return result
