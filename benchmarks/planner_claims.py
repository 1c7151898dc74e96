"""Claims in circulation about memory and time, computed again with the planner.

    python -m benchmarks.planner_claims

Nothing is compiled or measured: shapes, sharding rules, FLOPs, and the planner's roofline where a
claim is about time. docs/claims.md says what comes out; a test holds the page to the figures.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from benchmarks.common import environment, write
from jaxvlm.config import (
    ConnectorConfig,
    DecoderConfig,
    MeshConfig,
    ModelConfig,
    StrategyConfig,
    VisionConfig,
)
from jaxvlm.hf import model_zoo
from jaxvlm.models import model_flops
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request import abstract_devices, request
from jaxvlm.planner.search import candidates, search
from jaxvlm.planner.time import step_time

# SigLIP-B/16 at 224 pixels, pixel shuffle by 2, SmolLM2-135M: the 222M model of nanoVLM.
NANO = ModelConfig(
    vision=VisionConfig(
        image_size=224, patch_size=16, width=768, depth=12, num_heads=12, mlp_dim=3072
    ),
    connector=ConnectorConfig(kind="linear", merge=2),
    decoder=DecoderConfig(
        vocab_size=49_152, width=576, depth=30, num_heads=9, num_kv_heads=3, head_dim=64,
        mlp_dim=1536,
    ),
)  # fmt: skip
TEXT = 256
"""Tokens of text beside an image's."""


def held(config: ModelConfig, preset: str, devices: int, frozen: tuple[str, ...] = ()) -> float:
    """Bytes a device of float32 parameters, AdamW's moments and gradients."""
    sizes = MeshConfig(data=2) if preset == "hybrid_shard" else MeshConfig()
    mesh, strategy = resolve(
        StrategyConfig(preset), sizes, abstract_devices.devices("gpu", devices)
    )
    packed = config.vision.packed
    setup = step_memory.StepSetup(
        config, mesh, strategy, "gpu", devices, 1024, 1, 1024 if packed else 0, frozen
    )
    model = step_memory.model_of(setup)
    states = step_memory.states(setup, model)
    layout = model.layout("gradients")
    still = tuple(p.rstrip("*") for p in frozen)
    gradients = sum(
        4 * math.prod(layout[path].shard_shape(x.shape))
        for path, x in model.shapes.items()
        if not path.startswith(still or ("\0",))
    )
    return sum(states.values()) - states["batch"] + gradients


def parameters(config: ModelConfig) -> tuple[int, int]:
    """(of all, of the tower)."""
    mesh, strategy = resolve(
        StrategyConfig("single"), MeshConfig(), abstract_devices.devices("gpu", 1)
    )
    packed = 1024 if config.vision.packed else 0
    model = step_memory.model_of(
        step_memory.StepSetup(config, mesh, strategy, "gpu", 1, 64, 1, packed)
    )
    sizes = {path: math.prod(x.shape) for path, x in model.shapes.items()}
    return sum(sizes.values()), sum(n for p, n in sizes.items() if p.startswith("vision/"))


def frozen_tower() -> dict[str, Any]:
    """What a frozen tower spares of parameters, gradients and moments."""
    rows = {}
    names = ("smolvlm-256m", "paligemma2-3b", "qwen3-vl-2b", "llava-1.5-7b", "qwen3-vl-8b")
    for name, config in {
        "nanoVLM-222M": NANO,
        **{n: model_zoo.config_of(n) for n in names},
    }.items():
        total, tower = parameters(config)
        whole, part = (held(config, "single", 1, f) for f in ((), ("vision/*",)))
        rows[name] = {
            "tower_share_%": round(100 * tower / total, 1),
            "saved_%": round(100 * (1 - part / whole), 1),
            "saved_%_frozen_in_bf16": round(100 * tower / total * (1 - 2 / 16), 1),
        }
    return rows


def zero2() -> dict[str, Any]:
    """What ZeRO-2 spares on 8 devices, in two conventions of mixed precision."""
    config = model_zoo.config_of("llava-1.5-7b")
    alone, split = held(config, "single", 1), held(config, "zero2", 8)
    return {
        "bf16 weights and gradients, 12 bytes of moments and master weights": round(
            100 * (1 - (2 + 14 / 8) / 16), 1
        ),
        "float32 weights, gradients and moments (jaxvlm), LLaVA-1.5-7B": round(
            100 * (1 - split / alone), 1
        ),
        "GB alone": round(alone / 1e9, 1),
        "GB under ZeRO-2": round(split / 1e9, 1),
    }


def towers() -> dict[str, Any]:
    """The tower's forward FLOPs as a share of the decoder's: one image and some text."""
    rows = {}
    for name in model_zoo.names():
        config = model_zoo.config_of(name)
        if not isinstance(config, ModelConfig):
            continue  # CLIP and SigLIP have no decoder
        patches = (
            1024
            if config.vision.packed
            else (config.vision.image_size // config.vision.patch_size) ** 2
        )
        length = TEXT + patches // config.connector.merge**2
        packed = patches if config.vision.packed else 0
        found = model_flops.forward(config, length, length, 1, packed)
        rows[name] = round(found.vision / (found.decoder + found.head), 2)
    return rows


def tokens() -> dict[str, Any]:
    """2,304 patches of an image of 768 x 768 given to the decoder one by one, by 4 and by 9."""
    config, rows = model_zoo.config_of("qwen3-vl-8b"), {}
    for visual in (2304, 576, 256):
        length = TEXT + visual
        found = model_flops.forward(config, length, length, 1, 2304)
        d = config.decoder
        rows[str(visual)] = {
            "decoder_tflops": round((found.decoder + found.head) / 1e12, 1),
            "tower_tflops": round(found.vision / 1e12, 2),
            "kv_cache_mb": round(2 * 2 * d.depth * d.num_kv_heads * d.head_dim * length / 1e6, 1),
        }
    return rows


def hybrid_shard() -> dict[str, Any]:
    """A step of hybrid shard against fully sharded, over nodes of 8 H200, by the roofline."""
    model, rows = model_zoo.config_of("qwen3-vl-8b"), {}
    full = dataclasses.replace(
        model, dtype="bfloat16", decoder=dataclasses.replace(model.decoder, remat="full")
    )
    for hosts in (2, 4, 16):
        for a_device in (1, 8):
            there = machine.parse(f"h200:{8 * hosts}", "bfloat16")
            seconds = {}
            for preset, sizes in (
                ("fsdp", MeshConfig()),
                ("hybrid_shard", MeshConfig(data=hosts, fsdp=8)),
            ):
                devices = abstract_devices.devices("gpu", 8 * hosts, devices_per_host=8)
                mesh, strategy = resolve(StrategyConfig(preset), sizes, devices)
                setup = step_memory.StepSetup(
                    full, mesh, strategy, "gpu", 8 * hosts * a_device, 2048, 1, 4096
                )
                seconds[preset] = step_time.step_time(setup, there).total
            gain = seconds["fsdp"] / seconds["hybrid_shard"] - 1
            rows[f"{hosts} nodes, {a_device} rows a device"] = round(100 * gain, 1)
    return rows


def guides() -> dict[str, Any]:
    """GB a device of 8 billion parameters on 8 devices with AdamW, activations left out."""
    config = model_zoo.config_of("internvl3-8b")
    return {
        preset: round(held(config, preset, 8) / 1e9, 1)
        for preset in ("ddp", "zero1", "zero2", "fsdp")
    }


def _contrastive(model: str, devices: int, batch: int) -> request.PlanRequest:
    """Contrastive fine-tuning of all weights on H100; an example has an image and 512 tokens."""
    flags = request.RequestFlags(batch=batch, length=512, objective="contrastive")
    return request.plan_request(model, None, machine.parse(f"h100:{devices}"), flags)


def two_billion() -> dict[str, Any]:
    """GB a device of a contrastive step of Qwen3-VL-2B, 64 pairs, full remat: stored, and peak."""
    rows = {}
    for preset, devices, mini_batch in (
        ("single", 1, 0), ("single", 1, 2), ("ddp", 4, 0), ("ddp", 4, 2), ("fsdp", 4, 0),
        ("fsdp", 4, 2),
    ):  # fmt: skip
        asked = _contrastive("qwen3-vl-2b", devices, 64)
        there = abstract_devices.devices("gpu", devices)
        mesh, strategy = resolve(StrategyConfig(preset), MeshConfig(), there)
        parts = 64 // devices // mini_batch if mini_batch else 1
        sizes = (mini_batch, mini_batch)
        way = candidates.Candidate(preset, mesh, strategy, "full", parts, mini_batches=sizes)
        found = step_memory.estimate(candidates.setup_of(asked, way))
        caching = " with gradient caching" if mini_batch else ""
        rows[f"{preset} on {devices}{caching}"] = {
            "stored": round(sum(found.states.values()) / 1e9, 1),
            "peak": round(found.peak / 1e9, 1),
        }
    return rows


def balance() -> dict[str, Any]:
    """The fastest ways under DDP and fully sharded, of a contrastive step of 256 pairs.

    Seconds and GB a device; zeros: no way under DDP fits, with gradient caching or without.
    """
    rows = {}
    for model in ("qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b"):
        for devices in (4, 8):
            best: dict[str, list[float]] = {"ddp": [0.0, 0.0], "fsdp": [0.0, 0.0]}
            for plan in reversed(search.search(_contrastive(model, devices, 256), 40).best):
                if plan.candidate.family in best:
                    cost = [round(plan.time.total, 2), round(plan.peak / 1e9, 1)]
                    best[plan.candidate.family] = cost
            names = {"seconds": 0, "gb": 1}
            rows[f"{model} on {devices}"] = {
                f"{way}, {what}": cost[i] for way, cost in best.items() for what, i in names.items()
            }
    return rows


CLAIMS = {
    "a frozen tower saves 41 %": frozen_tower,
    "ZeRO-2 saves 68 % of a 7B model": zero2,
    "vision 120 ms, decoder 80 ms": towers,
    "2,304 visual tokens instead of 256": tokens,
    "hybrid shard gains 15 to 20 % across nodes": hybrid_shard,
    "8B on 8 GPUs takes 4 GB each": guides,
    "2B: 40 GB alone, 12 under DDP on 4, 10 with gradient caching, 5 under FSDP": two_billion,
    "DDP with gradient caching is the best balance for 2 to 8B": balance,
}


def main() -> None:
    """Compute all and write them."""
    write(
        "planner_claims.json", {"environment": environment(), **{k: f() for k, f in CLAIMS.items()}}
    )


if __name__ == "__main__":
    main()
