"""Every field of Hugging Face's vision configs is read or refused."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from PIL import Image

from jaxvlm.config import Config, ConfigError, DataConfig, ModelConfig, VisionConfig
from jaxvlm.data.images import image_files, processor
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf import pretrained, run_processor
from jaxvlm.hf.families import FAMILIES, clip, connectors, internvit, qwen_vision, siglip
from jaxvlm.hf.families.config_reader import METADATA, FeatureLayers, rope_base, square
from tests.bad_input import folders

transformers = pytest.importorskip("transformers", reason="the oracle")


def configs():
    """Tower -> its fields as transformers writes them, and what reads them."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    def simple(tower, take=FeatureLayers()):  # noqa: B008  # a constant
        return lambda group: tower.vision_from_hf(group, take, "vision_config.")

    def of(family):
        return lambda group: qwen_vision.towers_from_hf(group, family, 3584, "vision_config.")

    return {
        "clip": (transformers.CLIPVisionConfig(), simple(clip, FeatureLayers(-2))),
        "siglip": (transformers.SiglipVisionConfig(), simple(siglip)),
        "siglip2": (transformers.Siglip2VisionConfig(), simple(siglip)),
        "idefics3": (transformers.Idefics3Config().vision_config, simple(siglip)),
        "smolvlm": (transformers.SmolVLMVisionConfig(), simple(siglip)),
        "internvl": (transformers.InternVLVisionConfig(), simple(internvit, FeatureLayers(-1))),
        "qwen2_vl": (Qwen2VLVisionConfig(), of("qwen2_vl")),
        "qwen2_5_vl": (Qwen2_5_VLVisionConfig(), of("qwen2_5_vl")),
        "qwen3_vl": (Qwen3VLVisionConfig(), of("qwen3_vl")),
    }


def changed(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "relu" if "elu" in value or "silu" in value else "another"
    if isinstance(value, dict):
        return {**value, "rope_theta": 5e3}
    if isinstance(value, list | tuple):
        return [2 * n for n in value]
    return 4 * value if isinstance(value, int) else value + 0.25


@pytest.mark.parametrize("name", configs())
def test_no_field_is_overlooked(name):
    """A field that is changed changes our settings, or is refused by name."""
    config, read = configs()[name]
    group = config.to_dict()
    expected = read(group)
    kept = METADATA | {"tokens_per_second"}  # the decoder's
    for field, value in group.items():
        if field in kept:
            continue
        try:
            assert read({**group, field: changed(value)}) != expected, field
        except ConfigError as error:
            assert field in str(error), field
    with pytest.raises(ConfigError, match="a_new_field"):
        read({**group, "a_new_field": 1})


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda: connectors.shuffled_mlp(1 / 3, "gelu"), "downsample_ratio"),
        (lambda: connectors.pooled_linear(VisionConfig(), 7), "mm_tokens_per_image=7"),
        (lambda: FeatureLayers([-1, 9]).layers(3), "vision_feature_layer"),
        (lambda: FeatureLayers("last").layers(3), "vision_feature_layer"),
        (lambda: square([2, 3], "image_size"), "image_size"),
        (lambda: rope_base({"rope_type": "linear"}, "rope_parameters"), "rope_parameters"),
    ],
)
def test_values_that_it_cannot_do_are_named(read, says):
    with pytest.raises(ConfigError, match=says):
        read()


def test_published_towers_are_read():
    """Old files hold notes that nothing reads; their defaults are transformers'."""
    notes = {"in_chans": 3, "spatial_patch_size": 14, "tokens_per_second": 2}
    vision, connector = qwen_vision.towers_from_hf(
        {"model_type": "qwen2_5_vl", "hidden_size": 1280, "out_hidden_size": 2048, **notes},
        "qwen2_5_vl",
        2048,
        "vision_config.",
    )
    assert (vision.window, vision.full_layers, connector.hidden) == (112, (7, 15, 23, 31), 5120)
    group = {"image_size": 364, "patch_size": 14, "model_type": "idefics3", "hidden_size": 1152}
    tower = siglip.vision_from_hf(group, FeatureLayers(), "vision_config.")
    assert (tower.image_size, tower.num_heads) == (364, 16)
    # The tower of a decoder with experts is the same.
    moe = transformers.Qwen3VLMoeConfig().vision_config
    plain = transformers.Qwen3VLConfig().vision_config
    assert (
        qwen_vision.towers_from_hf(moe.to_dict(), "qwen3_vl", 3584, "")[1]
        == qwen_vision.towers_from_hf(plain.to_dict(), "qwen3_vl", 3584, "")[1]
    )
    with pytest.raises(ConfigError, match="decoder's 8"):
        qwen_vision.towers_from_hf({}, "qwen2_vl", 8, "vision_config.")


def test_a_folders_mean_and_deviation_are_the_models(tmp_path, monkeypatch):
    """Those of the image processor's file, which differ from the defaults, and from each other."""
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.6, 0.7)
    side = folders.LLAVA["vision_config"]["image_size"]
    prepare = image_files.squares(side)
    found = processor.Processor(prepare, side, None, mean, std)
    monkeypatch.setattr(processor, "load", lambda *given: found)
    source = pretrained.Source(tmp_path, tmp_path, folders.LLAVA, FAMILIES["llava"])
    monkeypatch.setattr(pretrained, "_shapes", lambda source: {})
    vision = pretrained.with_source(Config(), source).model.vision
    assert (vision.pixel_mean, vision.pixel_std) == (mean, std)


@pytest.mark.parametrize("resize", ["squash", "pad", "crop"])
@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_images_are_resized_as_a_run_says(resize, from_checkpoint, monkeypatch):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 48, 3), np.uint8))
    vision = VisionConfig(image_size=16, patch_size=8)
    config = Config(data=DataConfig(resize=resize), model=ModelConfig(vision=vision))
    words = chat_tokenizer.build(["red"])
    source = None
    if from_checkpoint:
        source = pretrained.Source(pathlib.Path(), pathlib.Path(), folders.LLAVA, FAMILIES["llava"])
    found = run_processor.image_format_of(config, source, words).prepare
    ways = {mode: image_files.squares(16, mode) for mode in ("squash", "pad", "crop")}
    pixels = {mode: way.convert(image) for mode, way in ways.items()}
    same = [mode for mode in ways if np.array_equal(found.convert(image), pixels[mode])]
    assert same == [resize]
