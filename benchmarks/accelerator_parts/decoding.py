"""Generation with whole and with compressed KV caches: tokens/s and the bytes of the caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import kv_cache_speed
from benchmarks.accelerator_parts import setup

WAYS = ("none", "vl_cache 10 %", "window 10 %")


def generate(tiny: bool, batch: int) -> Iterator[dict[str, Any]]:
    """Figures of ``benchmarks/kv_cache_speed.py`` for Qwen2.5-VL 3B, its weights bfloat16.

    Args:
        tiny: whether the model is a toy, and the prompt short.
        batch: prompts, of 8192 tokens each.
    """
    setup.devices(tiny)
    ways = {way: kv_cache_speed.WAYS[way] for way in WAYS}
    if tiny:
        model, length, sections = kv_cache_speed.small_model(), 64, 1
    else:
        model, length, sections = kv_cache_speed.published("h200", 8192), 8192, 3
    rows = kv_cache_speed.measured(model, (batch,), length, 1 if tiny else 5, ways, sections)
    yield {"ways": list(rows)}
