"""Fields of config.json that families of encoders read, and those that they refuse by name."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import pathlib
import re
import string
import types

import jax
import pytest

from jaxvlm.config import ConfigError, DualConfig, LoraConfig, MeshConfig, TextConfig, VisionConfig
from jaxvlm.hf.families import ENCODERS, dual_encoders, family, sentences
from jaxvlm.models.dual_encoder import check
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model

CLIP = {"model_type": "clip"}
SIGLIP = {"model_type": "siglip"}
SIGLIP2 = {"model_type": "siglip2"}
BERT = {"model_type": "bert"}

# The generation settings that transformers 4.16 wrote into each group of CLIP's first files.
OLD = {
    "_name_or_path": "",
    "add_cross_attention": False,
    "bad_words_ids": None,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "dropout": 0.0,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "is_decoder": False,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_scores": False,
    "prefix": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tie_encoder_decoder": False,
    "tie_word_embeddings": True,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
}


def read(config):
    return ENCODERS[config["model_type"]].config_from_hf(config)


def text(base, **fields):
    return base | {"text_config": fields}


def vision(base, **fields):
    return base | {"vision_config": fields}


REFUSED = {
    "text_config.rope_theta=1.0 is unknown": text(CLIP, rope_theta=1.0),
    "text_config.attention_dropout=0.1": text(SIGLIP, attention_dropout=0.1),
    "text_config.hidden_act='mish'": text(SIGLIP2, hidden_act="mish"),
    r"text_config.eos_token_id=\[1, 2\]": text(CLIP, eos_token_id=[1, 2]),
    "text_config.model_type='t5'; known: clip_text": text(CLIP, model_type="t5"),
    "vision_config.vision_use_head=False": vision(SIGLIP, vision_use_head=False),
    "projection_size=64 is not the vision tower's hidden_size=768": text(
        SIGLIP, projection_size=64
    ),
    "vision_config.num_channels=1": vision(SIGLIP2, num_channels=1),
    r"vision_config.pruned_heads=\{1: 2\}": vision(CLIP, pruned_heads={1: 2}),
    "config.json: logit_bias=1 is unknown": CLIP | {"logit_bias": 1},
    "position_embedding_type='relative_key'": BERT | {"position_embedding_type": "relative_key"},
    "is_decoder=True": BERT | {"is_decoder": True},
    "config.json: n_layers=3 is unknown": BERT | {"n_layers": 3},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_field_that_is_not_understood_is_named(message):
    with pytest.raises(ConfigError, match=message):
        read(REFUSED[message])


def test_defaults_are_transformers():
    transformers = pytest.importorskip("transformers", reason="the oracle")
    for kind, config in {
        "clip": transformers.CLIPConfig(),
        "siglip": transformers.SiglipConfig(),
        "siglip2": transformers.Siglip2Config(),
        "bert": transformers.BertConfig(),
    }.items():
        assert read({"model_type": kind}) == read(config.to_dict()), kind


def test_first_clip_files_are_read():
    old = CLIP | {"text_config": OLD | {"eos_token_id": 2}, "vision_config": OLD}
    found = read(old | {"text_config_dict": None, "vision_config_dict": None})
    assert found.text == dataclasses.replace(read(CLIP).text, pool="largest", eos_id=-1)
    assert found.vision == read(CLIP).vision


def test_old_copies_have_the_last_word_as_in_transformers():
    transformers = pytest.importorskip("transformers", reason="the oracle")
    old = text(CLIP, hidden_size=64, eos_token_id=2, num_hidden_layers=3) | {
        "text_config_dict": {"hidden_size": 128},
        "vision_config": {"patch_size": 16},
        "vision_config_dict": {"num_hidden_layers": 2},
    }
    theirs = transformers.CLIPConfig(**{k: v for k, v in old.items() if k != "model_type"})
    assert read(old) == read(theirs.to_dict())
    assert read(old).text.width == 128 and read(old).vision.patch_size == 32


MODULES = [{"type": f"sentence_transformers.models.{n}"} for n in ("Transformer", "Pooling")]
NORMALIZE = {"type": "sentence_transformers.models.Normalize"}
DENSE = {"type": "sentence_transformers.models.Dense"}


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 768}, "class"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 768}, "last"),
        ({"pooling_mode": ["cls"], "include_prompt": True}, "class"),
        ({}, "mean"),
    ],
)
def test_sentence_transformers_pooling_is_read(pooling, pool):
    found = sentences.with_modules(read(BERT), [*MODULES, NORMALIZE], pooling, {})
    assert found.text.pool == pool and found.normalize
    assert not sentences.with_modules(read(BERT), MODULES, pooling, {}).normalize


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ([*MODULES, NORMALIZE, DENSE], {}, "Pooling, Normalize, Dense is not supported"),
        ([*MODULES, DENSE], {}, "in_features=3, out_features=2; the module before it has 768 dims"),
        (MODULES[:1], {}, "modules.json: Transformer is not"),
        (MODULES, {"pooling_mode": "max"}, "pooling by max is not supported"),
        (
            MODULES,
            {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
            "pooling by cls and max",
        ),
        (MODULES, {"include_prompt": False}, "include_prompt=False"),
        (MODULES, {"pooling_mode": "mean", "weights": 1}, "weights=1 is unknown"),
        (MODULES, {"embedding_dimension": 5}, "embedding_dimension=5, but hidden_size=768"),
    ],
)
def test_what_sentence_transformers_does_besides_is_refused(modules, pooling, message):
    with pytest.raises(ConfigError, match=message):
        sentences.with_modules(read(BERT), modules, pooling, LINEAR)


LINEAR = {"in_features": 3, "out_features": 2}


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({}, "activation.Tanh is not supported, only torch.nn.modules.linear.Identity"),
        ({"use_residual": True}, "use_residual=True"),
        ({"activation_function": "torch.nn.modules.linear.Identity", "rank": 3}, "rank=3"),
    ],
)
def test_a_linear_map_of_another_kind_is_refused(dense, message):
    dense = {"in_features": 768, "out_features": 2} | dense
    with pytest.raises(ConfigError, match=message):
        sentences.with_modules(read(BERT), [*MODULES, DENSE], {}, dense)


TEXT = TextConfig(vocab_size=9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"towers": ("audio",)}, "towers=.*known: vision, text"),
        ({"towers": ("text",)}, "project names 'vision', which is not in towers"),
        (
            {"towers": ("text",), "project": (), "vision": VisionConfig(depth=9)},
            "vision is set, but config.dual.towers",
        ),
        (
            {"towers": ("text",), "project": ("text",), "has_bias": True},
            "has_bias=True applies to logits",
        ),
        ({"project": ("vision",), "embed_dim": 32}, "text.width=64 is not embed_dim=32"),
        ({"vision": VisionConfig()}, "vision.pool='none' gives no embedding"),
        ({"bias": 1.0}, "bias=1.0 has no effect without has_bias"),
        (
            {"vision": VisionConfig(pool="attention", frozen_blocks=1)},
            "works for vision-language models only; in a dual encoder",
        ),
        ({"vision": VisionConfig(pool="attention", depth=0)}, "config.dual.vision.depth=0"),
        (
            {"vision": VisionConfig(image_size=72, patch_size=24, pool="attention", stem="conv")},
            "config.dual.vision.patch_size=24: stem='conv' .* must be a power of two",
        ),
        ({"text": TextConfig()}, "config.dual.text.vocab_size=0 must be at least 1"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"attention": "magic"}, "config.dual.attention='magic'"),
    ],
)
def test_towers_that_do_not_fit_are_refused(fields, message):
    config = dataclasses.replace(DualConfig(text=TEXT), **fields)
    with pytest.raises(ConfigError, match=message):
        check(config)


@pytest.mark.parametrize("adapters", [LoraConfig(alpha=3.0), LoraConfig(base="int8")])
def test_adapters_without_a_rank_are_refused(adapters):
    mesh = make_mesh(MeshConfig(1), jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"config\.dual\.lora\..*config\.dual\.lora\.rank"):
        build_model(DualConfig(text=TEXT, lora=adapters), mesh)


def test_encoders_are_no_vlms():
    with pytest.raises(ConfigError, match=r"model_type='clip' is an encoder.*jaxvlm embed"):
        family(CLIP, "here")


def test_siglips_texts_are_made_plain():
    """Against the methods of transformers' tokenizer, whose module wants a library we don't."""
    found = importlib.util.find_spec("transformers")
    if found is None:
        pytest.skip("transformers is the oracle")
    path = pathlib.Path(found.origin).parent / "models" / "siglip" / "tokenization_siglip.py"
    names = ("remove_punctuation", "canonicalize_text")
    methods = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    scope = {"re": re, "string": string}
    exec(compile(ast.Module(methods, []), str(path), "exec"), scope)
    config = read(SIGLIP)
    for lower in (True, False):
        theirs = types.SimpleNamespace(do_lower_case=lower)
        theirs.remove_punctuation = functools.partial(scope["remove_punctuation"], theirs)
        tokenizer = {"tokenizer_class": "SiglipTokenizer", "do_lower_case": lower}
        clean = dual_encoders.text_style(config, tokenizer).clean
        for said in ("A  photo, of TWO cats!", " (yes)\tit's\n", "", "Ünï-Cöde… “quoted”"):
            assert clean(said) == scope["canonicalize_text"](theirs, said)


def test_siglip_2s_texts_are_lower_case():
    """As transformers' docs of its tokenizer say: Gemma's, with lower case before it."""
    style = dual_encoders.text_style(read(SIGLIP2), {"tokenizer_class": "GemmaTokenizer"})
    assert style.clean("A  Photo, two!") == "a  photo, two!"
    assert style.see_padding and style.max_length == 64
    with pytest.raises(ConfigError, match="padding_side='left' is not supported, only 'right'"):
        dual_encoders.text_style(read(SIGLIP2), {"padding_side": "left"})
