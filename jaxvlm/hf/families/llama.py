"""Llama's decoder (arXiv 2302.13971): Hugging Face config and tensor names, and shared parts.

SmolLM2 is a Llama. Families that differ little use :data:`READS`, :data:`ONLY` and :func:`decoder`.
All of them use :func:`entries`, since their tensors have the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxvlm.config import DecoderConfig
from jaxvlm.hf.families.config_reader import METADATA, ConfigFields, activation, read
from jaxvlm.hf.families.name_map import Entry
from jaxvlm.hf.families.positions import Rotary, read_rotary

READS: dict[str, Any] = {
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
    "max_position_embeddings": 2048,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
}
"""Fields that all descendants have, with Llama's defaults."""
ONLY: dict[str, tuple[Any, ...]] = {"attention_dropout": (0.0,)}
IGNORED = METADATA | {
    "_attn_implementation_autoset",
    "cache_implementation",
    "is_llama_config",
    "num_image_tokens",  # belongs to the vision-language model
    "transformers.js_config",
}
"""Fields of text configs that do not change the output."""

_FIELDS = ConfigFields(
    {**READS, "attention_bias": False, "mlp_bias": False},
    {
        **ONLY,
        "model_type": ("llama",),
        "rope_interleaved": (False,),
        "qk_layer_norms": (False,),
        "use_resampler": (False,),
    },
    # SmolVLM's files have a resampler that is off, and repeat the connector's factor.
    IGNORED
    | {"_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor"},
)


_Rows = list[tuple[Any, ...]]
"""Arguments of an Entry, without the common prefixes of layers' names."""


def decoder_from_hf(group: Mapping[str, Any], where: str) -> DecoderConfig:
    """Read a Llama decoder's settings from ``config.json`` or ``text_config``.

    Args:
        group: the fields.
        where: prefix of field names in error messages.

    Raises:
        ConfigError: an unknown field, or a value that this family does not support.
    """
    text = read(group, _FIELDS, where)
    bias = bool(text["attention_bias"])
    return decoder(
        text,
        where,
        read_rotary(text, where, 10_000.0),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(text["mlp_bias"]),
    )


def decoder(text: Mapping[str, Any], where: str, rotary: Rotary, **variants: Any) -> DecoderConfig:
    """Build a decoder's settings from the fields in :data:`READS`.

    Args:
        text: values of the fields.
        where: prefix of field names in error messages.
        rotary: RoPE settings.
        **variants: further fields of :class:`DecoderConfig`; they take precedence.
    """
    heads = text["num_attention_heads"]
    shared = {
        "vocab_size": text["vocab_size"],
        "width": text["hidden_size"],
        "depth": text["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": text["num_key_value_heads"] or heads,
        "head_dim": text["head_dim"] or text["hidden_size"] // heads,
        "mlp_dim": text["intermediate_size"],
        "rope_theta": rotary.theta,
        "rope_scaling": rotary.scaling,
        "rope_sections": rotary.sections,
        "rope_interleaved": rotary.interleaved,
        "norm_eps": float(text["rms_norm_eps"]),
        "tied_embeddings": bool(text["tie_word_embeddings"]),
    }
    if "activation" not in variants:
        shared["activation"] = activation(text["hidden_act"], where + "hidden_act")
    return DecoderConfig(**{**shared, **variants})


def dims(config: DecoderConfig) -> dict[str, int]:
    """Return the size of each dim letter in :func:`entries`."""
    return {
        "D": config.width,
        "F": config.mlp_dim,
        "V": config.vocab_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
        "X": config.num_experts,
    }


def depths(config: DecoderConfig) -> dict[str, int]:
    """Return the number of layers and experts that parameters stack, for ``NameMap.depths``."""
    return {"decoder": config.depth, "experts": config.num_experts}


def entries(
    config: DecoderConfig, model: str, head: str, joined_experts: bool = False
) -> tuple[Entry, ...]:
    """List the entries of the decoder.

    Args:
        config: settings; parts that are off (biases, norms, an untied output projection) have no
            entry.
        model: prefix of ``embed_tokens``.
        head: prefix of ``lm_head``.
        joined_experts: a layer's experts are two tensors, not three tensors per expert.
    """
    mlp = _mlp(config) if not config.num_experts else _experts(joined_experts)
    layers = (*_norms(config), *_attention(config), *mlp)
    top = [
        Entry("decoder/embed/table", model + "embed_tokens.weight", "V D", "V D"),
        Entry("decoder/norm/scale", model + "norm.weight", "D", "D"),
    ]
    if config.head and not config.tied_embeddings:
        top.append(Entry("decoder/embed/out", head + "lm_head.weight", "D V", "V D"))
    return (*top, *_in_layers(layers, model))


def layouts(config: DecoderConfig, model: str) -> tuple[tuple[Entry, ...], ...]:
    """List the entries of other layouts than :func:`entries`', for ``NameMap.layouts``.

    Args:
        config: settings.
        model: prefix of ``embed_tokens``.
    """
    return (_in_layers(_JOINED_TURNED, model),) if config.num_experts else ()


def _in_layers(rows: Iterable[tuple[Any, ...]], model: str) -> tuple[Entry, ...]:
    ours, theirs = "decoder/stack/blocks/", model + "layers.{}."
    return tuple(Entry(ours + o, theirs + t, *layout) for o, t, *layout in rows)


def copies(config: DecoderConfig, model: str, head: str) -> dict[str, str]:
    """Return the tied output projection, which some checkpoints hold as a copy."""
    tied = config.head and config.tied_embeddings
    return {head + "lm_head.weight": model + "embed_tokens.weight"} if tied else {}


def _norms(config: DecoderConfig) -> _Rows:
    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    if config.post_norms:
        names = {
            "norm1": "input_layernorm",
            "post_norm1": "post_attention_layernorm",
            "norm2": "pre_feedforward_layernorm",
            "post_norm2": "post_feedforward_layernorm",
        }
    return [(ours + "/scale", theirs + ".weight", "D", "D") for ours, theirs in names.items()]


def _attention(config: DecoderConfig) -> _Rows:
    rows: _Rows = [
        ("attn/wq", "self_attn.q_proj.weight", "D N H", "NH D"),
        ("attn/wk", "self_attn.k_proj.weight", "D K H", "KH D"),
        ("attn/wv", "self_attn.v_proj.weight", "D K H", "KH D"),
        ("attn/wo", "self_attn.o_proj.weight", "N H D", "D NH"),
    ]
    if config.qkv_bias:
        rows += [
            ("attn/bq", "self_attn.q_proj.bias", "N H", "NH"),
            ("attn/bk", "self_attn.k_proj.bias", "K H", "KH"),
            ("attn/bv", "self_attn.v_proj.bias", "K H", "KH"),
        ]
    if config.out_bias:
        rows.append(("attn/bo", "self_attn.o_proj.bias", "D", "D"))
    if config.qk_norm:
        rows += [
            ("attn/q_norm/scale", "self_attn.q_norm.weight", "H", "H"),
            ("attn/k_norm/scale", "self_attn.k_norm.weight", "H", "H"),
        ]
    return rows


_SEPARATE: _Rows = [
    ("mlp/w_gate", "mlp.experts.{}.gate_proj.weight", "D F", "F D"),
    ("mlp/w_in", "mlp.experts.{}.up_proj.weight", "D F", "F D"),
    ("mlp/w_out", "mlp.experts.{}.down_proj.weight", "F D", "D F"),
]
_JOINED: _Rows = [
    ("mlp/w_gate", "mlp.experts.gate_up_proj", "X D F", "X D F", (0, 2), 2),
    ("mlp/w_in", "mlp.experts.gate_up_proj", "X D F", "X D F", (1, 2), 2),
    ("mlp/w_out", "mlp.experts.down_proj", "X F D", "X F D"),
]
# As transformers 5 has them in memory, and saves them. No sizes fit both this and the layout above
# in both tensors: that would need D = 2 F and D = F.
_JOINED_TURNED: _Rows = [
    ("mlp/w_gate", "mlp.experts.gate_up_proj", "X D F", "X F D", (0, 2), 1),
    ("mlp/w_in", "mlp.experts.gate_up_proj", "X D F", "X F D", (1, 2), 1),
    ("mlp/w_out", "mlp.experts.down_proj", "X F D", "X D F"),
]


def _experts(joined: bool) -> _Rows:
    router = ("mlp/router", "mlp.gate.weight", "D X", "X D")
    return [router, *(_JOINED if joined else _SEPARATE)]


def _mlp(config: DecoderConfig) -> _Rows:
    rows: _Rows = [
        ("mlp/w_gate", "mlp.gate_proj.weight", "D F", "F D"),
        ("mlp/w_in", "mlp.up_proj.weight", "D F", "F D"),
        ("mlp/w_out", "mlp.down_proj.weight", "F D", "D F"),
    ]
    if config.mlp_bias:
        rows += [
            ("mlp/b_gate", "mlp.gate_proj.bias", "F", "F"),
            ("mlp/b_in", "mlp.up_proj.bias", "F", "F"),
            ("mlp/b_out", "mlp.down_proj.bias", "D", "D"),
        ]
    return rows
