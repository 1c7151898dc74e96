"""Published sizes: as many parameters as transformers' own models have on the meta device."""

from __future__ import annotations

import json

import numpy as np
import pytest

import jaxvlm.hf.model_zoo as table
from jaxvlm.config import ConfigError
from jaxvlm.hf import safetensors
from jaxvlm.hf.families import ENCODERS

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")


@pytest.mark.parametrize("name", table.names())
def test_parameters_are_as_many_as_transformers(name):
    given = table.published_config(name)
    config = transformers.AutoConfig.for_model(**given)
    encoder = given["model_type"] in ENCODERS
    kind = transformers.AutoModel if encoder else transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model = kind.from_config(config)
    assert table.num_parameters(given) == model.num_parameters()


SMALLER = {
    "smolvlm-256m": {
        "image_token_id": 500,
        "text_config": {"num_hidden_layers": 2, "vocab_size": 512},
        "vision_config": {"num_hidden_layers": 1},
    },
    "qwen2.5-vl-3b": {
        "image_token_id": 500,
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "intermediate_size": 600,
        "vocab_size": 5000,
        "num_attention_heads": 4,
        "vision_config": {"depth": 1, "out_hidden_size": 512, "hidden_size": 320},
    },
    "qwen3-vl-30b-a3b": {
        "image_token_id": 500,
        "text_config": {"num_hidden_layers": 2, "vocab_size": 5000, "num_experts": 3}
        | {"num_experts_per_tok": 2, "num_attention_heads": 4, "hidden_size": 512},
        "vision_config": {"depth": 2, "deepstack_visual_indexes": [0], "hidden_size": 320}
        | {"out_hidden_size": 512},
    },
}


@pytest.mark.parametrize("name", SMALLER)
def test_a_folder_of_random_weights_is_loaded(name, tmp_path):
    given = json.loads(json.dumps(table.published_config(name)))
    for field, value in SMALLER[name].items():
        given[field] = given[field] | value if isinstance(value, dict) else value
    size = table.write_random(given, tmp_path, shard_bytes=2**23)
    layout = safetensors.read_layout(tmp_path)
    assert len({stored.file for stored in layout.values()}) > 2
    assert size == sum(2 * np.prod(stored.shape) for stored in layout.values())
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.num_parameters() == table.num_parameters(given)


DIMS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = DIMS | {"vocab_size": 40, "eos_token_id": 2}
VISION = DIMS | {"patch_size": 4}
PROJECTED = "CLIPTextModelWithProjection"
ENCODER = {
    "CLIPModel": {
        "model_type": "clip",
        "projection_dim": 8,
        "text_config": TEXT,
        "vision_config": VISION | {"image_size": 16},
    },
    "SiglipModel": {
        "model_type": "siglip",
        "text_config": TEXT,
        "vision_config": VISION | {"image_size": 16},
    },
    "Siglip2Model": {
        "model_type": "siglip2",
        "text_config": TEXT,
        "vision_config": VISION | {"num_patches": 16},
    },
    "BertModel": {"model_type": "bert", **TEXT},
    "CLIPTextModel": {"model_type": "clip_text_model", **TEXT},
    PROJECTED: {
        "model_type": "clip_text_model",
        "architectures": [PROJECTED],
        "projection_dim": 9,
        **TEXT,
    },
    "SiglipTextModel": {"model_type": "siglip_text_model", **TEXT},
    "Siglip2TextModel": {"model_type": "siglip2_text_model", **TEXT},
}


@pytest.mark.parametrize("kind", ENCODER)
def test_an_encoder_of_random_weights_is_loaded_whole(kind, tmp_path):
    table.write_random(ENCODER[kind], tmp_path)
    model, info = getattr(transformers, kind).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert model.num_parameters() == table.num_parameters(ENCODER[kind])


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="no published model 'gpt-9'; known: llava"):
        table.published_config("gpt-9")
