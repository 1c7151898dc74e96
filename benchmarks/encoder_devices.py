"""Disaggregated vision encoder: how many of eight devices, where the encoder has most FLOPs.

    python -m benchmarks.encoder_devices

Eight CPU devices share this machine's cores, so a step's seconds say nothing of eight chips. Here
each program of a step is run by itself and its CPU seconds are divided by its mesh's devices; a
step is then replayed in the order in which it was put into the devices' queues, each program
starting when its mesh is free and its arguments are there. ``step_ms`` is that replay's length,
``encoder`` and ``rest`` the shares of it in which a mesh is busy. ``config.encoder.devices=-1``
goes by ``flops``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("NPROC", "32")  # see overhead.py

import jax  # the flags are for it

from benchmarks.batches import images_and_text
from benchmarks.common import environment, timed, write
from jaxvlm.config import (
    Config,
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    StrategyConfig,
    VisionConfig,
)
from jaxvlm.losses.next_token import NextToken
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import resolve
from jaxvlm.spmd.disaggregated_encoder import (
    assemble_disaggregated,
    divide_devices,
    encoder_on_devices,
)
from jaxvlm.spmd.encoder_share import best_first, model_costs
from jaxvlm.spmd.model import build_model
from jaxvlm.train.disaggregated import ENCODER_PROGRAMS, DisaggregatedStep, EncoderAndRest

MODEL = ModelConfig(
    vision=VisionConfig(
        image_size=96, patch_size=16, width=128, depth=6, num_heads=4, mlp_dim=512
    ),
    decoder=DecoderConfig(
        vocab_size=1024, width=128, depth=3, num_heads=4, num_kv_heads=4, head_dim=32, mlp_dim=320
    ),
)  # fmt: skip
PARTS, ROWS, LENGTH, IMAGES = 4, 4 * 60, 96, 2
COUNTS = (2, 3, 4, 5, 6)


class Replay:
    """When each program of a step would end, if each mesh had devices of its own."""

    def __init__(self, devices: EncoderAndRest):
        self.devices, self.free = devices, {"encoder": 0.0, "rest": 0.0}
        self.work = dict(self.free)
        self.ready: dict[int, float] = {}
        self.kept: list[Any] = []  # or an id would come again

    def program(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, waited for and put into its mesh's queue."""
        side = "encoder" if name in ENCODER_PROGRAMS else "rest"

        def call(*args: Any) -> Any:
            came = self._ready(args)
            made: list[Any] = []
            spent = timed(lambda: made.append(jax.block_until_ready(run(*args))))[1]
            spent /= getattr(self.devices, side)
            self.free[side] = max(self.free[side], came) + spent
            self.work[side] += spent
            return self._made(made[0], self.free[side])

        return call

    def move(self, move: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """``move``, which is taken to cost nothing."""
        return lambda x, to: self._made(jax.block_until_ready(move(x, to)), self._ready(x))

    @property
    def length(self) -> float:
        """Seconds."""
        return max(self.free.values())

    def _ready(self, tree: Any) -> float:
        return max((self.ready.get(id(x), 0.0) for x in jax.tree.leaves(tree)), default=0.0)

    def _made(self, tree: Any, when: float) -> Any:
        self.kept.append(tree)
        self.ready |= {id(x): when for x in jax.tree.leaves(tree)}
        return tree


class Contestant:
    """A compiled step with so many devices for the encoder, and its state."""

    def __init__(self, count: int):
        self.devices = EncoderAndRest(count, 8 - count)
        own, devices = divide_devices(EncoderConfig(count), jax.devices())
        mesh, split = resolve(StrategyConfig("ddp"), MeshConfig(), devices)
        model = build_model(MODEL, make_mesh(mesh, devices), split)
        config = EncoderConfig(count, strategy=StrategyConfig("ddp"))
        encoder = encoder_on_devices(model, config, own)
        tx = make_optimizer(OptimConfig(), lambda step: 1e-3, model.logical)
        made = assemble_disaggregated(model, encoder, NextToken(), tx, PARTS)
        self.batch = made.place(images_and_text(MODEL, ROWS, LENGTH, IMAGES), ROWS)
        self.state, self.metrics = made.init(model.init(0)), {}
        self.step: DisaggregatedStep = made.build(self.state, self.batch)
        self.replays: list[Replay] = []

    def run(self) -> None:
        """One step."""
        replay = Replay(self.devices)
        programs = {name: replay.program(name, run) for name, run in self.step.programs.items()}
        step = dataclasses.replace(self.step, programs=programs, move=replay.move(self.step.move))
        self.state, self.metrics = jax.block_until_ready(step(self.state, self.batch))
        replay.kept.clear()
        self.replays.append(replay)


def main() -> None:
    """Compile all, run them in turn, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    before, found = environment(), {count: Contestant(count) for count in COUNTS}
    config = Config(model=MODEL, data=DataConfig(batch_size=ROWS))
    cost = model_costs(config, images_and_text(MODEL, ROWS, LENGTH, IMAGES))
    order = best_first(cost, 8)
    print(f"the encoder has {cost.encoder / sum(cost):.1%} of the FLOPs: {order[0]} of 8 devices")
    for turn in range(1 + args.rounds):
        for count, contestant in found.items():
            contestant.run()
            print(turn, count, f"{contestant.replays[-1].length:.2f} s", flush=True)
    rows = []
    for count, c in found.items():
        replays = c.replays[1:]
        lengths = [replay.length for replay in replays]

        def share(side: str, replays: list[Replay] = replays) -> float:
            return round(statistics.median(r.work[side] / r.length for r in replays), 3)

        most = max(cost.encoder / count, cost.rest / (8 - count))
        rows.append(
            {
                "encoder_devices": count,
                "loss": round(float(c.metrics["loss"]), 5),
                "step_ms": round(1e3 * min(lengths), 1),
                "step_median_ms": round(1e3 * statistics.median(lengths), 1),
                "encoder": share("encoder"),
                "rest": share("rest"),
                "slower_mesh_gflops_per_device": round(most / 1e9, 2),
            }
        )
        print(rows[-1])
    size = {"rows": ROWS, "length": LENGTH, "images": IMAGES, "microbatches": PARTS}
    result = {
        "environment": before,
        "model": f"vision {MODEL.vision}, decoder {MODEL.decoder}",
        **size,
        "flops": {"encoder": cost.encoder, "rest": cost.rest, "best_first": order},
        "splits": rows,
    }
    write("encoder_devices_cpu.json", result)


if __name__ == "__main__":
    main()
