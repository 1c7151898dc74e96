"""What a strategy costs besides the work itself: eight devices on this machine's cores against one.

    python -m benchmarks.overhead

The same train step of the same batch, on one CPU device and on eight that share its cores, in turn.
More devices do not make it faster here, so a ratio of seconds is what cutting the work costs: work
done twice, messages (``sent_mib`` a device, copies in this machine's memory), smaller matmuls, and
devices that wait for each other (where ``ratio`` is above ``cpu_ratio``). A pipeline's stages share
the cores, so that its bubble costs nothing here where stages may skip (those that are split
further work on anything); ``busy_stages`` says what it would on devices of their own. Compare
pipelines with "one, 8 microbatches". What they send is not counted: it lies in branches that not
every tick takes.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# A collective holds a thread until all devices are there, and XLA's CPU runtime starts those that
# do not depend on each other at once, each device in its own order: with a thread a device, the
# default, some devices can wait in one and the rest in another for ever ("context, ring").
os.environ.setdefault("NPROC", "32")

import jax  # the flags are for it
import optax

from benchmarks.batches import images_and_text
from benchmarks.common import environment, summary, timed, write
from jaxvlm.config import (
    DecoderConfig,
    MeshConfig,
    ModelConfig,
    StrategyConfig,
    VisionConfig,
)
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.compiled import collectives
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble

MODEL = ModelConfig(
    vision=VisionConfig(
        image_size=64, patch_size=16, width=128, depth=2, num_heads=8, mlp_dim=512, remat="dots"
    ),
    decoder=DecoderConfig(
        vocab_size=2048, width=128, depth=8, num_heads=8, num_kv_heads=8, head_dim=16,
        mlp_dim=512, remat="dots",
    ),
)  # fmt: skip
ROWS, LENGTH, IMAGES, PARTS = 32, 128, 2, 8
STRATEGIES: dict[str, tuple[Any, ...]] = {
    "one": ("single", MeshConfig(), 1),
    "one, 8 microbatches": ("single", MeshConfig(), PARTS),
    **{name: (name, MeshConfig(), 1) for name in ("ddp", "zero1", "zero2", "fsdp")},
    "fsdp_no_reshard": ("fsdp_no_reshard", MeshConfig(), 1),
    "hybrid_shard": ("hybrid_shard", MeshConfig(data=2), 1),
    "zero1, 8 bits": ("zero1", MeshConfig(), 1, {"grad_reduce_dtype": "int8"}),
    "tensor": ("ddp", MeshConfig(data=1, tensor=8), 1),
    "fsdp x tensor": ("fsdp", MeshConfig(data=1, fsdp=4, tensor=2), 1),
    "context, gathered": ("ddp", MeshConfig(data=1, context=8), 1),
    "context, ring": ("ddp", MeshConfig(data=1, context=8), 1, {"context": "ring"}),
    "context, ulysses": ("ddp", MeshConfig(data=1, context=8), 1, {"context": "ulysses"}),
    "gpipe": ("ddp", MeshConfig(data=2, pipeline=4), PARTS, {"schedule": "gpipe"}),
    "1f1b": ("ddp", MeshConfig(data=2, pipeline=4), PARTS),
    "interleaved": (
        "ddp", MeshConfig(data=2, pipeline=4), PARTS,
        {"schedule": "interleaved", "virtual_stages": 2},
    ),
    "zero_bubble": ("ddp", MeshConfig(data=2, pipeline=4), PARTS, {"schedule": "zero_bubble"}),
    "1f1b x fsdp x tensor": ("fsdp", MeshConfig(data=1, pipeline=2, fsdp=2, tensor=2), PARTS),
}  # fmt: skip


class Contestant:
    """A compiled step and its state."""

    def __init__(self, name: str):
        preset, wanted, parts, *fields = STRATEGIES[name]
        devices = jax.devices()[:1] if preset == "single" else jax.devices()
        mesh, split = resolve(StrategyConfig(preset, **(fields or [{}])[0]), wanted, devices)
        here = make_mesh(mesh, devices)
        model = build_model(MODEL, here, split)
        step, abstract, init = assemble(model, NextToken(), optax.adamw(1e-4), parts)
        self.batch = to_global(here, images_and_text(MODEL, ROWS, LENGTH, IMAGES), ROWS)
        start = time.perf_counter()
        self.step = step.lower(abstract, self.batch).compile()
        self.compile_seconds = time.perf_counter() - start
        found = collectives.read(self.step.as_text(), dict(here.shape))
        self.sent = sum(c.wire_bytes for c in found)
        self.mesh = {axis: size for axis, size in here.shape.items() if size > 1}
        self.state, self.metrics = init(model.init(0)), {}
        self.seconds: list[list[float]] = []

    def run(self) -> None:
        """A step, all of it waited for: the next one's collectives must not meet this one's."""
        self.state, self.metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, self.metrics))


def main() -> None:
    """Compile all, run them in turn, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    before = environment()
    found: dict[str, Contestant] = {}
    for name in dict.fromkeys(["one", *args.strategies]):
        found[name] = Contestant(name)
        print(f"{name}: compiled in {found[name].compile_seconds:.1f} s", flush=True)
    for turn in range(1 + args.rounds):
        for name, contestant in found.items():
            spent = timed(contestant.run)
            print(turn, name, f"{spent[0]:.2f} s", flush=True)
            if turn > 0:
                contestant.seconds.append(spent)
    one, rows = summary(found["one"].seconds), []
    for name, c in found.items():
        busy, spent = c.metrics.get("busy_stages"), summary(c.seconds)
        rows.append(
            {
                "strategy": name,
                "mesh": c.mesh,
                "loss": round(float(c.metrics["loss"]), 5),
                **spent,
                "ratio": round(spent["min_ms"] / one["min_ms"], 3),
                "cpu_ratio": round(spent["cpu_min_ms"] / one["cpu_min_ms"], 3),
                "sent_mib": None if busy is not None else round(c.sent / 2**20, 1),
                "busy_stages": None if busy is None else round(float(busy), 3),
            }
        )
        print(rows[-1])
    config = f"vision {MODEL.vision}, decoder {MODEL.decoder}"
    size = {"rows": ROWS, "length": LENGTH, "images": IMAGES, "rounds": args.rounds}
    write("overhead_cpu.json", {"environment": before, "model": config, **size, "strategies": rows})


if __name__ == "__main__":
    main()
