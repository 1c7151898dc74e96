"""Islands on easy-VQA: loss and exact match at equal tokens, by steps between outer updates.

    PYTHONPATH=. python benchmarks/islands.py [--seeds 0] [--islands 4] [--every 1 10 50 500]
        [--optimizer nesterov mean] [--steps 1000]

Writes results/islands_cpu.json after each run, and goes on from it. Every run takes the same steps
of the quickstart's recipe on the same batches, on CPU devices of one process: data parallelism,
which sends gradients in each step, and islands of one device each, which send changes of parameters
every H steps (``--every``). ``nesterov`` is DiLoCo's outer optimizer (learning rate 0.7, momentum
0.9), ``mean`` takes the islands' mean. Losses are means over the last tenth of the steps, those of
islands before their outer update; exact match is that of the shared parameters on the official
test split.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.common import RESULTS, ROOT, environment, kept, write

NAME = "islands_cpu"
FIGURES = ("exact_match", "exact_match/color", "exact_match/shape", "exact_match/yes/no")
OUTER = {
    "nesterov": {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.9},
    "mean": {"optimizer": "sgd"},
}


def one_run(settings: dict[str, Any], devices: int, steps: int) -> dict[str, Any]:
    """Train in a process of its own; its figures."""
    from jaxvlm.train.metrics import read_metrics

    fixed = {"epochs": 0.0, "steps": steps, "optim.warmup_steps": 0.1}
    fixed |= {"log_every": steps // 20, "checkpoint.every": 0}
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, "-m", "jaxvlm", "train", f"--workdir={workdir}", "--json"]
        command += [f"--config={ROOT / 'configs' / 'quickstart.py'}"]
        command += [f"--config.{name}={value}" for name, value in (fixed | settings).items()]
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        losses = [row["train/loss"] for row in read_metrics(workdir) if "train/loss" in row]
        result = json.loads(done.stdout.splitlines()[-1])
    return {
        "loss": round(sum(losses[-2:]) / 2, 5),
        "losses": [round(x, 4) for x in losses],
        **{name: round(result[name], 5) for name in FIGURES},
        "blind/exact_match": round(result["blind/exact_match"], 5),
        "minutes": round(result["seconds"] / 60, 2),
    }


def cases(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name of a run -> its settings."""
    runs: dict[str, dict[str, Any]] = {"data parallel": {"mesh.data": args.islands}}
    for optimizer in args.optimizer:
        for every in args.every:
            outer = {f"outer.{name}": x for name, x in OUTER[optimizer].items()}
            mesh = {"mesh.data": 1, "mesh.island": args.islands, "outer.steps": every}
            runs[f"{args.islands} islands, H={every}, {optimizer}"] = mesh | outer
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--islands", type=int, default=4, help="Islands, and CPU devices.")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10, 50, 500])
    parser.add_argument("--optimizer", nargs="+", default=["nesterov"], choices=sorted(OUTER))
    parser.add_argument("--steps", type=int, default=1000, help="A multiple of 20.")
    args = parser.parse_args()
    for seed in args.seeds:
        for name, settings in cases(args).items():
            of = {"run": name, "seed": seed, "steps": args.steps, "devices": args.islands}
            rows = kept(NAME)
            if any(of.items() <= row.items() for row in rows):
                continue
            machine = environment()
            found = one_run(settings | {"seed": seed}, args.islands, args.steps)
            rows.append(of | found | {"environment": machine})
            write(f"{NAME}.json", {"rows": rows}, RESULTS)
            print(f"{name}, seed {seed}: loss {found['loss']:.4f}, {found['exact_match']:.2%}")


if __name__ == "__main__":
    main()
