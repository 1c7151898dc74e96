"""One NVIDIA GPU, one script: parity, experts' matmuls, step times, MFU, memory, and a torch peer.

    PYTHONPATH=. python benchmarks/gpu.py --output=FOLDER
    PYTHONPATH=. python benchmarks/gpu.py --tiny --output=FOLDER   # any machine, seconds

Needs jax, flax, optax, numpy; torch and transformers for the peer. Each part runs in a process
of its own, so that peaks of memory are its own and one that runs out of it stops nothing else;
``FOLDER/gpu.json`` is written after each. FLOPs: see ``jaxvlm.models.model_flops`` (matmuls,
causal half, no recomputation, no padding); peak rates: ``jaxvlm.train.chips``.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
REAL = {
    "vision": {"image_size": 336, "patch_size": 14, "width": 1024, "depth": 24, "num_heads": 16},
    "vision_mlp": 4096,
    "decoder": {"width": 2048, "depth": 16, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64},
    "decoder_mlp": 8192,
    "vocab_size": 32064,
    "rows": 8,
    "length": 2048,
    "images": 2,
    "steps": 8,
    "experts": {"rows": 32768, "width": 2048, "mlp_dim": 768, "groups": 32},
}
TINY = {
    "vision": {"image_size": 28, "patch_size": 14, "width": 32, "depth": 2, "num_heads": 2},
    "vision_mlp": 64,
    "decoder": {"width": 64, "depth": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32},
    "decoder_mlp": 96,
    "vocab_size": 256,
    "rows": 2,
    "length": 128,
    "images": 2,
    "steps": 2,
    "experts": {"rows": 48, "width": 32, "mlp_dim": 16, "groups": 4},
}
STEPS = [
    # attention, remat, segments a row
    ("auto", "none", 1),
    ("auto", "dots", 1),
    ("auto", "full", 1),
    ("flash", "dots", 1),
    ("flash", "dots", 2),
    ("xla", "dots", 1),
]
EXPERTS = [("kernel", "bfloat16"), ("xla", "bfloat16"), ("kernel", "float32")]
"""A grouped matmul's way and dtype; Qwen3-30B-A3B's experts, a quarter of them."""
PEERS = [("eager", False), ("eager", True), ("compile", False)]
"""Mode, gradient checkpointing."""


def model_config(dims: dict[str, Any], dtype: str, attention: str, remat: str) -> Any:
    """CLIP-L/14 at 336 pixels with a 1B Llama, or the tiny one."""
    from jaxvlm.config import DecoderConfig, ModelConfig, VisionConfig

    return ModelConfig(
        vision=VisionConfig(
            **dims["vision"],
            mlp_dim=dims["vision_mlp"],
            activation="quick_gelu",
            class_token=True,
            patch_bias=False,
            pre_norm=True,
            final_norm=False,
            norm_eps=1e-5,
            remat=remat,
        ),
        decoder=DecoderConfig(
            **dims["decoder"],
            mlp_dim=dims["decoder_mlp"],
            vocab_size=dims["vocab_size"],
            norm_eps=1e-5,
            remat=remat,
        ),
        dtype=dtype,
        attention=attention,
    )


def make_batch(dims: dict[str, Any], segments: int) -> Any:
    """Rows without padding: ``segments`` pieces each, images spread over them."""
    import numpy as np

    from jaxvlm.types import Batch

    rng = np.random.default_rng(0)
    B, T, images = dims["rows"], dims["length"], dims["images"]
    vision = dims["vision"]
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    tokens = rng.integers(1, dims["vocab_size"] - 1, (B, T))
    piece = T // segments
    start = np.arange(images) * (T // images)
    for first in start:
        tokens[:, first : first + patches] = dims["vocab_size"] - 1
    weight = (tokens != dims["vocab_size"] - 1).astype(np.float32)
    size = vision["image_size"]
    segment = np.minimum(np.arange(T) // piece + 1, segments)
    return Batch(
        tokens=tokens.astype(np.int32),
        loss_weight=weight,
        positions=np.broadcast_to((np.arange(T) % piece).astype(np.int32), (B, 1, T)).copy(),
        segment=np.broadcast_to(segment.astype(np.int32), (B, T)).copy(),
        pixels=rng.integers(0, 256, (B, images, size, size, 3), np.uint8),
        image_start=np.broadcast_to(start.astype(np.int32), (B, images)).copy(),
    )


def parity(dims: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """Loss and gradients of each dtype and backend against float32 XLA, two layers a tower."""
    import jax
    import numpy as np

    from jaxvlm.config import MeshConfig
    from jaxvlm.losses.next_token import NextToken
    from jaxvlm.parallel.mesh import make_mesh
    from jaxvlm.spmd.model import build_model
    from jaxvlm.train.grad_accum import scales, total

    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    gpu = jax.devices()[0].platform == "gpu"
    small = json.loads(json.dumps(dims))
    small["vision"]["depth"] = small["decoder"]["depth"] = 2
    if not tiny:
        small["rows"], small["length"], small["images"] = 2, 1280, 1
    batch = jax.device_put(make_batch(small, 2))
    cases = [("float32", "xla"), ("bfloat16", "xla")]
    if gpu:
        cases += [("bfloat16", "auto"), ("bfloat16", "flash"), ("float32", "flash")]
    found: dict[str, Any] = {}
    reference: dict[str, Any] = {}
    params = None
    for dtype, attention in cases:
        model = build_model(model_config(small, dtype, attention, "none"), mesh)
        params = model.init(0) if params is None else params
        loss = NextToken()

        def objective(p: Any, b: Any, model: Any = model, loss: Any = loss) -> Any:
            return total(loss(model.apply(p, b), b), scales(loss, b))

        # TF32 would blur the reference.
        precision = "highest" if dtype == "float32" else "default"
        with jax.default_matmul_precision(precision):
            value, grads = jax.jit(jax.value_and_grad(objective))(params, batch)
        flat = {path: np.asarray(g, np.float64) for path, g in grads.items()}
        if not reference:
            reference = {"loss": float(value), "grads": flat}
        norm = np.sqrt(sum(np.sum(g**2) for g in reference["grads"].values()))
        off = np.sqrt(sum(np.sum((flat[p] - g) ** 2) for p, g in reference["grads"].items()))
        loss_error = abs(float(value) - reference["loss"]) / reference["loss"]
        bound = (1e-4, 1e-3) if dtype == "float32" else (1e-2, 5e-2)
        found[f"{dtype} {attention}"] = {
            "loss": float(value),
            "loss_relative_error": loss_error,
            "gradient_relative_error": float(off / norm),
            "within_bounds": bool(loss_error < bound[0] and off / norm < bound[1]),
        }
    return found


def step(dims: dict[str, Any], attention: str, remat: str, segments: int) -> dict[str, Any]:
    """jaxvlm's own train step: time, MFU, memory measured and foretold."""
    import jax

    from jaxvlm.config import Config, MeshConfig, OptimConfig
    from jaxvlm.parallel.mesh import make_mesh
    from jaxvlm.spmd.model import build_model
    from jaxvlm.train import chips
    from jaxvlm.train.compiled_steps import memory
    from jaxvlm.trainer.training import build_training

    device = jax.devices()[0]
    mesh = make_mesh(MeshConfig(data=1), [device])
    config = model_config(dims, "bfloat16", attention, remat)
    model = build_model(config, mesh)
    optim = OptimConfig(learning_rate=1e-5, schedule="constant", warmup_steps=0, max_grad_norm=0.0)
    training = build_training(Config(model=config, optim=optim), model, 100, lambda _: None)
    state = training.init(model.init(0))
    host = make_batch(dims, segments)
    batch = jax.device_put(host)
    start = time.perf_counter()
    program = training.step.get(state, batch)
    compile_s = time.perf_counter() - start
    foretold = memory(program)
    seconds, losses = [], []
    for _ in range(dims["steps"] + 2):
        start = time.perf_counter()
        state, metrics = program(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
    seconds = seconds[2:]
    tokens = float((host.segment > 0).sum())
    flops = training.flops_per_step(host, 1.0).total
    chip = chips.lookup(device.device_kind, "bfloat16")
    median = statistics.median(seconds)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "device": device.device_kind,
        "parameters": sum(int(x.size) for x in model.shapes.values()),
        "compile_s": round(compile_s, 2),
        "min_ms": round(1e3 * min(seconds), 3),
        "median_ms": round(1e3 * median, 3),
        "tokens_per_s": round(tokens / median),
        "model_tflop_per_step": flops / 1e12,
        "mfu": None if chip is None else round(flops / median / chip.peak_flops, 4),
        "mfu_against": None if chip is None else f"{chip.name}, {chip.peak_flops / 1e12} TFLOP/s",
        "peak_memory_gib": None if peak is None else round(peak / 2**30, 2),
        "compiler_memory_gib": {name: round(x / 2**30, 3) for name, x in foretold.items()},
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def experts(dims: dict[str, Any], way: str, dtype: str) -> dict[str, Any]:
    """A grouped matmul of rows dealt out unevenly: time and memory of each direction, and errors.

    ``kernel`` is :func:`jaxvlm.nn.grouped_matmul.by_tiles`, ``xla`` ``jax.lax.ragged_dot``. The
    first
    group has a quarter of all rows, the last none. Errors are relative, against a matmul a group
    in float32.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxvlm.nn import grouped_matmul

    d = dims["experts"]
    M, K, N, G = d["rows"], d["width"], d["mlp_dim"], d["groups"]
    rng = np.random.default_rng(0)
    own = M // 4, *rng.multinomial(M - M // 4, np.full(G - 2, 1 / (G - 2))), 0
    ends = np.cumsum(own)
    sizes = jnp.asarray(own, jnp.int32)
    interpret = jax.devices()[0].platform != "gpu"
    shapes = ((M, K), (G, K, N), (M, N))
    rows, w, weight = (jnp.asarray(rng.normal(size=s) / 8, dtype) for s in shapes)

    def matmul(rows: Any, w: Any) -> Any:
        if way == "kernel":
            return grouped_matmul.by_tiles(rows, w, sizes, interpret)
        return grouped_matmul.grouped_matmul(rows, w, sizes, kernel=False, tail=False)

    def by_loop(rows: Any, w: Any) -> Any:
        parts = zip(ends, own, w)
        return jnp.concatenate([rows[end - n : end] @ matrix for end, n, matrix in parts])

    def backward(matmul: Any) -> Any:
        return lambda rows, w, d_out: jax.vjp(matmul, rows, w)[1](d_out)

    given = [x.astype(jnp.float32) for x in (rows, w, weight)]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(by_loop)(*given[:2]), *jax.jit(backward(by_loop))(*given)
    directions = {
        "forward": (matmul, (rows, w), 1),
        "rows": (lambda *x: backward(matmul)(*x)[0], (rows, w, weight), 1),
        "matrices": (lambda *x: backward(matmul)(*x)[1], (rows, w, weight), 1),
        "all": (lambda *x: (matmul(*x[:2]), *backward(matmul)(*x)), (rows, w, weight), 3),
    }
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "shape": d}
    for name, (fn, args, times) in directions.items():
        program = jax.jit(fn).lower(*args).compile()
        made = jax.block_until_ready(program(*args))
        seconds = []
        for _ in range(dims["steps"] + 2):
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds[2:])
        found[name] = {
            "median_ms": round(1e3 * median, 3),
            "tflop_per_s": round(2 * times * M * K * N / median / 1e12, 1),
            "temporary_mib": round(program.memory_analysis().temp_size_in_bytes / 2**20, 1),
        }
    found["errors"] = [
        float(jnp.linalg.norm(ours.astype(jnp.float32) - x) / jnp.linalg.norm(x))
        for ours, x in zip(made, expected)
    ]
    return found


def peer(dims: dict[str, Any], mode: str, checkpointing: bool) -> dict[str, Any]:
    """transformers' LLaVA of the same dims: float32 weights, bfloat16 autocast, SDPA."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    v, d = dims["vision"], dims["decoder"]
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=v["width"],
            intermediate_size=dims["vision_mlp"],
            num_hidden_layers=v["depth"],
            num_attention_heads=v["num_heads"],
            image_size=v["image_size"],
            patch_size=v["patch_size"],
        ),
        text_config=LlamaConfig(
            hidden_size=d["width"],
            intermediate_size=dims["decoder_mlp"],
            num_hidden_layers=d["depth"],
            num_attention_heads=d["num_heads"],
            num_key_value_heads=d["num_kv_heads"],
            head_dim=d["head_dim"],
            vocab_size=dims["vocab_size"],
            tie_word_embeddings=True,
        ),
        image_token_index=dims["vocab_size"] - 1,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with device:
        model = LlavaForConditionalGeneration(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    batch = make_batch(dims, 1)
    ids = torch.from_numpy(batch.tokens).long().to(device)
    labels = ids.masked_fill(torch.from_numpy(batch.loss_weight).to(device) == 0, -100)
    flat = batch.pixels.reshape(-1, *batch.pixels.shape[2:])
    pixels = (torch.from_numpy(flat).to(device).float() / 127.5 - 1).permute(0, 3, 1, 2)
    forward = torch.compile(model) if mode == "compile" else model

    def run() -> float:
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(input_ids=ids, pixel_values=pixels, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - start

    first = run() + run()
    seconds = [run() for _ in range(dims["steps"])]
    median = statistics.median(seconds)
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "parameters": model.num_parameters(),
        "first_two_steps_s": round(first, 2),
        "min_ms": round(1e3 * min(seconds), 3),
        "median_ms": round(1e3 * median, 3),
        "tokens_per_s": round(ids.numel() / median),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
    }


def run_part(part: str, tiny: bool) -> dict[str, Any]:
    """A part by its name: ``parity``, ``experts/kernel/bfloat16``, ``step/auto/dots/1``,
    ``torch/eager/plain``.
    """
    dims = TINY if tiny else REAL
    kind, *rest = part.split("/")
    if kind == "parity":
        return parity(dims, tiny)
    if kind == "experts":
        return experts(dims, rest[0], rest[1])
    if kind == "step":
        return step(dims, rest[0], rest[1], int(rest[2]))
    return peer(dims, rest[0], rest[1] == "checkpointing")


def parts(tiny: bool) -> list[str]:
    """All of them, the most telling first, in case time runs out."""
    steps = [f"step/{attention}/{remat}/{n}" for attention, remat, n in STEPS]
    peers = [f"torch/{mode}/{'checkpointing' if on else 'plain'}" for mode, on in PEERS]
    grouped = [f"experts/{way}/{dtype}" for way, dtype in EXPERTS]
    if tiny:  # kernels of the card, and a compiler that takes a minute, are left out
        return ["parity", *grouped[:2], "step/auto/none/1", "step/xla/dots/2", "torch/eager/plain"]
    return ["parity", *grouped, *steps[:3], peers[0], *steps[3:], *peers[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", default="", help="comma-separated; all if empty")
    parser.add_argument("--timeout", type=int, default=240, help="seconds a part may take")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print("RESULT " + json.dumps(run_part(args.part, args.tiny)), flush=True)
        return
    sys.path.insert(0, str(ROOT))
    from benchmarks.common import environment

    args.output.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"environment": environment(), "dims": TINY if args.tiny else REAL}
    env = dict(os.environ, PYTHONPATH=str(ROOT), XLA_PYTHON_CLIENT_PREALLOCATE="false")
    for part in args.parts.split(",") if args.parts else parts(args.tiny):
        command = [sys.executable, __file__, f"--output={args.output}", f"--part={part}"]
        command += ["--tiny"] if args.tiny else []
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=args.timeout
            )
            lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
            errors = [x for x in done.stderr.splitlines() if "Error" in x or "error" in x]
            failure = {"error": (errors or done.stderr.splitlines())[-1:]}
            result[part] = json.loads(lines[-1].removeprefix("RESULT ")) if lines else failure
        except subprocess.TimeoutExpired:
            result[part] = {"error": f"took more than {args.timeout} s"}
        print(part, json.dumps(result[part]), flush=True)
        (args.output / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
