"""Vision-language models of transformers, their batches, and ours with their weights."""

from __future__ import annotations

import functools
import os
import re

import jax
import numpy as np
import pytest
from builders import loss_and_gradient
from text_cases import VOCAB

from jaxvlm.config import MeshConfig
from jaxvlm.data import image_placeholders
from jaxvlm.hf.families import FAMILIES
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Batch, Span

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

select_best_resolution = transformers.image_processing_utils.select_best_resolution

DRAWS = int(os.environ.get("JAXVLM_DRAWS", "1"))
IMAGE, LENGTH = 95, 32
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
# Gemma 3's window is shorter than a row, so that images are seen across its border.
GEMMA3 = TEXT | {
    "model_type": "gemma3_text",
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
}
CASES = {
    "paligemma": (
        "PaliGemma",
        {"vision_config": SIGLIP, "projection_dim": 32, "image_token_index": IMAGE}
        | {"text_config": TEXT | {"model_type": "gemma"}},
    ),
    "paligemma2": (
        "PaliGemma",
        {"vision_config": SIGLIP, "projection_dim": 32, "image_token_index": IMAGE}
        | {
            "text_config": TEXT
            | {"model_type": "gemma2", "sliding_window": 9, "query_pre_attn_scalar": 16}
        },
    ),
    "gemma3": (
        "Gemma3",
        {"vision_config": SIGLIP, "text_config": GEMMA3, "mm_tokens_per_image": 4}
        | {"image_token_index": IMAGE, "boi_token_index": 93, "eoi_token_index": 94},
    ),
    "internvl": (
        "InternVL",
        {
            "vision_config": {
                "model_type": "internvl_vision",
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "image_size": [16, 16],
                "patch_size": [4, 4],
                "attention_bias": True,
            },
            "text_config": {k: v for k, v in TEXT.items() if k != "head_dim"}
            | {"model_type": "qwen2"},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
            "tie_word_embeddings": False,
        },
    ),
    "idefics3": (
        "Idefics3",
        {
            "vision_config": SIGLIP | {"model_type": "idefics3_vision"},
            "text_config": TEXT | {"model_type": "llama", "pad_token_id": 0},
            "scale_factor": 2,
            "image_token_id": IMAGE,
        },
    ),
    "smolvlm": (
        "SmolVLM",
        {
            "vision_config": SIGLIP | {"model_type": "smolvlm_vision"},
            "text_config": TEXT | {"model_type": "llama", "pad_token_id": 0},
            "scale_factor": 2,
            "tie_word_embeddings": True,
            "image_token_id": IMAGE,
        },
    ),
    "llava-mistral": (
        "Llava",
        {
            "vision_config": SIGLIP | {"model_type": "clip_vision_model"},
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": 7},
            "image_token_index": IMAGE,
            "vision_feature_layer": [-1, 1],
        },
    ),
    "llava-next": (
        "LlavaNext",
        {
            "vision_config": SIGLIP | {"model_type": "clip_vision_model"},
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]],
        },
    ),
    "llava-next-video": (
        "LlavaNextVideo",
        {
            "vision_config": SIGLIP | {"model_type": "clip_vision_model"},
            "text_config": TEXT | {"model_type": "llama"},
            "image_token_index": IMAGE,
            "video_token_index": 94,
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]],
        },
    ),
    # A bound so low that most images' features are resampled.
    "llava-onevision": (
        "LlavaOnevision",
        {
            "vision_config": SIGLIP,
            "text_config": {k: v for k, v in TEXT.items() if k != "head_dim"}
            | {"model_type": "qwen2"},
            "image_token_index": IMAGE,
            "video_token_index": 94,
            "vision_aspect_ratio": "anyres_max_2",
            "image_grid_pinpoints": [[16 * h, 16 * w] for h in (1, 2, 3) for w in (1, 2, 3)],
        },
    ),
}


def fields_of(name):
    """A copy of a case's fields of config.json."""
    fields = {k: dict(v) if isinstance(v, dict) else v for k, v in CASES[name][1].items()}
    if fields["vision_config"]["model_type"] != "siglip_vision_model":
        fields["vision_config"].pop("vision_use_head", None)
    return fields


@functools.cache
def oracle(name):
    """(torch model, our model, our parameters)."""
    kind, fields = CASES[name][0], fields_of(name)
    config = getattr(transformers, kind + "Config")(**fields)
    torch.manual_seed(3)
    theirs = getattr(transformers, kind + "ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():  # biases and norms are born 0 and 1, which would hide mistakes
        for parameter in theirs.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter += 0.2 * torch.randn_like(parameter)
    family = FAMILIES[config.model_type]
    ours = build_model(
        family.config_from_hf(config.to_dict()),
        make_mesh(MeshConfig(data=1), jax.devices()[:1]),
    )
    named = {n: p.detach().numpy() for n, p in theirs.named_parameters()}
    params = family.weights(ours.config).load(named)
    assert {path: x.shape for path, x in params.items()} == {
        path: x.shape for path, x in ours.shapes.items()
    }
    return theirs, ours, params


def split(text):
    """Ids of a text: the image's token, and one for all between two of them."""
    return [IMAGE if part == "<image>" else 7 for part in re.split("(<image>)", text) if part]


def span_of(name, config):
    """(width, height) -> span, where tiles are cut as LLaVA-NeXT's processor does."""
    fields = CASES[name][1]
    side = config.vision.image_size

    def grid(width, height):
        if "image_grid_pinpoints" not in fields:
            return 0, 0
        best = select_best_resolution((height, width), fields["image_grid_pinpoints"])
        return best[0] // side, best[1] // side

    kind = getattr(transformers, CASES[name][0] + "Config").model_type
    return FAMILIES[kind].span(config, {"model_type": kind, **fields}, split, grid)


def make_batch(name, rows, side="right", seed=0):
    """Rows are lists of text lengths, of images' sizes and of videos' spans; a row's last third is
    trained."""
    config = oracle(name)[1].config
    rng = np.random.default_rng(seed)
    of = span_of(name, config)
    found = [
        [part if isinstance(part, Span) else of(*part) for part in row if isinstance(part, tuple)]
        for row in rows
    ]
    taps = image_placeholders.max_taps(span for row in found for span in row)
    laid = []
    for row, own in zip(rows, found, strict=True):
        ids = [[IMAGE] if isinstance(n, tuple) else rng.integers(3, 90, n) for n in row]
        laid.append(image_placeholders.expand(np.concatenate(ids), IMAGE, own, taps))
    B, size, most = len(rows), config.vision.image_size, max(len(row.starts) for row in laid)
    T = LENGTH if most <= 2 else -(-max(len(row.ids) for row in laid) // LENGTH) * LENGTH
    tokens, segment = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    weight, group = np.zeros((B, T), np.float32), np.zeros((B, T), np.int32)
    positions = np.zeros((B, 1, T), np.int32)
    start = np.full((B, most), -1, np.int32)
    pixels = np.zeros((B, most, size, size, 3), np.uint8)
    source, share = np.full((B, T, taps), -1, np.int32), np.zeros((B, T, taps), np.float32)
    for b, row in enumerate(laid):
        n, count = len(row.ids), len(row.starts)
        first = 0 if side == "right" else T - n
        here = slice(first, first + n)
        tokens[b, here], segment[b, here], positions[b, 0, here] = row.ids, 1, row.positions[0]
        weight[b, first + n - n // 3 : first + n] = 1
        if config.decoder.visual_mask == "prompt":
            group[b, first : first + n - n // 3] = 1
        if config.decoder.visual_mask == "prefix":
            group[b, here] = row.tile
        start[b, :count] = first + np.asarray(row.starts)
        pixels[b, :count] = rng.integers(0, 256, (count, size, size, 3))
        if taps:
            source[b, here], share[b, here] = row.source, row.weight
    both_ways = None if config.decoder.visual_mask == "causal" else group
    return Batch(
        tokens,
        weight,
        positions,
        segment,
        bidirectional=both_ways,
        pixels=pixels,
        image_start=start,
        image_source=source if taps else None,
        image_weight=share if taps > 1 else None,
        example_id=np.arange(B, dtype=np.int32),
    )


def torch_inputs(batch, name, rows, prompt=False):
    kind, config = CASES[name][0], oracle(name)[1].config
    used = batch.image_start >= 0
    pixels = batch.pixels.astype(np.float32) / 255
    pixels = (pixels - np.float32(config.vision.pixel_mean)) / np.float32(config.vision.pixel_std)
    pixels = np.moveaxis(pixels, -1, 2)
    if kind in ("Idefics3", "SmolVLM"):  # zeros are no images to them
        given = torch.from_numpy(np.where(used[..., None, None, None], pixels, 0).copy())
    else:
        given = torch.from_numpy(pixels[used].copy())
    inputs = {
        "input_ids": torch.from_numpy(batch.tokens).long(),
        "attention_mask": torch.from_numpy((batch.segment > 0).astype(np.int64)),
        "position_ids": torch.from_numpy(batch.positions[:, 0]).long(),
        "pixel_values": given,
    }
    if "image_grid_pinpoints" in CASES[name][1]:
        sizes = [part[::-1] for row in rows for part in row if type(part) is tuple]
        inputs["image_sizes"] = torch.tensor(sizes)
    if kind == "PaliGemma":
        suffix = np.zeros_like(batch.tokens) if prompt else (batch.bidirectional == 0)
        inputs["token_type_ids"] = torch.from_numpy(suffix.astype(np.int64))
    if kind == "Gemma3":
        inputs["token_type_ids"] = torch.from_numpy((batch.tokens == IMAGE).astype(np.int64))
    return inputs


ONE = (16, 16)
ROWS = {
    "one image": ([[ONE, 5], [3, ONE, 9]], "right"),
    "several images, a row of text, padding left": ([[1, ONE, 9], [12]], "left"),
}
TWO = ([[2, ONE, 3, ONE, 6], [1, ONE, 4]], "left")
ANYRES = {
    "one image": ([[(32, 14), 5], [3, (9, 50), 9]], "right"),
    "several images, a row of text, padding left": (
        [[1, (60, 55), 2, (300, 20), 12], [12], [(31, 40), 4]],
        "left",
    ),
}


def rows_of(name, rows):
    if "image_grid_pinpoints" in CASES[name][1]:
        return ANYRES[rows]
    # An image of 16 tokens leaves no room for a second one.
    few = num_visual_tokens(oracle(name)[1].config) <= 4
    return TWO if rows != "one image" and few else ROWS[rows]


@functools.cache
def loss_and_grad(name):
    return loss_and_gradient(oracle(name)[1])
