"""The README's quickstart from start to report, on this machine.

    PYTHONPATH=. python benchmarks/quickstart.py [--seeds 0 1 2]

Writes exact match on easy-VQA's official test split by kind of question, the blind control, the
minutes of training (compiling, checkpoints and the evaluation counted in), and the share of the
time in which a step waited for data. Target: 99.5 % in ten minutes on two CPU cores, waiting for
data less than 2 % of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.common import ROOT, environment, write
from jaxvlm.train.metrics import read_metrics


def one_run(seed: int, isa: str = "") -> dict:
    """Train with a seed; ``isa`` is the instruction set that the compiler is held to."""
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, "-m", "jaxvlm", "train", f"--workdir={workdir}", "--json"]
        command += [f"--config={ROOT / 'configs' / 'quickstart.py'}", f"--config.seed={seed}"]
        command += ["--config.compile_cache="]  # every start is a cold one
        env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        if isa:
            env["XLA_FLAGS"] = f"--xla_cpu_max_isa={isa}"
        begin = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
        whole = time.perf_counter() - begin
        rows = [row for row in read_metrics(workdir) if "train/step_ms" in row]
        result = json.loads(done.stdout.splitlines()[-1])
    seconds = sum(row["train/seconds"] for row in rows)
    waited = sum(row["train/seconds"] * row["train/wait_share"] for row in rows)
    result["seed"] = seed
    result["process_seconds"] = round(whole, 1)
    result["step_ms_median"] = round(statistics.median(row["train/step_ms"] for row in rows), 1)
    result["tokens_per_s_median"] = round(
        statistics.median(row["train/tokens_per_s"] for row in rows)
    )
    mfu = [row["train/mfu"] for row in rows if "train/mfu" in row]
    result["mfu_median"] = round(statistics.median(mfu), 3) if mfu else None
    result["wait_share"] = waited / seconds
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        runs.append(one_run(seed))
        print(json.dumps(runs[-1], indent=1))
    write("quickstart_cpu.json", {"environment": environment(), "runs": runs})


if __name__ == "__main__":
    main()
