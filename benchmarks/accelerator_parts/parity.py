"""Attention kernels against XLA's attention in float32, at the shapes and masks of real models."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator_parts import Unavailable, setup
from benchmarks.accelerator_parts.layout import Layout, laid_out
from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.nn.attention_backends import BACKENDS, Scores, attend
from jaxvlm.nn.mask import Mask, batch_mask, segment_mask
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes
from jaxvlm.types import Batch

BOUNDS = {"bfloat16": 8 * 2.0**-9, "float32": 1e-4}
"""Relative error of the output and of each gradient, in the 2-norm: eight roundings of bfloat16
(of inputs' products, weights, their gradients, and results); for float32, 1700 of its own."""


class Case(NamedTuple):
    """Shape and mask of an attention."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    """rows | causal | patches | packed | shared | groups"""
    window: int = 0
    cap: float = 0.0
    dtype: str = "bfloat16"


CASES = {
    "packed": Case(1, 4096, 16, 8, 128, "packed"),  # Qwen3-VL-2B
    "causal": Case(1, 2048, 32, 32, 128, "causal"),  # LLaVA-1.5-7B
    "shared images": Case(1, 4096, 16, 8, 128, "shared"),
    "rows of 577": Case(8, 577, 16, 16, 64, "rows"),  # CLIP-L/14 at 336 pixels
    "packed patches h64": Case(1, 4096, 16, 16, 64, "patches"),  # Qwen3-VL's encoder
    "soft cap": Case(2, 1024, 8, 4, 256, "groups", cap=50.0),  # PaliGemma 2
    "window": Case(1, 4096, 8, 4, 256, "packed", window=1024),  # Gemma 3
    "groups": Case(1, 2048, 8, 4, 256, "groups"),  # Gemma 3's other layers
    "rows of 729 h72": Case(8, 729, 16, 16, 72, "rows"),  # SigLIP So400m/14 at 384 pixels
    "packed patches h80": Case(1, 4096, 16, 16, 80, "patches"),  # Qwen2.5-VL's encoder
    "rows of 1025": Case(4, 1025, 16, 16, 64, "rows"),  # InternViT-300M at 448 pixels
    "float32": Case(1, 1024, 8, 4, 128, "shared", dtype="float32"),
}


def toy(case: Case) -> Case:
    """The same mask and head dims over few tokens, of an odd number where the case has one."""
    length = 1 + case.length // 16 if case.length % 2 else 128
    return case._replace(rows=1, length=length, heads=2, kv_heads=2 * case.kv_heads // case.heads,
                         window=case.window and 24)  # fmt: skip


def mask_of(case: Case) -> tuple[Mask, Any]:
    """The mask, and bool[B, T] of queries that are no padding."""
    chunks = 4 if case.length >= 1024 else 2
    layout = laid_out(Layout(case.rows, case.length, chunks, case.mask == "shared"))
    real = jnp.asarray(layout.segment > 0)
    if case.mask == "rows":
        return Mask(), jnp.ones_like(real)
    if case.mask == "causal":
        index = jnp.arange(case.length, dtype=jnp.int32)[None]
        return Mask(q_index=index, k_index=index), jnp.ones_like(real)
    if case.mask == "patches":
        return segment_mask(jnp.asarray(layout.segment)), real
    groups = jnp.asarray(layout.prefix) if case.mask == "groups" else None
    tokens = np.zeros_like(layout.segment)
    parent = None if layout.parent is None else jnp.asarray(layout.parent)
    batch = Batch(tokens, None, jnp.asarray(layout.positions), jnp.asarray(layout.segment),
                  parent, groups)  # fmt: skip
    mask = batch_mask(batch)
    return (mask.windowed(case.window, False) if case.window else mask), real


def attention(tiny: bool, kernel: str, case: str) -> Iterator[dict[str, Any]]:
    """Errors of a kernel, forward and backward, and of XLA's attention; at real sizes their times,
    of both passes together. A program costs a card's time to compile: there are three.
    """
    devices = setup.devices(tiny)
    shape = toy(CASES[case]) if tiny else CASES[case]
    platform = devices[0].platform
    axes = Axes(make_mesh(MeshConfig(data=1), devices))
    scores = Scores(0.0, shape.cap)
    mask, real = mask_of(shape)
    B, T, H = shape.rows, shape.length, shape.head_dim
    rng = np.random.default_rng(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    inputs = [jnp.asarray(rng.standard_normal((B, T, n, H)), shape.dtype) for n in heads]
    inputs[3] *= real[..., None, None].astype(shape.dtype)

    def run(backend: str) -> Any:
        # The CPU interprets the GPU's kernel.
        if platform == "cpu" and backend == "flash":
            return functools.partial(BACKENDS["flash"], interpret="gpu")
        return lambda *x: attend(*x[:5], backend, x[5])

    def both(backend: str) -> Any:
        def fn(q: Any, k: Any, v: Any) -> Any:
            return run(backend)(q, k, v, mask, axes, scores)

        def gradients(q: Any, k: Any, v: Any, d_out: Any) -> Any:
            out, back = jax.vjp(fn, q, k, v)
            return jnp.where(real[..., None, None], out, 0), *back(d_out)

        return gradients

    if kernel == "cudnn" and platform != "gpu":
        raise Unavailable(f"cuDNN runs on NVIDIA's GPUs, and this is a {platform}")
    try:
        ours, xla = jax.jit(both(kernel)), jax.jit(both("xla"))
        found = ours(*inputs)
    except ConfigError as error:
        raise Unavailable(str(error)) from error
    with jax.default_matmul_precision("highest"):
        # Not timed, so not tuned either.
        how = {"xla_gpu_autotune_level": 0} if platform == "gpu" else None
        exact = jax.jit(both("xla"), compiler_options=how)(*(x.astype(jnp.float32) for x in inputs))
    bound = BOUNDS[shape.dtype]
    errors = _errors(found, exact)
    yield {
        "shape": shape._asdict(),
        "kernel": f"{kernel}, the GPU's, interpreted" if platform == "cpu" else kernel,
        "errors": errors,
        "xla_errors": _errors(xla(*inputs), exact),
        "bound": bound,
        "within_bound": max(errors.values()) <= bound,
    }
    if tiny:
        return
    for name, program in (("", ours), ("xla_", xla)):
        yield {f"{name}both_ms": round(setup.milliseconds(program, *inputs, steps=10), 3)}


def _errors(found: Any, exact: Any) -> dict[str, float]:
    """Of the output and the gradients of queries, keys and values: relative, in the 2-norm."""
    names = ("out", "q", "k", "v")
    return {
        name: float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        for name, a, b in zip(names, found, exact, strict=True)
    }
