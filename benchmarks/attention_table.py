"""Print the attention backend that ``auto`` chooses, by mask and platform, for docs/attention.md.

PYTHONPATH=. python benchmarks/attention_table.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxvlm.nn.attention_backends import choice
from jaxvlm.nn.mask import Mask, of_segments

CASES: list[tuple[str, dict]] = [
    ("images of one size, 577 tokens of 64", {"length": 577, "head_dim": 64}),
    ("images of one size, 50 tokens of 64", {"length": 50, "head_dim": 64}),
    ("packed patches of images of any size, heads of 72", {"packed": True, "head_dim": 72}),
    ("decoder, one sequence a row", {"causal": True}),
    ("decoder, packed sequences", {"causal": True, "packed": True}),
    ("decoder, shared images", {"causal": True, "packed": True, "parents": True}),
    ("decoder, bidirectional groups (Gemma 3)", {"causal": True, "packed": True, "groups": True}),
    ("decoder, soft cap, heads of 256 (Gemma 2)", {"causal": True, "packed": True, "cap": 50.0}),
    ("dropout of attention weights", {"causal": True, "drops": True}),
    ("a KV cache", {"causal": True, "packed": True, "cached": True}),
    ("float32, packed sequences", {"causal": True, "packed": True, "dtype": jnp.float32}),
]


def row(
    platform: str,
    length: int = 4096,
    head_dim: int = 128,
    causal: bool = False,
    packed: bool = False,
    parents: bool = False,
    groups: bool = False,
    cached: bool = False,
    drops: bool = False,
    cap: float = 0.0,
    dtype: jnp.dtype = jnp.bfloat16,
) -> str:
    """The backend, and why the others that the platform has were passed over."""
    ids = jnp.ones((1, length), jnp.int32) if packed else None
    index = jnp.arange(length)[None] if causal else None
    group = ids if groups else None
    spans = None if ids is None or cached else of_segments(length, causal, ids, None, group)
    parent = ids if parents else None
    mask = Mask(index, index, ids, ids, parent, group, group, spans=spans)
    q = jax.ShapeDtypeStruct((1, 1 if cached else length, 16, head_dim), dtype)
    k = jax.ShapeDtypeStruct((1, length, 8, head_dim), dtype)
    name, passed_over = choice(q, k, mask, platform, cap, drops)
    why = "; ".join(f"not {other}: {reason}" for other, reason in passed_over.items())
    return f"**{name}**" + (f" ({why})" if why else "")


def table() -> str:
    """The table, in Markdown."""
    lines = ["| mask | NVIDIA GPU, Ampere and newer | TPU |", "| --- | --- | --- |"]
    for name, case in CASES:
        lines.append(f"| {name} | {row('gpu', **case)} | {row('tpu', **case)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
