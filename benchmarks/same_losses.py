"""Are two checkouts the same but for names? Bits of losses and weights of short trainings.

    python -m benchmarks.same_losses --output=before.json   # in one checkout
    python -m benchmarks.same_losses --output=after.json    # in the other, on the same machine
    python -m benchmarks.same_losses --compare before.json after.json

Each run of ``RUNS`` is a process of its own with a set number of devices and threads, so that it
gives the same bits each time. Kept are each step's loss, gradient norm and share of images whose
tokens the cache had, as ``float.hex`` says them, and a SHA-256 of each parameter's bytes after the
last step, frozen ones too. ``--compare`` prints a line a run and exits 1 if anything differs; a
parameter that has another path and the same bytes is counted as moved, and differs too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from benchmarks.common import ROOT, environment

sys.path.append(str(ROOT / "tests"))
from runs import COLORS, FLAGS, write_data  # no JAX in it

ALL = {"log_every": 1, "checkpoint.every": 0, "tensorboard": False, "compile_cache": ""}
ALL |= {"data.eval": ""}
SHORT = ALL | {"steps": 20, "optim.learning_rate": 3e-3, "optim.warmup_steps": 4}
TOWER = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 32}
DECODER = {
    "width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8,
}  # fmt: skip
VLM = {f"model.vision.{name}": value for name, value in TOWER.items()} | {
    f"model.decoder.{name}": value for name, value in DECODER.items()
}
TALK = SHORT | {"data.train": "{data}", "data.batch_size": 8, "data.max_length": 64}
CACHED = TALK | VLM | {"model.vision.stem": "conv", "cache.encode_batch": 2}
PAIRS = SHORT | {
    "data.train": "{pairs}", "data.batch_size": 8, "data.max_length": 32, "data.buckets": 1,
    "loss.name": "info_nce", "grad_cache.query_mini_batch": 2, "grad_cache.document_mini_batch": 3,
}  # fmt: skip
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    # Devices, and what is unlike the defaults; names in braces are paths of ``given``.
    "quickstart": (1, ALL),
    "lora": (8, TALK | {
        "model.checkpoint": "{llava}", "model.lora.rank": 4, "model.lora.dropout": 0.1,
        "optim.learning_rate": 1e-2, "mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2,
        "microbatches": 2,
    }),
    "pairs, dual": (4, PAIRS | {f"dual.vision.{name}": value for name, value in TOWER.items()} | {
        "embedder": "dual", "dual.embed_dim": 16, "dual.text.width": 16, "dual.text.depth": 1,
        "dual.text.num_heads": 2, "dual.text.mlp_dim": 32, "dual.text.max_length": 16,
        "pair_loss.temperature": 0.0, "mesh.data": 2, "mesh.fsdp": 2, "data.batch_size": 16,
    }),
    "pairs, vlm": (1, PAIRS | VLM | {"pair_loss.matryoshka_dims": (8, 16)}),
    "pipeline": (8, TALK | VLM | {
        "model.decoder.depth": 4, "model.decoder.remat": "dots", "model.vision.remat": "dots",
        "mesh.data": 2, "mesh.tensor": 2, "mesh.pipeline": 2, "microbatches": 4,
    }),
    "cache, lazy": (1, CACHED | {"cache.policy": "lazy", "cache.max_staleness": 3}),
    "cache, strict": (4, CACHED | {"cache.policy": "strict", "optim.frozen": ("vision/*",)}),
}  # fmt: skip
STEPS = 100  # at most
SAME, COMMAND = "identical", "python -m benchmarks.same_losses"
METRICS = ("train/loss", "train/grad_norm", "train/cache/hit_rate")


def given(folder: pathlib.Path, asked: str) -> dict[str, pathlib.Path]:
    """Questions about images of one colour, captions of them, and a LLaVA of random weights."""
    data, colors = write_data(folder), list(COLORS)
    pairs, lines = folder / "pairs.jsonl", []
    for i in range(40):
        line = {"id": str(i), "query_image": f"{i}.png", "positive": f"{colors[i % 3]}, number {i}"}
        lines.append(json.dumps(line | {"negatives": [colors[(i + 1) % 3]]}) + "\n")
    pairs.write_text("".join(lines))
    if "{llava}" in asked:
        from checkpoints import write_llava  # with torch

        write_llava(folder / "llava", data, "float32")
    return {"data": data, "pairs": pairs, "llava": folder / "llava"}


def train(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """The run ``name``, here."""
    import jax  # in the run's process alone
    import numpy as np

    import jaxvlm
    from jaxvlm.config import default_config, from_config_dict, to_config_dict
    from jaxvlm.train.metrics import read_metrics

    devices, settings = RUNS[name]
    assert len(jax.devices()) == devices
    if name == "quickstart":
        get_config = runpy.run_path(str(ROOT / "configs/quickstart.py"))["get_config"]
        config, paths = to_config_dict(from_config_dict(get_config())), {}
    else:
        config, paths = default_config(), given(folder, str(settings))
    config.update_from_flattened_dict(
        {k: v.format(**paths) if isinstance(v, str) else v for k, v in settings.items()}
    )
    run = jaxvlm.Trainer(config, folder / "run")
    run.steps = min(run.steps, STEPS)  # where it ends; its learning rates are the whole run's
    run.fit()
    rows = read_metrics(folder / "run")
    assert run.state is not None and [row["step"] for row in rows] == list(range(1, run.steps + 1))
    params = {path: np.asarray(x) for path, x in run.training.params(run.state).items()}
    return {
        "metrics": {m: [float(row[m]).hex() for row in rows] for m in METRICS if m in rows[0]},
        "params": {
            path: hashlib.sha256(f"{x.dtype}{x.shape}".encode() + x.tobytes()).hexdigest()
            for path, x in sorted(params.items())
        },
    }


def in_a_process(name: str) -> dict[str, Any]:
    """The run ``name`` in a process whose environment is set for the same bits."""
    devices, begun = RUNS[name][0], time.monotonic()
    env = dict(os.environ, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", JAX_PLATFORMS="cpu")
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices} "
    env["XLA_FLAGS"] += FLAGS if name != "quickstart" else ""  # it computes, the others compile
    # A collective holds a thread until all devices are there, see benchmarks/overhead.py.
    env["OMP_NUM_THREADS"], env["NPROC"] = "2", "2" if devices == 1 else "32"
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "benchmarks.same_losses", f"--run={name}"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-3000:]}\nthe run {name!r} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": round(time.monotonic() - begun)}


def apart(a: list[str], b: list[str]) -> str:
    """How far two lists of ``float.hex`` are from each other, in words; "-" if both are empty."""
    if len(a) != len(b):
        return f"{len(a)} and {len(b)} steps"
    pairs = [(float.fromhex(x), float.fromhex(y)) for x, y in zip(a, b) if x != y]
    far = [abs(x - y) / (max(abs(x), abs(y)) or 1.0) for x, y in pairs]
    return f"differ by {max(far):.1e}" if far else SAME if a else "-"


def compare(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Print what differs between two results' runs, a line each; whether nothing does."""
    print(f"{'run':15}{'steps':>5}  " + "".join(f"{m:21}" for m in METRICS) + "parameters")
    same, absent = True, {"metrics": {}, "params": {}}
    for name in dict.fromkeys([*a, *b]):
        old, new = a.get(name, absent), b.get(name, absent)
        steps = max(len(x) for x in [*old["metrics"].values(), *new["metrics"].values()])
        words = [apart(*(x["metrics"].get(m, []) for x in (old, new))) for m in METRICS]
        old, new = old["params"], new["params"]
        both = old.keys() & new.keys()
        differ = sum(old[path] != new[path] for path in both)
        lone = [{p: x[p] for p in x if p not in both} for x in (old, new)]
        moved = (Counter(lone[0].values()) & Counter(lone[1].values())).total()
        told = f"{differ} of {len(both)} differ; {len(lone[0])} in A alone, {len(lone[1])} in B, "
        told += f"{moved} of them moved"
        words.append(told if differ or any(lone) else SAME)
        print(f"{name:15}{steps:5}  " + "".join(f"{word:21}" for word in words).rstrip())
        for side, paths in zip("AB", lone):
            print("".join(f"    in {side} alone: {path}\n" for path in paths), end="")
        same = same and set(words) <= {SAME, "-"}
    return same


def main() -> None:
    """Run all, one, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, help="file of the result")
    parser.add_argument("--compare", type=pathlib.Path, nargs=2, metavar=("A", "B"))
    parser.add_argument("--run", choices=RUNS, help="this one here; prints its part of the result")
    args = parser.parse_args()
    if args.compare:
        a, b = (json.loads(path.read_text())["runs"] for path in args.compare)
        raise SystemExit(0 if compare(a, b) else 1)
    if args.run:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(train(args.run, pathlib.Path(folder))))
        return
    if not args.output:
        parser.error("--output=FILE or --compare A B")
    result: dict[str, Any] = {"environment": environment() | {"command": COMMAND}, "runs": {}}
    for name in RUNS:
        result["runs"][name] = in_a_process(name)
        print(name, result["runs"][name]["seconds"], "s", flush=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
