"""LLaVA-1.5: CLIP's ViT, a two-layer MLP, Llama (arXiv 2310.03744), in Hugging Face's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ModelConfig
from jaxvlm.models.families import clip, connectors, parts, siglip
from jaxvlm.models.families.fields import METADATA, Features, Fields, activation, read
from jaxvlm.models.families.names import NameMap
from jaxvlm.types import ChatStyle, Span, TileGrid

READS = {
    "vision_config": None,
    "text_config": None,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
}
_FIELDS = Fields(
    READS,
    {"model_type": ("llava",), "vision_feature_select_strategy": ("default", "full")},
    # Old files repeat the decoder's vocabulary size here.
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
"""CLIP-L/14 at 336 pixels: what a file without ``vision_config`` means."""


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The model that a LLaVA ``config.json`` describes, in float32.

    Args:
        hf_config: the file's content.

    Raises:
        ConfigError: a field that is unknown here, or a value that this family can't do.
    """
    return model(read(hf_config, _FIELDS, "config.json: "), NO_VISION, "llama")


def model(
    top: Mapping[str, Any], no_vision: Mapping[str, Any], text: str, newline: bool = False
) -> ModelConfig:
    """A LLaVA of any generation.

    Args:
        top: the values of ``READS``.
        no_vision: what a file without ``vision_config`` means.
        text: model type of a ``text_config`` that has none.
        newline: a learned token ends each row of patches.
    """
    where = "config.json: "
    vision = top["vision_config"] or no_vision
    take = Features(top["vision_feature_layer"], top["vision_feature_select_strategy"] == "full")
    tower = siglip if vision.get("model_type") == "siglip_vision_model" else clip
    act = activation(top["projector_hidden_act"], where + "projector_hidden_act")
    return ModelConfig(
        vision=tower.vision_from_hf(vision, take, where + "vision_config."),
        connector=connectors.mlp(act, bool(top["multimodal_projector_bias"]), newline),
        decoder=parts.decoder(top, text, bool(top["tie_word_embeddings"])),
    )


def weights(config: ModelConfig) -> NameMap:
    """Every tensor, in the names of the published ``llava-hf`` checkpoints.

    Layers that the visual tokens are taken before are in it too, so that nothing is lost.

    Args:
        config: of :func:`config_from_hf`.
    """
    tower = clip if config.vision.class_token else siglip
    vision = tower.entries("vision_tower.vision_model.", config.vision)
    return parts.weights(config, vision, connectors.mlp_entries("", config.connector))


def chat_style(hf_config: Mapping[str, Any]) -> ChatStyle:
    """A picture's token stands alone."""
    return ChatStyle()


def span(
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    grid: TileGrid = parts.whole,
) -> Callable[[int, int], Span]:
    """A token a patch."""
    return parts.one_span(config, hf_config)
