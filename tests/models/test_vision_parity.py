"""transformers' vision towers and projectors in torch are the oracle of ours."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

from towers import Case, compare, packed, shaken  # noqa: E402  # once the oracle is known to be there

from jaxvlm.hf.families import clip, connectors, internvit, qwen_vision, siglip  # noqa: E402
from jaxvlm.hf.families.config_reader import FeatureLayers  # noqa: E402
from jaxvlm.hf.families.name_map import NameMap  # noqa: E402

WIDTH = 20
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
}
ROWS = [[(1, 4, 6), (1, 2, 8), (3, 4, 4)], [(1, 6, 4), (2, 2, 6)]]
"""Grids of the images in each row; the third is a video of three frames."""
LENGTH = 112
"""Patches of a row, padding and all."""


def pixels(side, seed=0):
    return np.random.default_rng(seed).normal(size=(2, side, side, 3)).astype(np.float32)


def nchw(x):
    return torch.from_numpy(x.transpose(0, 3, 1, 2).copy())


def names(vision, entries, connector=None):
    """The whole map of a tower and, perhaps, its connector."""
    sizes = clip.dims(vision)
    if connector is not None:
        sizes |= connectors.dims(vision, connector, WIDTH)
    return NameMap(entries, sizes, {"vision": vision.depth}, _ALIASES, ("position_ids",))


_ALIASES = (("^model\\.", ""),)


def towered(model, vision, connector, connector_entries, tower=siglip, model_name="vision_tower."):
    """The case of a VLM of transformers with images of one size."""
    entries = (*tower.entries(model_name, vision), *connector_entries)
    x = pixels(vision.image_size)

    def run(model):
        out = model.get_image_features(nchw(x)).pooler_output
        return (torch.stack(out) if isinstance(out, list | tuple) else out).flatten(0, 1)[None]

    weights = names(vision, entries, connector)
    return Case(shaken(model), run, vision, connector, WIDTH, weights, x)


def siglip_config(**fields):
    base = {
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 24,
        "patch_size": 4,
        "vision_use_head": False,
    }
    return transformers.SiglipVisionConfig(**base | fields)


def hf(config):
    return config.to_dict()


def paligemma():
    config = transformers.PaliGemmaConfig(
        vision_config=siglip_config(hidden_act="quick_gelu", layer_norm_eps=1e-3, image_size=27),
        text_config=transformers.GemmaConfig(**TEXT),
        projection_dim=WIDTH,
    )
    vision = siglip.vision_from_hf(hf(config.vision_config), FeatureLayers(), "vision_config.")
    entries = connectors.linear_entries("")
    model = transformers.PaliGemmaModel(config)
    return towered(model, vision, connectors.linear(), entries)


def gemma3():
    config = transformers.Gemma3Config(
        vision_config=siglip_config(image_size=[24, 24], num_attention_heads=2),
        text_config=transformers.Gemma3TextConfig(**TEXT),
        mm_tokens_per_image=9,
    )
    vision = siglip.vision_from_hf(hf(config.vision_config), FeatureLayers(), "vision_config.")
    config.vision_config.image_size = 24  # their projector takes no list
    connector = connectors.pooled_linear(vision, config.mm_tokens_per_image)
    model = transformers.Gemma3Model(config)
    return towered(model, vision, connector, connectors.pooled_linear_entries(""))


def llava(vision_config, tower, layer, strategy, bias):
    config = transformers.LlavaConfig(
        vision_config=vision_config,
        text_config=transformers.LlamaConfig(**TEXT),
        vision_feature_layer=layer,
        vision_feature_select_strategy=strategy,
        multimodal_projector_bias=bias,
        projector_hidden_act="gelu_pytorch_tanh",
    )
    take = FeatureLayers(layer, strategy == "full")
    vision = tower.vision_from_hf(hf(config.vision_config), take, "vision_config.")
    connector = connectors.mlp("gelu_tanh", bias)
    model = transformers.LlavaModel(config)
    return towered(model, vision, connector, connectors.mlp_entries("", connector), tower)


def clip_config():
    return transformers.CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=18,
        patch_size=4,
        projection_dim=7,
    )


def idefics3(config, model, **fields):
    base = {"hidden_size": 24, "intermediate_size": 36, "num_attention_heads": 3}
    base |= {"num_hidden_layers": 2, "image_size": 24, "patch_size": 4}
    config = config(
        vision_config=base | fields, text_config={"model_type": "llama", **TEXT}, scale_factor=3
    )
    vision = siglip.vision_from_hf(hf(config.vision_config), FeatureLayers(), "vision_config.")
    connector = connectors.shuffled_linear(config.scale_factor)
    entries = connectors.shuffled_linear_entries("")
    case = towered(model(config), vision, connector, entries, model_name="vision_model.")

    def run(model):
        return torch.cat(list(model.get_image_features(nchw(case.x)[None]).pooler_output))[None]

    return case._replace(torch_run=run)


def internvl(layer, ratio, **fields):
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=3,
            patch_size=(4, 4),
            **{"image_size": 24} | fields,
        ),
        text_config=transformers.Qwen2Config(**TEXT),
        vision_feature_layer=layer,
        downsample_ratio=ratio,
        projector_hidden_act="relu",
    )
    vision = internvit.vision_from_hf(
        hf(config.vision_config), FeatureLayers(layer), "vision_config."
    )
    connector = connectors.shuffled_mlp(ratio, "relu")
    entries = connectors.mlp_entries("", connector)
    return towered(transformers.InternVLModel(config), vision, connector, entries, internvit)


def qwen(family, config, model):
    merge = config.spatial_merge_size
    vision, connector = qwen_vision.towers_from_hf(hf(config), family, WIDTH, "vision_config.")
    grids = [[(t, h // 2 * merge, w // 2 * merge) for t, h, w in row] for row in ROWS]
    x, grid, flat, thw = packed(grids, LENGTH * merge**2 // 4, 3 * vision.frames * 4 * 4)
    entries = qwen_vision.entries(family, "", vision, connector.deepstack_levels)
    depths = {"vision": vision.depth, "connector": connector.deepstack_levels}
    weights = NameMap(entries, qwen_vision.dims(vision, WIDTH), depths)

    def run(model):
        out = model(flat, thw)
        return torch.stack([out.pooler_output, *getattr(out, "deepstack_features", [])])

    return Case(shaken(model(config)), run, vision, connector, WIDTH, weights, x, grid, merge)


QWEN = {"num_heads": 3, "patch_size": 4, "initializer_range": 0.2}


def qwen2(**fields):
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    base = {"depth": 2, "embed_dim": 24, "hidden_size": WIDTH, "mlp_ratio": 3}
    config = Qwen2VLVisionConfig(**QWEN | base | fields)
    return qwen("qwen2_vl", config, Qwen2VisionTransformerPretrainedModel)


def qwen2_5(**fields):
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )

    base = {"depth": 4, "hidden_size": 24, "intermediate_size": 30, "out_hidden_size": WIDTH}
    base |= {"window_size": 16, "fullatt_block_indexes": [1, 3]}
    config = Qwen2_5_VLVisionConfig(**QWEN | base | fields)
    return qwen("qwen2_5_vl", config, Qwen2_5_VisionTransformerPretrainedModel)


def qwen3(**fields):
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    base = {"depth": 4, "hidden_size": 24, "intermediate_size": 30, "out_hidden_size": WIDTH}
    base |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    config = Qwen3VLVisionConfig(**QWEN | base | fields)
    return qwen("qwen3_vl", config, Qwen3VLVisionModel)


def siglip2(grids, **fields):
    """One image a row for torch; ours holds several."""
    base = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
    base |= {"num_attention_heads": 3, "patch_size": 4, "vision_use_head": False}
    config = transformers.Siglip2VisionConfig(**base | fields)
    vision = siglip.vision_from_hf(hf(config), FeatureLayers(), "vision_config.")
    x, grid, flat, thw = packed(grids, LENGTH, 3 * 4 * 4)
    count = thw.prod(-1).tolist()
    alone = torch.zeros(len(count), max(count), flat.shape[1])
    mask = torch.zeros(alone.shape[:2], dtype=torch.long)
    for row, seen, image in zip(alone, mask, flat.split(count), strict=True):
        row[: len(image)], seen[: len(image)] = image, 1

    def run(model):
        out = model(alone, mask, thw[:, 1:])
        if vision.pool != "none":
            return out.pooler_output[None]
        out = out.last_hidden_state
        return torch.cat([row[:n] for row, n in zip(out, count, strict=True)])[None]

    model = shaken(transformers.Siglip2VisionModel(config))
    return Case(model, run, vision, None, 0, names(vision, siglip.entries("", vision)), x, grid)


def pooled(vision_config, model, tower):
    vision = tower.vision_from_hf(hf(vision_config), FeatureLayers(), "vision_config.")
    vision = dataclasses.replace(vision, pool="class") if tower is clip else vision
    x, weights = pixels(vision.image_size), names(vision, tower.entries("", vision))

    def run(model):
        return model(nchw(x)).pooler_output[None]

    return Case(shaken(model(vision_config)), run, vision, None, 0, weights, x)


IDEFICS3 = (transformers.Idefics3Config, transformers.Idefics3Model)
SMOLVLM = (transformers.SmolVLMConfig, transformers.SmolVLMModel)
CASES = {
    "siglip, linear (PaliGemma)": paligemma,
    "siglip, mean pool (Gemma 3)": gemma3,
    "siglip, two layers (LLaVA)": lambda: llava(siglip_config(), siglip, [1, -1], "full", False),
    "clip, two layers": lambda: llava(clip_config(), clip, [-2, 0], "default", True),
    "clip, class token kept": lambda: llava(clip_config(), clip, -2, "full", False),
    "Idefics3": lambda: idefics3(*IDEFICS3),
    "SmolVLM": lambda: idefics3(*SMOLVLM, patch_size=2, hidden_act="gelu", layer_norm_eps=1e-3),
    "InternVL": lambda: internvl(-1, 0.5, attention_bias=True),
    "InternVL, rms, q/k norm": lambda: internvl(
        2, 0.25, image_size=32, norm_type="rms_norm", use_qk_norm=True, layer_norm_eps=1e-3
    ),
    "InternVL, no positions, last norm": lambda: internvl(
        -1, 0.5, use_absolute_position_embeddings=False, use_mean_pooling=False
    ),
    "Qwen2-VL": qwen2,
    "Qwen2-VL, merge 3, one frame": lambda: qwen2(
        spatial_merge_size=3, temporal_patch_size=1, hidden_act="gelu", depth=3
    ),
    "Qwen2.5-VL": qwen2_5,
    "Qwen2.5-VL, other windows": lambda: qwen2_5(
        window_size=28, fullatt_block_indexes=[0, 7], num_heads=6, depth=3
    ),
    "Qwen3-VL": qwen3,
    "Qwen3-VL, one level": lambda: qwen3(
        deepstack_visual_indexes=[1], num_position_embeddings=4, depth=2, hidden_act="silu"
    ),
    "SigLIP 2": lambda: siglip2([[(1, 4, 6), (1, 2, 8)], [(1, 7, 3)]], num_patches=16),
    "siglip, pooled": lambda: pooled(
        siglip_config(vision_use_head=True), transformers.SiglipVisionModel, siglip
    ),
    "clip, pooled": lambda: pooled(clip_config(), transformers.CLIPVisionModel, clip),
    "SigLIP 2, pooled": lambda: siglip2(
        [[(1, 4, 6), (1, 2, 8)], [(1, 7, 3)]], num_patches=16, vision_use_head=True
    ),
    "SigLIP 2, smaller than its table": lambda: siglip2(
        [[(1, 3, 4), (1, 5, 2)], [(1, 1, 9)]], num_patches=49, hidden_act="gelu"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_gradients_are_torchs(name, record_property):
    error, gradient = compare(CASES[name]())
    record_property("relative L2", error)
    record_property("worst gradient", gradient)
    print(f"{name}: tokens {error:.1e}, worst gradient {gradient:.1e}")
