"""Images and their tokens are what transformers' whole processors make of them.

But for two things. Sixteen bits of grey: Pillow's conversion, which theirs uses, clips them at 255
to white; we scale them. Files with ``do_convert_rgb=false``: theirs then fails on what is not RGB,
or gives images of 1, 2 or 4 channels; we convert.
"""

from __future__ import annotations

import functools
import json

import numpy as np
import odd_images
import pytest
from PIL import Image, ImageOps

from jaxvlm.config import Config
from jaxvlm.data import image_placeholders
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.image_placeholders import Lead
from jaxvlm.data.images import image_files, processor, tiling
from jaxvlm.data.sources.conversation_formats import Turn
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf.families import FAMILIES
from jaxvlm.hf.model_zoo import published_config
from jaxvlm.hf.pretrained import Source, image_format

pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")
convert_to_rgb = transformers.image_transforms.convert_to_rgb

SIDE, PATCH = 24, 4
TILES = {"size": {"height": SIDE, "width": SIDE}}
PINS = [[SIDE * h, SIDE * w] for h, w in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
CLIP = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
TEXT = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 512,
}
TEMPLATE = (
    "{% for m in messages %}<user>{% for p in m.content %}"
    "{{ 'IMAGE' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '' }}"
)
PAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 8,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
DROPPED = {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
"""Of CLIP's class token."""
COUNT = (SIDE // PATCH) ** 2
"""Of a tile's patches."""

# name -> ((image processor, its settings), config.json, (whole processor, its settings))
CASES = {
    "llava": (
        ("CLIP", CLIP),
        {"model_type": "llava", "vision_config": VISION},
        ("Llava", DROPPED | {"patch_size": PATCH}),
    ),
    "llava_next": (
        ("LlavaNext", CLIP | {"image_grid_pinpoints": PINS}),
        {"model_type": "llava_next", "vision_config": VISION, "image_grid_pinpoints": PINS},
        ("LlavaNext", DROPPED | {"patch_size": PATCH}),
    ),
    "llava_next_video": (
        ("LlavaNext", CLIP | {"image_grid_pinpoints": PINS}),
        {"model_type": "llava_next_video", "vision_config": VISION, "image_grid_pinpoints": PINS},
        ("LlavaNextVideo", DROPPED | {"patch_size": PATCH}),
    ),
    "llava_onevision": (
        ("LlavaOnevision", TILES | {"image_grid_pinpoints": [*PINS, [72, 72]]}),
        {"model_type": "llava_onevision", "vision_config": SIGLIP}
        | {"image_grid_pinpoints": [*PINS, [72, 72]], "vision_aspect_ratio": "anyres_max_3"},
        (
            "LlavaOnevision",
            {"num_image_tokens": COUNT, "vision_aspect_ratio": "anyres_max_3"}
            | {"vision_feature_select_strategy": "full"},
        ),
    ),
    "paligemma": (
        ("Siglip", TILES | {"do_convert_rgb": False, "image_seq_length": COUNT}),
        {"model_type": "paligemma", "vision_config": SIGLIP, "projection_dim": 8},
        ("PaliGemma", {}),
    ),
    "gemma3": (
        ("Gemma3", TILES),
        {"model_type": "gemma3", "vision_config": SIGLIP, "mm_tokens_per_image": 9},
        ("Gemma3", {"image_seq_length": 9}),
    ),
    "gemma3, pan and scan": (
        ("Gemma3", TILES | PAN),
        {"model_type": "gemma3", "vision_config": SIGLIP, "mm_tokens_per_image": 9},
        ("Gemma3", {"image_seq_length": 9}),
    ),
    "internvl": (
        ("GotOcr2", TILES | {"crop_to_patches": False, "max_patches": 6}),
        {"model_type": "internvl"}
        | {"vision_config": VISION | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}},
        ("InternVL", {"image_seq_length": COUNT // 4}),
    ),
    "idefics3": (
        ("Idefics3", {"size": {"longest_edge": 80}, "max_image_size": {"longest_edge": SIDE}}),
        {"model_type": "idefics3", "vision_config": VISION, "scale_factor": 2},
        ("Idefics3", {"image_seq_len": COUNT // 4}),
    ),
    "smolvlm": (
        ("SmolVLM", {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": SIDE}}),
        {"model_type": "smolvlm", "vision_config": VISION, "scale_factor": 2},
        # SmolVLM's own takes a package to read out the frames' times of videos.
        ("Idefics3", {"image_seq_len": COUNT // 4}),
    ),
    "smolvlm, not split": (
        (
            "SmolVLM",
            {"size": {"longest_edge": 30}, "max_image_size": {"longest_edge": SIDE}}
            | {"do_image_splitting": False},
        ),
        {"model_type": "smolvlm", "vision_config": VISION, "scale_factor": 2},
        ("Idefics3", {"image_seq_len": COUNT // 4}),
    ),
}
TOKENS = {
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "idefics3": {"image_token": "<image>", "fake": "<fake_token_around_image>"},
    "smolvlm": {"image_token": "<image>", "fake": "<fake_token_around_image>"},
}


@functools.cache
def made(name, root):
    """(our tokenizer, our images, mean and deviation, their whole processor) of a folder."""
    (image_kind, settings), config, (whole, given) = CASES[name]
    folder = root / name.replace(" ", "_")
    built = chat_tokenizer.build(
        ["here are some crops to help you see better\n\n what?"], "bpe", 400
    )
    named = TOKENS.get(config["model_type"], {"image_token": "<image>"})
    backend = built.backend
    backend.add_special_tokens([*dict.fromkeys(named.values())])
    image_token = named.get("context_image_token", named.get("image_token"))
    written = named.get("boi_token", image_token)
    special = {**built.special, "image_token": image_token, "bos_token": "<user>"}
    family = FAMILIES[config["model_type"]]
    template = family.chat_style(config).template or TEMPLATE.replace("IMAGE", written)
    chat_tokenizer.ChatTokenizer(backend, template, special).save(folder)
    getattr(transformers, image_kind + "ImageProcessorPil")(**settings).save_pretrained(folder)
    image_id = backend.token_to_id(image_token)
    config = {"text_config": TEXT, "image_token_id": image_id, **config}
    (folder / "config.json").write_text(json.dumps(config))

    ours = chat_tokenizer.load(folder, family.chat_style(config))
    source = Source(folder, folder, config, family)
    model = Config(model=family.config_from_hf(config))
    found = processor.load(folder)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        extra_special_tokens=named,
        bos_token=special["bos_token"],
    )
    cut = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    kind = getattr(transformers, whole + "Processor")

    class WithoutVideos(kind):
        """Their video processors take torchvision."""

        def check_argument_for_proper_class(self, name, value):
            return type(value)

    theirs = WithoutVideos(image_processor=cut, tokenizer=fast, **given)
    return ours, image_format(model, source, ours), found, theirs


def held_to_transformers(name, root, paths):
    """Pixels, tiles and ids of each image; returns how many tiles there were."""
    ours, wanted, found, theirs = made(name, root)
    style, tiles = ours.style, set()
    first = "paligemma" in name  # its images stand before all text
    turn = Turn("user", "<image>what? or" if first else "what <image>? or")
    text = ours.render([turn], add_generation_prompt=True)
    if first:
        text = turn.content  # its processor writes the rest
    elif style.written:
        text = text.replace(style.seen, style.written)
    for path in paths:
        pixels = image_files.load(path, wanted.prepare)
        span = wanted.of_file(path)
        assert len(span.starts) == len(pixels)
        tiles.add(len(pixels))
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            upright.load()
        if upright.mode.startswith("I"):
            upright = Image.fromarray((np.asarray(upright) // 257).astype(np.uint8))
        if not theirs.image_processor.do_convert_rgb:
            upright = Image.fromarray(convert_to_rgb(upright, return_numpy=True))
        given = {"images_kwargs": PAN} if "pan and scan" in name else {}
        out = theirs(text=[text], images=[upright], return_tensors="np", **given)
        values = np.asarray(out["pixel_values"])
        values = np.moveaxis(values.reshape(-1, *values.shape[-3:]), 1, -1)
        mine = (pixels / 255 - np.asarray(found.mean)) / np.asarray(found.std)
        assert values.shape == mine.shape, path
        np.testing.assert_allclose(mine, values, atol=1e-3, rtol=0, err_msg=path)
        ids = tokenize.prompt_ids([turn], ours, [Lead.of(span)])
        row = image_placeholders.expand(
            ids, ours.image_id, [span], image_placeholders.max_taps([span])
        )
        np.testing.assert_array_equal(row.ids, out["input_ids"][0], err_msg=path)
    return tiles


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("processors")


@pytest.fixture(scope="module")
def odd(root):
    (root / "odd").mkdir()
    return odd_images.write(root / "odd")


WHOLE = ("llava", "paligemma", "gemma3", "smolvlm, not split")


@pytest.mark.parametrize("name", CASES)
def test_fifty_odd_images(name, root, odd, shows):
    assert len(odd) == 50
    tiles = held_to_transformers(name, root, odd)
    if len(tiles) > 1:
        shows(CASES[name][1]["model_type"], "any resolution")
    assert tiles == {1} if name in WHOLE else len(tiles) > 1


def test_every_family_is_here():
    packed = {name for name in FAMILIES if name.startswith("qwen")}  # test_patches.py holds them
    assert {config["model_type"] for _, config, _ in CASES.values()} == FAMILIES.keys() - packed


def sizes():
    rng = np.random.default_rng(5)
    drawn = np.exp(rng.uniform(0, np.log(5000), (300, 2))).astype(int)
    return [(1, 900), (3000, 2), (384, 384), (364, 365), *map(tuple, drawn.tolist())]


@pytest.mark.parametrize("kind", ["Idefics3", "SmolVLM", "GotOcr2"])
def test_grids_of_published_sizes(kind):
    theirs = getattr(transformers, kind + "ImageProcessorPil")(
        **{"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
        if kind == "SmolVLM"
        else {}
    )
    asked = tiling.processor_overrides(theirs)
    grid = tiling.grid(theirs)
    for width, height in sizes():
        found = theirs.get_number_of_image_patches(height, width, asked)
        rows, columns = grid(width, height)
        if kind == "GotOcr2":
            assert rows * columns + 1 == found
        else:
            assert (rows, columns) == found[1:], (width, height)


@pytest.mark.parametrize("name", ["llava-next-mistral-7b", "llava-onevision-7b"])
def test_token_counts_of_published_sizes(name):
    config = published_config(name)
    kind = {"llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision"}[config["model_type"]]
    side, patch = (config["vision_config"][n] for n in ("image_size", "patch_size"))
    pins = config["image_grid_pinpoints"]
    cut = getattr(transformers, kind + "ImageProcessorPil")(
        size={"height": side, "width": side}, crop_size=None, image_grid_pinpoints=pins
    )
    theirs = object.__new__(getattr(transformers, kind + "Processor"))
    theirs.image_processor = cut
    theirs.patch_size, theirs.num_additional_image_tokens = patch, 0
    theirs.num_image_tokens, theirs.vision_aspect_ratio = (side // patch) ** 2, "anyres_max_9"
    family = FAMILIES[config["model_type"]]
    of = family.span(family.config_from_hf(config), config, list, tiling.grid(cut))
    for width, height in sizes():
        span = of(width, height)
        assert len(span.ids) == theirs._get_number_of_features(height, width, side, side)
        assert span.sources.feature.max() < span.sources.tiles * span.sources.per_tile
        if span.sources.weight is not None:
            real = span.sources.feature[:, 0] >= 0
            np.testing.assert_allclose(span.sources.weight[real].sum(-1), 1, rtol=1e-6)
