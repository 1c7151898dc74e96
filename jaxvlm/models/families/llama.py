"""Llama's decoder (arXiv 2302.13971) in Hugging Face's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvlm.config import ConfigError, DecoderConfig
from jaxvlm.models.families.fields import Fields, activation, read
from jaxvlm.models.families.names import Entry

_FIELDS = Fields(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": None,
        "rope_parameters": None,
    },
    {
        "model_type": ("llama",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "attention_dropout": (0.0,),
        "rope_scaling": (None,),
    },
)


def decoder_from_hf(group: Mapping[str, Any], where: str) -> DecoderConfig:
    """The decoder of a Llama ``config.json``, or of its ``text_config``.

    Args:
        group: the fields.
        where: what error messages put before a field's name.

    Raises:
        ConfigError: a field that is unknown here, or a value that this family can't do.
    """
    text = read(group, _FIELDS, where)
    heads = text["num_attention_heads"]
    return DecoderConfig(
        vocab_size=text["vocab_size"],
        width=text["hidden_size"],
        depth=text["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=text["num_key_value_heads"] or heads,
        head_dim=text["head_dim"] or text["hidden_size"] // heads,
        mlp_dim=text["intermediate_size"],
        rope_theta=_rope_theta(text, where),
        activation=activation(text["hidden_act"], where + "hidden_act"),
        norm_eps=float(text["rms_norm_eps"]),
        tied_embeddings=bool(text["tie_word_embeddings"]),
    )


def _rope_theta(text: Mapping[str, Any], where: str) -> float:
    rope = dict(text["rope_parameters"] or {})
    kind, theta = rope.pop("rope_type", "default"), rope.pop("rope_theta", None)
    if kind != "default" or rope:
        raise ConfigError(
            f"{where}rope_parameters={text['rope_parameters']!r} is not "
            "supported by this family, only rope_type='default' with rope_theta"
        )
    return float(theta or text["rope_theta"] or 10_000.0)


def dims(config: DecoderConfig) -> dict[str, int]:
    """Letter -> size, for :func:`entries`."""
    return {
        "D": config.width,
        "F": config.mlp_dim,
        "V": config.vocab_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
    }


def entries(config: DecoderConfig, model: str, head: str) -> tuple[Entry, ...]:
    """Every parameter of the decoder.

    Args:
        config: a tied output matrix has no entry.
        model: what stands before ``embed_tokens``.
        head: what stands before ``lm_head``.
    """
    layer = model + "layers.{}."
    untied = Entry("decoder/embed/out", head + "lm_head.weight", "D V", "V D")
    return (
        Entry("decoder/embed/table", model + "embed_tokens.weight", "V D", "V D"),
        Entry("decoder/norm/scale", model + "norm.weight", "D", "D"),
        Entry("decoder/stack/blocks/norm1/scale", layer + "input_layernorm.weight", "D", "D"),
        Entry(
            "decoder/stack/blocks/norm2/scale", layer + "post_attention_layernorm.weight", "D", "D"
        ),
        Entry("decoder/stack/blocks/attn/wq", layer + "self_attn.q_proj.weight", "D N H", "NH D"),
        Entry("decoder/stack/blocks/attn/wk", layer + "self_attn.k_proj.weight", "D K H", "KH D"),
        Entry("decoder/stack/blocks/attn/wv", layer + "self_attn.v_proj.weight", "D K H", "KH D"),
        Entry("decoder/stack/blocks/attn/wo", layer + "self_attn.o_proj.weight", "N H D", "D NH"),
        Entry("decoder/stack/blocks/mlp/w_gate", layer + "mlp.gate_proj.weight", "D F", "F D"),
        Entry("decoder/stack/blocks/mlp/w_in", layer + "mlp.up_proj.weight", "D F", "F D"),
        Entry("decoder/stack/blocks/mlp/w_out", layer + "mlp.down_proj.weight", "F D", "D F"),
        *(() if config.tied_embeddings else (untied,)),
    )
