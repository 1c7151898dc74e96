"""LLaVA-1.5: CLIP's ViT, a two-layer MLP, Llama (arXiv 2310.03744), in Hugging Face's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxvlm.config import ConfigError, ConnectorConfig, ModelConfig
from jaxvlm.models.families import clip, llama
from jaxvlm.models.families.fields import METADATA, Fields, activation, image_token_id, read
from jaxvlm.models.families.names import Entry, NameMap
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import Span

_FIELDS = Fields(
    {
        "vision_config": None,
        "text_config": None,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "tie_word_embeddings": False,
    },
    {
        "model_type": ("llava",),
        "vision_feature_select_strategy": ("default",),
        "multimodal_projector_bias": (True,),
    },
    # Old files repeat the decoder's vocabulary size here.
    METADATA | {"vocab_size"},
)
_NO_VISION = {
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
    where = "config.json: "
    top = read(hf_config, _FIELDS, where)
    vision = top["vision_config"] or _NO_VISION
    depth = int(vision.get("num_hidden_layers", clip.DEPTH))
    layer = _feature_layer(top["vision_feature_layer"], depth)
    decoder = llama.decoder_from_hf(top["text_config"] or {}, where + "text_config.")
    tied = bool(top["tie_word_embeddings"]) or decoder.tied_embeddings
    act = activation(top["projector_hidden_act"], where + "projector_hidden_act")
    return ModelConfig(
        vision=clip.vision_from_hf(vision, layer, where + "vision_config."),
        connector=ConnectorConfig(activation=act),
        decoder=dataclasses.replace(decoder, tied_embeddings=tied),
    )


def _feature_layer(layer: Any, depth: int) -> int:
    """Hugging Face counts ``hidden_states``: the embeddings are 0, or ``-depth - 1``."""
    if isinstance(layer, int):
        from_end = layer if layer < 0 else layer - depth - 1
        if -depth <= from_end <= -1:
            return from_end
    raise ConfigError(
        f"config.json: vision_feature_layer={layer!r}; one layer in -{depth}..-1 is supported"
    )


_CONNECTOR = (
    Entry("connector/w_in", "multi_modal_projector.linear_1.weight", "d D", "D d"),
    Entry("connector/b_in", "multi_modal_projector.linear_1.bias", "D", "D"),
    Entry("connector/w_out", "multi_modal_projector.linear_2.weight", "D E", "E D"),
    Entry("connector/b_out", "multi_modal_projector.linear_2.bias", "D", "D"),
)

_ALIASES = (
    # transformers 4.52 and later, in memory and in some files.
    (r"^model\.(?=vision_tower|multi_modal_projector|language_model)", ""),
    (r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model."),
    (r"^language_model\.(?!model|lm_head)", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)
"""Other spellings of a name (pattern, replacement), applied in turn."""
_BUFFERS = ("embeddings.position_ids", "rotary_emb.inv_freq")


def weights(config: ModelConfig) -> NameMap:
    """Every tensor, in the names of the published ``llava-hf`` checkpoints.

    Layers that the visual tokens are taken before are in it too, so that nothing is lost.

    Args:
        config: of :func:`config_from_hf`.
    """
    entries = (
        *llama.entries(config.decoder, "language_model.model.", "language_model."),
        *_CONNECTOR,
        *clip.entries("vision_tower.vision_model."),
    )
    sizes = {**llama.dims(config.decoder), **clip.dims(config.vision), "E": config.decoder.width}
    depths = {"vision": config.vision.depth, "decoder": config.decoder.depth}
    copies = ("lm_head.weight",) if config.decoder.tied_embeddings else ()
    return NameMap(entries, sizes, depths, _ALIASES, _BUFFERS + copies)


def span(
    config: ModelConfig, hf_config: Mapping[str, Any], _encode: Callable[[str], Sequence[int]]
) -> Callable[[int, int], Span]:
    """Every picture is one square, a token a patch."""
    one = Span.of(image_token_id(hf_config), num_visual_tokens(config))
    return lambda _width, _height: one
