# ruff: noqa: E501
"""Files of a Hugging Face folder, one of them bad: config, index, tokenizer, template, processor."""

from __future__ import annotations

import json
import pathlib
import struct
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxvlm.data.tokenizer import chat_tokenizer
from tests.bad_input import values
from tests.checkpoints import CLIP_PROCESSOR, PATCH, QWEN_PROCESSOR, SIZE

BUILT = chat_tokenizer.build(["a cat what is it dogs"], "word", 96)
_DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 3,
    "vision_feature_layer": -2,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": SIZE,
        "patch_size": PATCH,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "text_config": {
        "model_type": "llama",
        **_DECODER,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
}
QWEN: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 3,
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        **_DECODER,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    },
}
BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
INDEX: dict[str, Any] = {"metadata": {"total_size": 4}, "weight_map": {"a": "a.safetensors"}}
TEMPLATES = [
    "{{ 1 / 0 }}", "{{ messages[99].x.y }}", "{{ {}['a'].b }}", "{{ messages | first | int + 'a' }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 'a' * 10**10 }}", "{{ [0] * 10**10 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ 'a'.ljust(10**10) }}", "{{ 'a' | center(10**10) }}", "{{ 9**9**9 }}", "{{" + "(" * 3_000,
    "{% for m in messages %}", "{{ x.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{% x %}",
    "", "text", "{{ messages }}", "{{ undefined_.a }}", "{{ messages[0].content.a.b }}", "\x00\ud800",
    "{% include 'a' %}", "{% import 'os' as os %}", "{{ strftime_now(5) }}", "{{ tools[0] }}",
]  # fmt: skip
"""Chat templates that raise, loop, or build texts that fill the memory."""


def bert_weights() -> dict[str, np.ndarray]:
    """Random weights of :data:`BERT`, by their names in its checkpoints."""
    width, wide = BERT["hidden_size"], BERT["intermediate_size"]
    linear = {"pooler.dense": (width, width)}
    norms = ["embeddings.LayerNorm"]
    for i in range(BERT["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            linear[f"{layer}.attention.{name}"] = (width, width)
        linear[f"{layer}.intermediate.dense"] = (wide, width)
        linear[f"{layer}.output.dense"] = (width, wide)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    tables = {"word": BERT["vocab_size"], "position": BERT["max_position_embeddings"]}
    rng = np.random.default_rng(0)
    weights = {
        f"embeddings.{name}_embeddings.weight": rng.normal(size=(size, width))
        for name, size in {**tables, "token_type": 2}.items()
    }
    for name, shape in linear.items():
        weights |= {f"{name}.weight": rng.normal(size=shape), f"{name}.bias": np.zeros(shape[0])}
    for name in norms:
        weights |= {f"{name}.weight": np.ones(width), f"{name}.bias": np.zeros(width)}
    return {name: array.astype(np.float32) for name, array in weights.items()}


def write_good(folder: pathlib.Path, config: dict[str, Any]) -> None:
    """Write a folder that loads, but for the weights, which BERT's alone has."""
    BUILT.save(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(QWEN_PROCESSOR if config is QWEN else CLIP_PROCESSOR)
    )
    if config is BERT:
        save_file(bert_weights(), folder / "model.safetensors", {"format": "pt"})


def safetensors(header: bytes) -> bytes:
    """A safetensors file with a header as it is given."""
    return struct.pack("<Q", len(header)) + header + bytes(4)


Change = tuple[str, bytes]
CONFIGS = st.sampled_from([LLAVA, LLAVA, QWEN, BERT]).flatmap(values.json_texts)


@st.composite
def configs(draw: st.DrawFn) -> Change:
    """A ``config.json``."""
    return "config.json", draw(CONFIGS)


@st.composite
def tokenizers(draw: st.DrawFn) -> Change:
    """A file of a tokenizer."""
    full = json.loads(BUILT.backend.to_str())
    config = {
        "eos_token": {"content": "<eos>"},
        "pad_token": "<pad>",
        "model_max_length": 64,
        "extra_special_tokens": {"image_token": "<image>"},
        "chat_template": [{"name": "default", "template": BUILT.template}],
    }
    name = draw(
        st.sampled_from(["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
    )
    return name, draw(values.json_texts(full if name == "tokenizer.json" else config))


@st.composite
def templates(draw: st.DrawFn) -> Change:
    """A chat template."""
    text = draw(st.one_of(st.sampled_from(TEMPLATES), st.text(alphabet="{}%#' am.|0", max_size=30)))
    if draw(st.integers(0, 5)) == 0:
        return "chat_template.jinja", values.damaged(draw, text.encode("utf-8", "surrogatepass"))
    return "chat_template.jinja", text.encode("utf-8", "surrogatepass")


@st.composite
def processors(draw: st.DrawFn) -> Change:
    """A ``preprocessor_config.json``."""
    return "preprocessor_config.json", draw(
        values.json_texts(draw(st.sampled_from([CLIP_PROCESSOR, QWEN_PROCESSOR])))
    )


@st.composite
def weights(draw: st.DrawFn) -> Change:
    """An index of weights, or the header of a safetensors file."""
    if draw(st.booleans()):
        return "model.safetensors.index.json", draw(values.json_texts(INDEX))
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    data = safetensors(draw(values.json_texts(header)))
    return "model.safetensors", values.damaged(draw, data) if draw(st.booleans()) else data
