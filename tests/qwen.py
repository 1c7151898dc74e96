"""Small Qwen-VLs of every generation, in torch and jaxvlm, and batches of images of any size."""

from __future__ import annotations

import copy
import functools

import jax
import numpy as np
import torch
import transformers
from towers import shaken

from jaxvlm.config import MeshConfig
from jaxvlm.data import image_placeholders
from jaxvlm.data.images import resize, tiling
from jaxvlm.hf.families import qwen_vl
from jaxvlm.models.vit import per_value
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Batch

IMAGE, VIDEO, VOCAB, LENGTH, PATCHES = 95, 94, 96, 26, 56
PIXELS = (64, 1024)
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VISION = {"num_heads": 3, "patch_size": 4}
VISION2 = VISION | {"depth": 2, "embed_dim": 24, "mlp_ratio": 2, "hidden_size": 32}
VISION25 = VISION | {"depth": 3, "hidden_size": 24, "intermediate_size": 30}
VISION25 |= {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}
VISION25 |= {"tokens_per_second": 3}
VISION3 = VISION | {"depth": 3, "hidden_size": 24, "intermediate_size": 30}
VISION3 |= {"out_hidden_size": 32, "num_position_embeddings": 16}
VISION3 |= {"deepstack_visual_indexes": [0, 1]}
TEXT3 = TEXT | {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}}
MOE = TEXT3 | {"num_hidden_layers": 2}
MOE |= {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
CASES = {
    "qwen2-vl": (
        "Qwen2VL",
        {"vision_config": VISION2, "text_config": TEXT | {"rope_parameters": MROPE}},
    ),
    "qwen2-vl, tied, yarn": (
        "Qwen2VL",
        {
            "vision_config": VISION2 | {"depth": 1, "hidden_act": "gelu", "num_heads": 2},
            "text_config": TEXT
            | {"num_attention_heads": 2, "num_key_value_heads": 2}
            | {"rope_parameters": MROPE | YARN | {"mrope_section": [2, 3, 3]}},
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {"vision_config": VISION25, "text_config": TEXT | {"rope_parameters": MROPE}},
    ),
    "qwen2.5-vl, tied, other windows": (
        "Qwen2_5_VL",
        {
            "vision_config": VISION25
            | {"fullatt_block_indexes": [0, 3], "window_size": 8, "hidden_act": "gelu"},
            "text_config": TEXT
            | {"rope_parameters": MROPE | {"rope_type": "linear", "factor": 2.0}}
            | {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-vl": ("Qwen3VL", {"vision_config": VISION3, "text_config": TEXT3}),
    "qwen3-vl, tied, biases": (
        "Qwen3VL",
        {
            "vision_config": VISION3
            | {"deepstack_visual_indexes": [1], "num_position_embeddings": 49},
            "text_config": TEXT3
            | {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 4}
            | {"rope_parameters": TEXT3["rope_parameters"] | YARN | {"mrope_section": [4, 2, 2]}},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {
            "vision_config": VISION3 | {"deepstack_visual_indexes": [1], "depth": 2},
            "text_config": MOE,
        },
    ),
    "qwen3-vl-moe, tied, biases": (
        "Qwen3VLMoe",
        {
            "vision_config": VISION3 | {"deepstack_visual_indexes": [], "depth": 2},
            "text_config": MOE
            | {"num_experts": 4, "num_experts_per_tok": 3, "head_dim": None}
            # As the published files have it, though no one reads it there.
            | {"attention_bias": True, "tie_word_embeddings": False},
            "tie_word_embeddings": True,
        },
    ),
}
KINDS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")
PLAIN = ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"]


@functools.cache
def hf_config(name):
    kind, fields = CASES[name]
    config = getattr(transformers, kind + "Config")(
        **copy.deepcopy(fields), image_token_id=IMAGE, video_token_id=VIDEO
    )
    config._experts_implementation = "eager"
    return config


@functools.cache
def oracle(name):
    """(torch model, our model, our parameters)."""
    config = hf_config(name)
    torch.manual_seed(3)
    theirs = shaken(getattr(transformers, CASES[name][0] + "ForConditionalGeneration")(config))
    ours = build_model(
        qwen_vl.config_from_hf(config.to_dict()),
        make_mesh(MeshConfig(data=1), jax.devices()[:1]),
    )
    params = qwen_vl.weights(ours.config).load(named(theirs, lambda p: p))
    assert {path: x.shape for path, x in params.items()} == {
        path: x.shape for path, x in ours.shapes.items()
    }
    return theirs, ours, params


def named(theirs, of):
    """``of`` each parameter, as the published files lay it out: experts turned round."""
    found = {}
    for name, p in theirs.named_parameters():
        x = of(p)
        x = np.zeros(p.shape, np.float32) if x is None else x.detach().numpy()
        found[name] = x.swapaxes(1, 2) if ".experts." in name else x
    return found


def make_batch(ours, hf, rows, side="right", seed=0, length=LENGTH, video=None):
    """Rows are lists of text lengths and images' (width, height); a row's last third is trained.

    Spans, and so positions, are the family's own. ``"video"`` stands for ``video``, three frames
    of 2 x 3 tokens.
    """
    rng = np.random.default_rng(seed)
    vision, B, most = ours.config.vision, len(rows), 2 if video is None else 4
    factor = vision.patch_size * vision.merge_block
    find = qwen_vl.span(ours.config, hf, lambda text: [], tiling.blocks(factor, PIXELS))
    patch_dim = 3 * vision.frames * vision.patch_size**2
    tokens, segment = np.zeros((B, length), np.int32), np.zeros((B, length), np.int32)
    weight, positions = np.zeros((B, length), np.float32), np.zeros((B, 3, length), np.int32)
    start, grid = np.full((B, most), -1, np.int32), np.zeros((B, most, 3), np.int32)
    patches = np.zeros((B, PATCHES * most // 2, patch_dim), np.uint8)
    for b, row in enumerate(rows):
        ids, found = [], []
        for part in row:
            ids += rng.integers(3, 90, part).tolist() if isinstance(part, int) else [IMAGE]
            if part == "video":
                frames = len(video.starts)
                grid[b, len(found) : len(found) + frames] = 3 // frames, 4, 6
                found.append(video)
            elif isinstance(part, tuple):
                width, height = resize.fit(*part, factor, *PIXELS)
                grid[b, len(found)] = 1, height // vision.patch_size, width // vision.patch_size
                found.append(find(*part))
        whole = image_placeholders.expand(np.asarray(ids), IMAGE, found)
        n, used = len(whole.ids), int(grid[b].prod(-1).sum())
        first = 0 if side == "right" else length - n
        here = slice(first, first + n)
        tokens[b, here], segment[b, here], positions[b, :, here] = whole.ids, 1, whole.positions
        weight[b, first + n - n // 3 : first + n] = 1
        for i in range(whole.tile.max(initial=0)):
            start[b, i] = first + np.argmax(whole.tile == i + 1)
        patches[b, :used] = rng.integers(0, 256, (used, patch_dim))
    ids = np.arange(B, dtype=np.int32)
    return Batch(
        tokens,
        weight,
        positions,
        segment,
        patches=patches,
        grid=grid,
        image_start=start,
        example_id=ids,
    )


def torch_inputs(batch, vision):
    """Output of transformers' processor; positions are left to transformers' model."""
    inputs = {
        "input_ids": torch.from_numpy(batch.tokens).long(),
        "attention_mask": torch.from_numpy((batch.segment > 0).astype(np.int64)),
        "mm_token_type_ids": torch.from_numpy((batch.tokens == IMAGE).astype(np.int32)),
    }
    used = batch.grid.prod(-1).sum(-1)
    if used.any():
        mean, std = (per_value(x, vision) for x in (vision.pixel_mean, vision.pixel_std))
        x = np.concatenate([p[:n] for p, n in zip(batch.patches, used, strict=True)])
        inputs["pixel_values"] = torch.from_numpy((x.astype(np.float32) / 255 - mean) / std)
        inputs["image_grid_thw"] = torch.from_numpy(batch.grid[batch.grid.prod(-1) > 0]).long()
    return inputs


# Images are wide, high and square; the rows of one batch hold all kinds.
ROWS = {
    "padding right": ([[(24, 16), 6], [2, (16, 33), 3, (20, 9), 4], [11]], "right"),
    "padding left": ([[1, (40, 8), 5], [(16, 16), 1, (8, 17), 9], [7]], "left"),
    "text alone": ([[12], [20], [5]], "left"),
}


def drawn(kind, seed):
    """Random fields of the family: odd widths and heads, scalings, windows, DeepStack levels."""
    rng = np.random.default_rng((seed, KINDS.index(kind)))

    def one_of(*values):
        return values[rng.integers(len(values))]

    kv, per_kv, head_dim = one_of(1, 2, 3), one_of(1, 2, 3), one_of(6, 8, 14)
    heads, new = kv * per_kv, kind.startswith("Qwen3")
    width = heads * (one_of(4, 12) if new else head_dim)
    rows = one_of(1, head_dim // 6)
    rope = one_of(
        {"rope_type": "default", "rope_theta": 300.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
        {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0},
        YARN | {"rope_theta": 1e4, "attention_factor": one_of(None, 1.3)},
    )
    text = TEXT | {
        "hidden_size": width,
        "num_hidden_layers": one_of(2, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_act": one_of("silu", "gelu_pytorch_tanh", "relu"),
        "rms_norm_eps": one_of(1e-6, 1e-5, 1e-3),
        "max_position_embeddings": one_of(8, 64),
        "rope_parameters": rope | {"mrope_section": [head_dim // 2 - 2 * rows, rows, rows]},
    }
    if new:
        text |= {"head_dim": head_dim, "attention_bias": one_of(True, False)}
    if kind == "Qwen3VLMoe":
        text |= {"num_experts": one_of(3, 4, 7), "num_experts_per_tok": one_of(1, 2, 3)}
        text |= {"moe_intermediate_size": one_of(8, 12)}
    tower, depth = one_of(1, 2, 3), one_of(2, 3)
    vision = {
        "patch_size": 4,
        "depth": depth,
        "num_heads": tower,
        "temporal_patch_size": one_of(1, 2),
        "hidden_act": one_of("silu", "gelu", "quick_gelu"),
        "hidden_size": tower * one_of(4, 8, 12),
        "intermediate_size": one_of(14, 30),
        "out_hidden_size": width,
    }
    if kind == "Qwen2VL":
        for field in ("intermediate_size", "out_hidden_size"):
            del vision[field]
        vision |= {"embed_dim": vision["hidden_size"], "hidden_size": width, "mlp_ratio": 3}
    elif kind == "Qwen2_5_VL":
        full = [i for i in range(depth) if one_of(True, False)]
        vision |= {"window_size": one_of(8, 16, 28), "fullatt_block_indexes": full}
    else:
        taps = [i for i in range(2) if one_of(True, False)]
        vision |= {"deepstack_visual_indexes": taps}
        vision |= {"num_position_embeddings": one_of(4, 9, 49)}
    tied = one_of(True, False)
    return {"vision_config": vision, "text_config": text, "tie_word_embeddings": tied}
