"""Towers of published dims have as many parameters as transformers' have; nothing is allocated."""

from __future__ import annotations

import importlib
import math

import jax
import pytest
from flax import nnx

from jaxvlm.config import MeshConfig
from jaxvlm.hf.families import clip, internvit, qwen_vision, siglip
from jaxvlm.hf.families.config_reader import FeatureLayers
from jaxvlm.nn.param import Init, split
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
pytest.importorskip("transformers", reason="the oracle")

from towers import Towers  # noqa: E402  # after the oracle is known to be there

SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
SO400M_384 = {**SO400M, "patch_size": 14, "image_size": 384}
QWEN3_2B = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [5, 11, 17],
}
CLIP_L = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 336,
}
PUBLISHED = {
    "CLIP-L/14": ("clip", "CLIPVisionConfig", "CLIPVisionModel", CLIP_L),
    "SigLIP-So400m/14": ("siglip", "SiglipVisionConfig", "SiglipVisionModel", SO400M_384),
    "SigLIP2-So400m": ("siglip2", "Siglip2VisionConfig", "Siglip2VisionModel", SO400M),
    "InternViT-300M": (
        "internvl",
        "InternVLVisionConfig",
        "InternVLVisionModel",
        {"attention_bias": True},
    ),
    "Qwen2-VL-2B": (
        "qwen2_vl",
        "Qwen2VLVisionConfig",
        "Qwen2VisionTransformerPretrainedModel",
        {"hidden_size": 1536},
    ),
    "Qwen2.5-VL-7B": (
        "qwen2_5_vl",
        "Qwen2_5_VLVisionConfig",
        "Qwen2_5_VisionTransformerPretrainedModel",
        {"hidden_size": 1280, "out_hidden_size": 3584},
    ),
    "Qwen3-VL-2B": ("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel", QWEN3_2B),
    "Qwen3-VL-8B": (
        "qwen3_vl",
        "Qwen3VLVisionConfig",
        "Qwen3VLVisionModel",
        {"out_hidden_size": 4096},
    ),
}
"""Name -> (family, config class, model class, dims)."""


def theirs(family, config, model, dims):
    """(Fields, count of parameters)."""
    folder = f"transformers.models.{family}"
    configs = importlib.import_module(f"{folder}.configuration_{family}")
    models = importlib.import_module(f"{folder}.modeling_{family}")
    fields = getattr(configs, config)(**dims)
    with torch.device("meta"):
        made = getattr(models, model)(fields)
    return fields.to_dict(), sum(p.numel() for p in made.parameters())


def ours(group):
    """Our config of tower and connector, and the decoder's width."""
    kind = group["model_type"].removesuffix("_vision")
    if kind.startswith("qwen"):
        width = group.get("out_hidden_size", group["hidden_size"])
        return (*qwen_vision.towers_from_hf(group, kind, width, ""), width)
    if kind == "internvl":
        return internvit.vision_from_hf(group, FeatureLayers(-1), ""), None, 0
    tower = clip if kind.startswith("clip") else siglip
    return tower.vision_from_hf(group, FeatureLayers(), ""), None, 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_towers_have_their_size(name):
    group, expected = theirs(*PUBLISHED[name])
    axes = Axes(make_mesh(MeshConfig(data=1), jax.devices()[:1]))

    def draw(key):
        return split(Towers(Init(nnx.Rngs(params=key)), axes, *ours(group)))[1]

    shapes = jax.eval_shape(draw, jax.random.key(0))
    assert sum(math.prod(x.shape) for x in shapes.values()) == expected
