"""The script for a lent GPU runs whole on a CPU, so that no device time goes on its mistakes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_every_kind_of_part_runs(tmp_path):
    pytest.importorskip("torch", reason="the peer; Python 3.11 only")
    env = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", XLA_FLAGS="")
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiles faster
    chosen = (
        "parity,experts/kernel/float32,step/auto/dots/2,torch/eager/checkpointing,"
        "step/no-such-kernel/none/1"
    )
    command = ["benchmarks/gpu.py", "--tiny", f"--output={tmp_path}", f"--parts={chosen}"]
    subprocess.run([sys.executable, *command], cwd=ROOT, env=env, check=True, capture_output=True)
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert all(case["within_bounds"] for case in result["parity"].values()), result["parity"]
    experts = result["experts/kernel/float32"]
    assert max(experts["errors"]) < 1e-5 and experts["all"]["median_ms"] > 0
    step, peer = result["step/auto/dots/2"], result["torch/eager/checkpointing"]
    assert step["last_loss"] < step["first_loss"]
    assert step["compiler_memory_gib"]["peak"] > 0
    assert step["parameters"] == peer["parameters"]
    assert "no-such-kernel" in str(result["step/no-such-kernel/none/1"]["error"])
