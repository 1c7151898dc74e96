"""transformers' train steps of the same models and batches, in torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.accelerator_parts import Unavailable, models, setup
from jaxvlm.models.vlm import num_visual_tokens


def train(tiny: bool, model: str) -> Iterator[dict[str, Any]]:
    """A step of AdamW: float32 weights, bfloat16 autocast; checkpointing but for CLIP.

    Attention is SDPA, but for PaliGemma 2, whose soft cap transformers computes eagerly.

    The batch is the job's of the same model, but for packing, which these models do not know: a
    row is one conversation.
    """
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or tiny):
        raise Unavailable("torch finds no NVIDIA GPU here")
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    given = models.hf_config(model, tiny)
    rows = models.rows_of(model, tiny)
    kind = transformers.AutoConfig.for_model(**given)
    auto = transformers.AutoModel if given["model_type"] == "clip" else (
        transformers.AutoModelForImageTextToText
    )  # fmt: skip
    with device:
        module = auto.from_config(kind).train()
    if given["model_type"] != "clip":
        module.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    inputs, amount = _INPUTS[given["model_type"]](models.network(model, tiny), given, rows)
    inputs = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
    yield {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": module.num_parameters(),
        "inputs": {name: list(x.shape) for name, x in inputs.items() if torch.is_tensor(x)},
    }

    def step() -> tuple[float, float]:
        begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = module(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        return time.perf_counter() - begun, value

    seconds, losses = zip(*(step() for _ in range(3 if tiny else 12)), strict=True)
    median = statistics.median(seconds[2:])
    unit, count = amount
    yield {
        "median_ms": round(1e3 * median, 3),
        f"{unit}_per_s": round(count / median, 1),
        "peak_gib": setup.gib(torch.cuda.max_memory_allocated()) if on_gpu else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


Inputs = tuple[dict[str, Any], tuple[str, int]]
"""A model's arguments; and what a step has of what."""


def _clip(network: Any, given: Any, rows: models.Rows) -> Inputs:
    pairs = models.image_text_pairs(network, rows)
    pixels = torch.from_numpy(pairs.query.pixels[:, 0]).float().permute(0, 3, 1, 2) / 127.5 - 1
    ids = torch.from_numpy(pairs.document.tokens[:, 0]).long()
    inputs = {"input_ids": ids, "pixel_values": pixels, "return_loss": True}
    return inputs, ("pairs", rows.rows)


def _conversations(image_id: int, vocabulary: int, rows: models.Rows, images: list[int]) -> Any:
    """Ids and labels of rows that begin with so many tokens of each image."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, min(vocabulary, image_id) - 4, (rows.rows, rows.length))
    labels, at = ids.copy(), 1
    for count in images:
        ids[:, at : at + count] = image_id
        at += count + 1
    labels[:, :at] = -100
    return torch.from_numpy(ids), torch.from_numpy(labels)


def _paligemma(network: Any, given: Any, rows: models.Rows) -> Inputs:
    images = [num_visual_tokens(network)] * rows.images
    vocabulary = network.decoder.vocab_size
    ids, labels = _conversations(given["image_token_index"], vocabulary, rows, images)
    size = network.vision.image_size
    inputs = {
        "input_ids": ids,
        "labels": labels,
        "token_type_ids": (labels != -100).long(),
        "pixel_values": torch.rand(rows.rows * rows.images, 3, size, size) * 2 - 1,
        "use_cache": False,
    }
    return inputs, ("tokens", ids.numel())


def _qwen(network: Any, given: Any, rows: models.Rows) -> Inputs:
    vision = network.vision
    grid = np.tile(models.grids(rows), (rows.rows, 1))
    counts = models.grids(rows).prod(1) // network.connector.merge**2
    image_id, vocabulary = given["image_token_id"], network.decoder.vocab_size
    ids, labels = _conversations(image_id, vocabulary, rows, counts.tolist())
    width = 3 * vision.frames * vision.patch_size**2
    inputs = {
        "input_ids": ids,
        "labels": labels,
        "mm_token_type_ids": (ids == image_id).int(),
        "pixel_values": torch.rand(int(grid.prod(1).sum()), width) * 2 - 1,
        "image_grid_thw": torch.from_numpy(grid).long(),
        "use_cache": False,
    }
    return inputs, ("tokens", ids.numel())


_INPUTS: dict[str, Callable[[Any, Any, models.Rows], Inputs]] = {
    "clip": _clip,
    "paligemma": _paligemma,
    "qwen3_vl": _qwen,
}
"""``model_type`` -> a batch."""
