"""Worker: jaxvlm's own train step over prepared batches. Arguments: folder, case."""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

_START = time.perf_counter()

import jax  # noqa: E402  # the import is timed
import numpy as np  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from benchmarks.common import serve, timed  # noqa: E402
from jaxvlm.config import Config, MeshConfig, OptimConfig  # noqa: E402
from jaxvlm.hf.families import llava  # noqa: E402
from jaxvlm.parallel.distributed.processes import keep_freed_memory  # noqa: E402
from jaxvlm.parallel.mesh import make_mesh  # noqa: E402
from jaxvlm.spmd.model import build_model  # noqa: E402
from jaxvlm.trainer.training import build_training  # noqa: E402
from jaxvlm.types import Batch  # noqa: E402


def main(folder: pathlib.Path, case: str) -> None:
    imported = time.perf_counter()
    keep_freed_memory()  # as jaxvlm.Trainer does
    config = llava.config_from_hf(json.loads((folder / "config.json").read_text()))
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    model = build_model(config, mesh)
    optim = OptimConfig(learning_rate=1e-4, schedule="constant", warmup_steps=0, max_grad_norm=0.0)
    train = Config(model=config, optim=optim, steps=1000)
    training = build_training(train, model, 1000, lambda _: None)
    params = llava.weights(config).load(load_file(folder / "model.safetensors"))
    state = training.init(jax.device_put(params, model.shardings))
    batches = []
    with np.load(folder / f"{case}.npz") as stored:
        count = int(stored["count"])
        for i in range(count):
            fields = {f: stored[f"{f}{i}"] for f in Batch._fields if f"{f}{i}" in stored}
            batches.append(jax.device_put(Batch(**fields)))
    compiling = time.perf_counter()
    program = training.step.get(state, batches[0])
    compiled = time.perf_counter()
    state, metrics = program(state, batches[0])
    loss = float(metrics["loss"])
    step = 0

    def run(count: int) -> list[list[float]]:
        nonlocal state, step
        seconds = []
        for _ in range(count):
            batch = batches[step % len(batches)]
            program = training.step.get(state, batch)

            def work(program: Any = program, batch: Batch = batch) -> None:
                nonlocal state
                state, metrics = program(state, batch)
                jax.block_until_ready((state, metrics))

            seconds.append(timed(work))
            step += 1
        return seconds

    ready = {
        "loss": loss,
        "import_s": imported - _START,
        "compile_s": compiled - compiling,
        "first_step_s": time.perf_counter() - _START,
    }
    serve(ready, run)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
