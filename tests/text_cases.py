"""Settings of small decoders as transformers' config fields: chosen, and drawn at random."""

from __future__ import annotations

import numpy as np

VOCAB = 96
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
TOWERS = {
    "llama: biases, llama3, tied": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama: three heads, linear": (
        "Llama",
        {
            "hidden_size": 30,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-4,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        },
    ),
    "mistral: window, yarn": (
        "Mistral",
        {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5, "rope_parameters": YARN},
    ),
    "mistral: no window, dynamic": (
        "Mistral",
        {
            "num_key_value_heads": 4,
            "sliding_window": None,
            "max_position_embeddings": 9,  # the batch outgrows it
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
        },
    ),
    "qwen2: upper windows, yarn": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False},
        },
    ),
    "qwen2: tied": (
        "Qwen2",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "qwen3: biases, mixed windows": (
        "Qwen3",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": MIXED,
        },
    ),
    "qwen3: tied, dynamic": (
        "Qwen3",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "max_position_embeddings": 7,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "gemma: one key head, the old name of gelu": (
        "Gemma",
        {"num_key_value_heads": 1, "head_dim": 16, "hidden_act": "gelu"},
    ),
    "gemma: biases, untied, llama3": (
        "Gemma",
        {
            "num_key_value_heads": 4,
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3,
        },
    ),
    "gemma2: alternating": (
        "Gemma2",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2: uncapped scores": (
        "Gemma2",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "attention_bias": True,
            "query_pre_attn_scalar": 5,
            "sliding_window": 4,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 20.0,
            "layer_types": MIXED,
            "hidden_activation": "silu",
        },
    ),
    "gemma3: two bases, linear": (
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3: capped logits, yarn": (
        "Gemma3Text",
        {
            "num_key_value_heads": 1,
            "head_dim": 8,
            "attention_bias": True,
            "sliding_window": 3,
            "layer_types": MIXED,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "qwen2-vl: sections": (
        "Qwen2VLText",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
    ),
    "qwen2.5-vl: sections, yarn": (
        "Qwen2_5_VLText",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {**YARN, "mrope_section": [1, 1, 2]},
        },
    ),
    "qwen3-vl: sections in turn": (
        "Qwen3VLText",
        {
            "num_key_value_heads": 2,
            "head_dim": 20,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 3, 3]},
        },
    ),
    "qwen3-vl: biases, linear": (
        "Qwen3VLText",
        {
            "num_key_value_heads": 1,
            "head_dim": 12,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 300.0,
                "factor": 2.0,
                "mrope_section": [2, 2, 2],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3-moe: shares that add up, a window": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "moe_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "qwen3-moe: biases, tied, raw shares": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "rope_parameters": LLAMA3,
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeText",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]},
        },
    ),
}
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3Text"]


def drawn(family, seed):
    """Random settings of a family: odd widths, heads, RoPE scalings, windows, caps."""
    rng = np.random.default_rng((seed, FAMILIES.index(family)))

    def one_of(*values):
        return values[rng.integers(len(values))]

    kv, per_kv, depth = one_of(1, 2, 3), one_of(1, 2, 3), one_of(2, 3, 4)
    heads = kv * per_kv
    given = {
        "hidden_size": heads * one_of(4, 8, 12),
        "intermediate_size": one_of(28, 36, 52),
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": one_of(6, 8, 10, 14),
        "rms_norm_eps": one_of(1e-6, 1e-5, 1e-3),
        "tie_word_embeddings": one_of(True, False),
        "max_position_embeddings": one_of(8, 64),
    }
    act = one_of("silu", "gelu_pytorch_tanh", "relu")
    given["hidden_activation" if family in ("Gemma2", "Gemma3Text") else "hidden_act"] = act
    rope = one_of(
        {"rope_type": "default", "rope_theta": 300.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
        {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0},
        LLAMA3 | {"factor": one_of(2.0, 32.0)},
        YARN | {"beta_slow": one_of(0.5, 2.0), "attention_factor": one_of(None, 1.3)},
    )
    given["rope_parameters"] = rope
    kinds = [one_of("full_attention", "sliding_attention") for _ in range(depth)]
    window = {"sliding_window": one_of(2, 5, 9)}
    if family not in ("Mistral", "Qwen2"):
        given["attention_bias"] = one_of(True, False)
    if family == "Llama":
        given["mlp_bias"] = one_of(True, False)
    if family == "Mistral":
        given |= one_of(window, {"sliding_window": None})
    if family in ("Qwen2", "Qwen3"):
        upper = {"max_window_layers": one_of(0, 1, 2)}
        given |= one_of({}, window | {"use_sliding_window": True} | upper)
    if family == "Qwen3Moe":
        given |= one_of({}, window | {"use_sliding_window": True})
        given |= {"num_experts": one_of(3, 4, 7), "num_experts_per_tok": one_of(1, 2, 3)}
        given |= {"moe_intermediate_size": one_of(8, 12), "norm_topk_prob": one_of(True, False)}
    if family in ("Gemma2", "Gemma3Text"):
        given |= window | {"layer_types": kinds, "query_pre_attn_scalar": one_of(3, 16)}
        given["final_logit_softcapping"] = one_of(None, 2.0, 30.0)
    if family == "Gemma2":
        given["attn_logit_softcapping"] = one_of(None, 1.0, 50.0)
    if family == "Gemma3Text":
        local = {"rope_type": "default", "rope_theta": one_of(10.0, 1e4)}
        given["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return given
