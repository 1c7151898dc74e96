"""CLIP's vision tower (arXiv 2103.00020): Hugging Face config and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import VisionConfig
from jaxvlm.hf.families import config_reader
from jaxvlm.hf.families.config_reader import ConfigFields, FeatureLayers
from jaxvlm.hf.families.name_map import Entry, linear_layer, norm_layer

PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
_FIELDS = ConfigFields(
    {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    {
        "model_type": ("clip_vision_model",),
        "num_channels": (3,),
        "attention_dropout": (0.0,),
        "dropout": (0.0,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": ({},),
    },
    # The vocabulary is of a text tower that the model lacks.
    config_reader.METADATA | {"tie_word_embeddings", "vocab_size"},
)
DEFAULTS = _FIELDS.reads
"""Default values of the fields that are read."""


def vision_from_hf(group: Mapping[str, Any], take: FeatureLayers, where: str) -> VisionConfig:
    """Read a vision encoder's settings from a CLIP ``vision_config``.

    Args:
        group: the fields.
        take: layers that become visual tokens; later layers are read and exported, but not run.
        where: prefix of field names in error messages.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    vision = config_reader.read(group, _FIELDS, where)
    layers = take.layers(vision["num_hidden_layers"]) or (-1,)  # the norm is the pooled token's
    size = config_reader.square(vision["image_size"], where + "image_size")
    patch = config_reader.square(vision["patch_size"], where + "patch_size")
    return VisionConfig(
        image_size=size,
        patch_size=patch,
        crop_rest=size % patch > 0,
        **config_reader.block_sizes(vision, where),
        class_token=True,
        keep_class_token=take.whole,
        patch_bias=False,
        pre_norm=True,
        final_norm=False,
        feature_layer=layers[0],
        feature_layers=layers if len(layers) > 1 else (),
        norm_eps=float(vision["layer_norm_eps"]),
        pixel_mean=PIXEL_MEAN,
        pixel_std=PIXEL_STD,
    )


def dims(config: VisionConfig) -> dict[str, int]:
    """Return the size of each dim letter in :func:`entries`."""
    side = config.image_size // config.patch_size
    token = int(config.class_token)
    return {
        "d": config.width,
        "f": config.mlp_dim,
        "n": config.num_heads,
        "h": config.width // config.num_heads,
        "s": side * side + token,
        "p": config.patch_size,
        "q": config.patch_size,
        "c": 3,
    }


def entries(model: str, config: VisionConfig) -> tuple[Entry, ...]:
    """List the entries of the vision encoder; ``model`` is the prefix of ``embeddings``."""
    top = (
        Entry("vision/class_token", model + "embeddings.class_embedding", "d", "d"),
        Entry("vision/stem/w", model + "embeddings.patch_embedding.weight", "p q c d", "d c p q"),
        Entry("vision/position", model + "embeddings.position_embedding.weight", "s d", "s d"),
        *norm_layer("vision/pre_norm", model + "pre_layrnorm", "d"),
        *norm_layer("vision/norm", model + "post_layernorm", "d"),
    )
    return top + block_entries(model + "encoder.layers.{}.")


def block_entries(layer: str, tower: str = "vision") -> tuple[Entry, ...]:
    """List the entries of blocks as in CLIP and SigLIP; ``layer`` is the prefix of ``self_attn``.

    Dim letters are upper case for a text tower.
    """
    ours, case = f"{tower}/stack/blocks/", str.upper if tower == "text" else str.lower
    entries: list[Entry] = []
    for name in ("norm1", "norm2"):
        entries += norm_layer(ours + name, f"{layer}layer_{name}", case("d"))
    for name, theirs, dims, their_dims in (*_ATTENTION, *MLP):
        entries += linear_layer(ours + name, layer + theirs, case(dims), case(their_dims))
    return tuple(entries)


MLP = (
    ("mlp/{}_in", "mlp.fc1", "d f", "f d"),
    ("mlp/{}_out", "mlp.fc2", "f d", "d f"),
)
"""Linear layers of the MLP of a block, and of SigLIP's pooling head."""
_ATTENTION = (
    ("attn/{}q", "self_attn.q_proj", "d n h", "nh d"),
    ("attn/{}k", "self_attn.k_proj", "d n h", "nh d"),
    ("attn/{}v", "self_attn.v_proj", "d n h", "nh d"),
    ("attn/{}o", "self_attn.out_proj", "n h d", "d nh"),
)
