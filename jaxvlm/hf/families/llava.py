"""LLaVA-1.5 (arXiv 2310.03744), CLIP's ViT, MLP, Llama: Hugging Face config and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ModelConfig
from jaxvlm.hf.families import clip, common, connectors, siglip
from jaxvlm.hf.families.config_reader import METADATA, ConfigFields, FeatureLayers, activation, read
from jaxvlm.hf.families.name_map import NameMap

READS = {
    "vision_config": None,
    "text_config": None,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
}
_FIELDS = ConfigFields(
    READS,
    {"model_type": ("llava",), "vision_feature_select_strategy": ("default", "full")},
    # Old files repeat the decoder's vocabulary size at the top.
    METADATA | {"vocab_size"},
)
NO_VISION = {
    "intermediate_size": 4096,
    "hidden_size": 1024,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
"""Default ``vision_config``: CLIP-L/14 at 336 pixels."""


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Read a LLaVA model's settings from ``config.json``; the dtype is float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    return model(read(hf_config, _FIELDS, "config.json: "), NO_VISION, "llama")


def model(
    top: Mapping[str, Any],
    no_vision: Mapping[str, Any],
    text: str,
    newline: bool = False,
    text_ties: bool = True,
) -> ModelConfig:
    """Build the settings of a LLaVA model of any generation.

    Args:
        top: values of the fields in ``READS``.
        no_vision: default ``vision_config``.
        text: default ``model_type`` of ``text_config``.
        newline: whether a learned token ends each row of patches.
        text_ties: as for :func:`common.decoder`.
    """
    where = "config.json: "
    vision = top["vision_config"] or no_vision
    is_whole = top["vision_feature_select_strategy"] == "full"
    take = FeatureLayers(top["vision_feature_layer"], is_whole)
    tower = siglip if vision.get("model_type") == "siglip_vision_model" else clip
    act = activation(top["projector_hidden_act"], where + "projector_hidden_act")
    return ModelConfig(
        vision=tower.vision_from_hf(vision, take, where + "vision_config."),
        connector=connectors.mlp(act, bool(top["multimodal_projector_bias"]), newline),
        decoder=common.decoder(top, text, text_ties),
    )


def weights(config: ModelConfig) -> NameMap:
    """Map all parameters to tensors, under the names in published ``llava-hf`` checkpoints.

    Layers after the ones that visual tokens come from are included, so that an export has them.

    Args:
        config: result of :func:`config_from_hf`.
    """
    tower = clip if config.vision.class_token else siglip
    vision = tower.entries("vision_tower.vision_model.", config.vision)
    return common.weights(config, vision, connectors.mlp_entries("", config.connector))


chat_style = common.image_token_style
span = common.one_span
