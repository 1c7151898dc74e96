"""Every field of a text tower's config is read or refused; every setting that cannot be, too."""

import copy
import math

import pytest
from text_cases import MIXED, TOWERS
from text_towers import family_class, hf_config

from jaxvlm.config import ConfigError, DecoderConfig, RopeScaling
from jaxvlm.hf.families import text_decoders
from jaxvlm.hf.families.llama import IGNORED
from jaxvlm.models.decoder import check

REFUSED = [
    ("llama: biases, llama3, tied", "hidden_act", "mish"),
    ("llama: biases, llama3, tied", "attention_dropout", 0.1),
    ("llama: biases, llama3, tied", "sliding_window", 4),
    ("llama: biases, llama3, tied", "rope_interleaved", True),
    ("llama: biases, llama3, tied", "a_new_field", 1),
    ("llama: biases, llama3, tied", "rope_scaling", {"type": "longrope", "factor": 2.0}),
    ("llama: biases, llama3, tied", "rope_scaling", {"type": "linear"}),
    ("llama: biases, llama3, tied", "rope_scaling", {"type": "linear", "factor": 2.0, "beta": 1}),
    ("llama: biases, llama3, tied", "rope_parameters", {"partial_rotary_factor": 0.5}),
    ("llama: biases, llama3, tied", "rope_parameters", {"mrope_section": [2, 2, 2]}),
    ("mistral: window, yarn", "layer_types", MIXED),
    ("mistral: window, yarn", "sliding_window", 0),
    ("qwen2: upper windows, yarn", "layer_types", [*MIXED[:2], "chunked_attention"]),
    ("qwen2: upper windows, yarn", "layer_types", MIXED[:2]),
    ("qwen2: tied", "layer_types", MIXED),
    ("qwen2: tied", "attention_bias", True),
    ("qwen3: tied, dynamic", "mlp_bias", True),
    ("qwen2-vl: sections", "use_sliding_window", True),
    ("qwen2-vl: sections", "head_dim", 32),
    ("qwen3-moe: biases, tied, raw shares", "decoder_sparse_step", 2),
    ("qwen3-moe: biases, tied, raw shares", "mlp_only_layers", [0]),
    ("qwen3-moe: biases, tied, raw shares", "output_router_logits", True),
    ("qwen3-vl-moe", "norm_topk_prob", False),
    ("qwen3-vl: sections in turn", "rope_parameters", {"mrope_interleaved": False}),
    ("gemma: biases, untied, llama3", "use_bidirectional_attention", True),
    ("gemma: biases, untied, llama3", "hidden_activation", "relu"),
    ("gemma2: alternating", "hidden_act", "relu"),
    ("gemma3: two bases, linear", "attn_logit_softcapping", 50.0),
    ("gemma3: two bases, linear", "rope_parameters", {"rope_theta": 1e4}),
    ("gemma3: two bases, linear", "rope_parameters", {"sliding_attention": {"factor": 2.0}}),
]


@pytest.mark.parametrize(("name", "field", "value"), REFUSED)
def test_what_it_cannot_do_is_named(name, field, value):
    group = hf_config(*TOWERS[name]).to_dict() | {field: value}
    if field == "rope_scaling":
        del group["rope_parameters"]
    with pytest.raises(ConfigError, match=field if name[:5] != "qwen2" else "layer_types|" + field):
        text_decoders.decoder_from_hf(group, "config.json: ")


def test_an_unknown_tower_is_named():
    with pytest.raises(ConfigError, match="model_type='mamba'; known: llama"):
        text_decoders.decoder_from_hf({"model_type": "mamba"}, "config.json: ")


# As the hub has them: the spelling before transformers 5, and fields left to their defaults.
PUBLISHED = {
    "meta-llama/Llama-3.2-1B": (
        {
            "model_type": "llama",
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        {"rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)},
    ),
    "mistralai/Mistral-7B-v0.1": (
        {"model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 4096},
        {"window": 4096, "window_pattern": (True,), "num_kv_heads": 8, "mlp_dim": 14336},
    ),
    "Qwen/Qwen2.5-7B, with its card's yarn": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "max_window_layers": 28,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "type": "yarn",
            },
        },
        {
            "window": 0,
            "head_dim": 128,
            "qkv_bias": True,
            "out_bias": False,
            "rope_scaling": RopeScaling("yarn", 4.0, 32768, magnitude=0.1 * math.log(4.0) + 1.0),
        },
    ),
    "google/gemma-2-2b": (
        {
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
        },
        {"window": 4096, "window_pattern": (True, False), "query_scale": 1 / 16, "logit_cap": 30.0},
    ),
    "google/gemma-3-4b, text": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        {
            "window": 1024,
            "window_pattern": (True,) * 5 + (False,),
            "rope_theta": 1e6,
            "local_rope_theta": 1e4,
            "rope_scaling": RopeScaling("linear", 8.0),
            "num_kv_heads": 4,
        },
    ),
    "Qwen/Qwen2-VL-7B, text": (
        {
            "model_type": "qwen2_vl_text",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        {"rope_sections": (16, 24, 24), "rope_interleaved": False, "rope_theta": 1e6},
    ),
    "Qwen/Qwen3-VL-4B, text": (
        {
            "model_type": "qwen3_vl_text",
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rope_theta": 5000000,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
        },
        {"rope_sections": (24, 20, 20), "rope_interleaved": True, "rope_theta": 5e6},
    ),
    "HuggingFaceTB/SmolLM2-135M": (
        {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-5,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "vocab_size": 49152,
        },
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "rope_theta": 1e5},
    ),
    "Qwen/Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {"num_experts": 128, "experts_per_token": 8, "mlp_dim": 768, "normalize_experts": True},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    group, expected = PUBLISHED[name]
    config = text_decoders.decoder_from_hf(group, "config.json: ")
    check(config)
    assert {field: getattr(config, field) for field in expected} == expected
    # What transformers makes of the file, in the new spelling, says the same.
    family = {
        "gemma3_text": "Gemma3Text",
        "qwen2_vl_text": "Qwen2VLText",
        "qwen3_vl_text": "Qwen3VLText",
        "qwen3_moe": "Qwen3Moe",
    }
    kind = family.get(group["model_type"], group["model_type"].capitalize())
    given = copy.deepcopy({k: v for k, v in group.items() if k != "model_type"})
    again = family_class(kind, "Config")(**given).to_dict()
    again.setdefault("tie_word_embeddings", config.tied_embeddings)
    assert text_decoders.decoder_from_hf(again, "config.json: ") == config


# Fields that say nothing where another one rules, in torch as here.
MOOT = {"_sliding_window_pattern", "max_window_layers", "sliding_window"}
MOOT |= {"sliding_window_pattern", "use_sliding_window"}  # layer_types is there
MOOT |= {"router_aux_loss_coef"}  # output_router_logits is off


@pytest.mark.parametrize("name", TOWERS)
def test_no_field_is_overlooked(name):
    """Any field with another value makes another decoder, or is refused by name."""
    group = hf_config(*TOWERS[name]).to_dict()
    config = text_decoders.decoder_from_hf(group, "config.json: ")
    other = {bool: lambda v: not v, int: lambda v: 2 * v, float: lambda v: v / 2 + 0.5}
    seen = 0
    for field, value in group.items():
        if field in IGNORED or field in MOOT or type(value) not in other:
            continue
        if config.num_experts and field == "intermediate_size":  # of dense layers; there are none
            continue
        seen += 1
        try:
            changed = text_decoders.decoder_from_hf(group | {field: other[type(value)](value)}, "")
        except ConfigError as error:
            assert field in str(error)
        else:
            assert changed != config, field
    assert seen >= 8


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"norm": "layer"}, "norm='layer'; known: rms, rms_plus_one"),
        ({"rope_scaling": RopeScaling("longrope")}, "kind='longrope'; known: default"),
        ({"rope_scaling": RopeScaling("yarn", 2.0)}, "needs the length"),
        ({"rope_sections": (2, 2, 2)}, "add up to 6, not to half of head_dim=16"),
        ({"window": 4, "rope_sections": (4, 2, 2)}, "no meaning with rope_sections"),
        ({"window": 4, "window_pattern": ()}, "window_pattern is empty"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        check(DecoderConfig(vocab_size=8, **change))
