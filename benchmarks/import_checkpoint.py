"""Loading a checkpoint of 2 billion parameters: seconds and host memory, ours and transformers'.

    PYTHONPATH=. python benchmarks/import_checkpoint.py

The checkpoint is InternVL3-2B's dims with random bfloat16 weights in files of 2 GB. Each run is a
process of its own, theirs and ours in turn: ``transformers.from_pretrained`` to CPU, ours to one
device, and ours to a mesh of eight CPU devices (fsdp=4, tensor=2); all in bfloat16. After the
load every parameter is read once, so that weights which are only mapped count too. Memory is what
the process has gained since its imports: ``anonymous`` is its own (RssAnon, sampled every 2 ms),
``resident`` counts the pages of the files too (VmHWM), which the system can take back. A CPU
device's memory is the host's, so ours holds all parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.common import HERE, ROOT, environment, write

CONTESTANTS = ("transformers", "ours", "ours_eight_devices")
QWEN2_5_1_5B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}


def make_checkpoint(folder: pathlib.Path) -> dict[str, Any]:
    """Write the folder; its parameters and bytes."""
    from jaxvlm.hf import model_zoo

    config = json.loads(json.dumps(model_zoo.published_config("internvl3-8b")))
    config["text_config"] |= QWEN2_5_1_5B
    size = model_zoo.write_random(config, folder)
    return {"parameters": model_zoo.num_parameters(config), "bytes": size}


def run(name: str, folder: pathlib.Path) -> dict[str, float]:
    """One load in a process of its own."""
    env = dict(os.environ, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", JAX_PLATFORMS="cpu")
    if name == "ours_eight_devices":
        env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    worker = HERE / "workers" / "load_checkpoint.py"
    done = subprocess.run(
        [sys.executable, str(worker), name, str(folder)],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="an existing checkpoint instead of a random one")
    args = parser.parse_args()
    start = environment()
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(args.folder or made)
        size = {} if args.folder else make_checkpoint(folder)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        for _ in range(args.rounds):
            for name in CONTESTANTS:
                runs[name].append(run(name, folder))
                print(name, runs[name][-1], flush=True)
    medians = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]}
        for name, found in runs.items()
    }
    theirs = medians["transformers"]
    ratios = {
        name: {key: round(medians[name][key] / theirs[key], 3) for key in theirs}
        for name in CONTESTANTS[1:]
    }
    result = {**start, "checkpoint": size, "median": medians, "ours_over_theirs": ratios}
    write("import_checkpoint_cpu.json", result | {"runs": runs})


if __name__ == "__main__":
    main()
