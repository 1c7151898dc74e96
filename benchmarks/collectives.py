"""What each strategy sends and holds, read from programs compiled for pods that are not there.

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m benchmarks.collectives

One train step of a LLaVA-like model (see MODEL) in bfloat16 with full remat, AdamW. Wire bytes are
what a device sends by the ring algorithm, each collective times the trip counts of its loops, in
bytes a parameter; memory is the compiler's own count for a device. Without stages a device has one
row; with them each of a stage's parts has eight, one a microbatch, and what is sent in a branch
counts as often as there are ticks: an upper bound. Rows that a result of
the same name has are kept.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import optax

from benchmarks.batches import abstract_batch
from benchmarks.common import environment, kept, write
from jaxvlm.config import (
    GRAD_REDUCE_BITS,
    ConfigError,
    DecoderConfig,
    MeshConfig,
    ModelConfig,
    StrategyConfig,
    VisionConfig,
)
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import batch_shards, make_mesh
from jaxvlm.parallel.strategies import CONTEXTS, resolve
from jaxvlm.planner.compiled import collectives, topology
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train import program_memory

MODEL = ModelConfig(
    vision=VisionConfig(
        image_size=224, patch_size=14, width=1024, depth=6, num_heads=16, mlp_dim=4096, remat="full"
    ),
    decoder=DecoderConfig(
        vocab_size=32_768, width=2048, depth=12, num_heads=16, num_kv_heads=16, head_dim=128,
        mlp_dim=8192, tied_embeddings=False, remat="full",
    ),
    dtype="bfloat16",
    attention="xla",
)  # fmt: skip
LENGTH, IMAGES = 2048, 2
TARGETS = ("v5p:4x4x4", "h200:64")
STRATEGIES = {
    **{name: (name, MeshConfig()) for name in ("ddp", "zero1", "zero2", "fsdp", "fsdp_no_reshard")},
    **{name: (name, MeshConfig(data=8)) for name in ("hybrid_shard", "hpz")},
    "ddp x tensor": ("ddp", MeshConfig(data=16, tensor=4)),
    "fsdp x tensor": ("fsdp", MeshConfig(data=1, fsdp=16, tensor=4)),
    **{
        f"context, {how}": ("fsdp", MeshConfig(data=1, fsdp=16, context=4), {"context": how})
        for how in CONTEXTS
    },
    **{
        f"zero1, {bits} bits": ("zero1", MeshConfig(data=8), {"grad_reduce_dtype": dtype})
        for dtype, bits in GRAD_REDUCE_BITS.items()
        if bits < 32
    },
    "fsdp, 8 bits": ("fsdp", MeshConfig(), {"grad_reduce_dtype": "int8"}),
    "zero1, moments on the host": ("zero1", MeshConfig(data=8), {"offload": ("optimizer",)}),
    "hpz, int8": ("hpz", MeshConfig(data=8), {"param_gather_dtype": "int8"}),
    "1f1b": ("ddp", MeshConfig(pipeline=4)),
    "interleaved": (
        "ddp",
        MeshConfig(pipeline=4),
        {"schedule": "interleaved", "virtual_stages": 3},
    ),
    "gpipe": ("ddp", MeshConfig(pipeline=4), {"schedule": "gpipe"}),
    "1f1b x fsdp x tensor": ("fsdp", MeshConfig(data=1, fsdp=4, tensor=4, pipeline=4)),
}


def one(target: str, strategy: str) -> dict[str, Any]:
    """One step, compiled."""
    preset, wanted, *fields = STRATEGIES[strategy]
    devices = topology.devices(target)
    asked = StrategyConfig(preset, **(fields[0] if fields else {}))
    mesh, split = resolve(asked, wanted, devices)
    here = make_mesh(mesh, devices)
    model = build_model(MODEL, here, split)
    parts = 8 if mesh.pipeline > 1 else 1
    rows = parts * batch_shards(here) if mesh.pipeline > 1 else len(devices)
    step, abstract, _ = assemble(model, NextToken(), optax.adamw(1e-4), parts)
    start = time.perf_counter()
    program = step.lower(abstract, abstract_batch(MODEL, here, rows, LENGTH, IMAGES)).compile()
    seconds = time.perf_counter() - start
    count = sum(math.prod(x.shape) for x in model.shapes.values())
    found = collectives.read(program.as_text(), dict(here.shape))
    sent = [
        {
            "kind": c.kind,
            "axes": "x".join(c.axes),
            "dtype": c.dtype,
            "count": c.count,
            "bytes_a_parameter": round(c.wire_bytes / count, 3),
        }
        for c in found
        if c.wire_bytes > 0.002 * count
    ]
    memory = {name: round(size / 2**20, 1) for name, size in program_memory.memory(program).items()}
    return {
        "target": target,
        "strategy": strategy,
        "rows": rows,
        "mesh": {axis: size for axis, size in here.shape.items() if size > 1},
        "parameters": count,
        "compile_seconds": round(seconds, 1),
        "sent": sent,
        "sent_bytes_a_parameter": round(sum(c.wire_bytes for c in found) / count, 3),
        "memory_mib": memory,
    }


def main() -> None:
    """Compile all, print a line each, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--name", default="collectives_aot", help="of the result")
    args = parser.parse_args()
    result: dict[str, Any] = {"model": str(MODEL), "length": LENGTH, "rows": kept(args.name)}
    rows, here = result["rows"], environment()
    done = {(row["target"], row["strategy"]) for row in rows}
    for target in args.targets:
        for strategy in args.strategies:
            if (target, strategy) in done:
                continue
            try:
                rows.append(row := one(target, strategy) | {"environment": here})
            except ConfigError as refusal:
                rows.append({"target": target, "strategy": strategy, "refused": str(refusal)})
                write(f"{args.name}.json", result)
                print(f"{target} {strategy} is refused: {refusal}", flush=True)
                continue
            kinds = ", ".join(
                f"{c['kind']} {c['dtype']} over {c['axes'] or '?'} x{c['count']}: "
                f"{c['bytes_a_parameter']}"
                for c in row["sent"]
            )
            print(f"{target} {strategy} {row['memory_mib'].get('peak')} MiB: {kinds}", flush=True)
            write(f"{args.name}.json", result)


if __name__ == "__main__":
    main()
