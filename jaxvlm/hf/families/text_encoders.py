"""Text towers of CLIP, SigLIP and SigLIP 2: Hugging Face config and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, TextConfig, check_choice
from jaxvlm.hf.families import clip
from jaxvlm.hf.families.config_reader import METADATA, ConfigFields, block_sizes, read
from jaxvlm.hf.families.name_map import Entry, norm_layer

_TOWER = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_CLIP = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
    "projection_dim": 512,
}
_ONLY = {
    "attention_dropout": (0.0,),
    "dropout": (0.0,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}
_SIGLIP = ConfigFields(
    {**_TOWER, "projection_size": None},
    _ONLY,
    METADATA | {"tie_word_embeddings"},
)
_FIELDS = {
    "clip_text_model": ConfigFields(_TOWER | _CLIP, _ONLY, METADATA | {"tie_word_embeddings"}),
    "siglip_text_model": _SIGLIP,
    "siglip2_text_model": _SIGLIP,
}
_WRONG_EOS = 2
"""``eos_token_id`` of CLIP's first files; the text then ends at its largest token id."""


def text_from_hf(group: Mapping[str, Any], where: str, model_type: str) -> tuple[TextConfig, int]:
    """Read a text tower's settings and the dim of its projection from ``text_config``.

    Args:
        group: the fields.
        where: prefix of field names in error messages.
        model_type: default ``model_type``, for a group without one.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    kind = group.get("model_type", model_type)
    check_choice(f"{where}model_type", kind, _FIELDS)
    text = read({k: v for k, v in group.items() if k != "model_type"}, _FIELDS[kind], where)
    pool, eos = "end", -1
    if kind == "clip_text_model":
        eos = text["eos_token_id"]
        if not isinstance(eos, int):
            raise ConfigError(f"{where}eos_token_id={eos!r} is not supported, only one id")
        pool, eos = ("largest", -1) if eos == _WRONG_EOS else ("eos", eos)
    tower = TextConfig(
        **block_sizes(text, where),
        vocab_size=text["vocab_size"],
        max_length=text["max_position_embeddings"],
        causal=kind == "clip_text_model",
        norm_eps=float(text["layer_norm_eps"]),
        pool=pool,
        eos_id=eos,
    )
    return tower, text.get("projection_dim") or text.get("projection_size") or tower.width


def defaults(model_type: str) -> dict[str, Any]:
    """Return the default values of the fields that are read for a model type."""
    return _FIELDS[model_type].reads


def dims(config: TextConfig) -> dict[str, int]:
    """Return the size of each dim letter in :func:`entries`, and in BERT's."""
    return {
        "D": config.width,
        "F": config.mlp_dim,
        "N": config.num_heads,
        "H": config.width // config.num_heads,
        "V": config.vocab_size,
        "T": config.max_length,
        "Y": config.num_types,
    }


def entries(model: str) -> tuple[Entry, ...]:
    """List the text tower's entries except its projection; ``model`` prefixes ``embeddings``."""
    return (
        Entry("text/table", model + "embeddings.token_embedding.weight", "V D", "V D"),
        Entry("text/position", model + "embeddings.position_embedding.weight", "T D", "T D"),
        *norm_layer("text/norm", model + "final_layer_norm", "D"),
        *clip.block_entries(model + "encoder.layers.{}.", "text"),
    )
